"""Compares two runs of the same requests: every token, and the logits of every step bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.sizes import counted

if TYPE_CHECKING:
    from kvtide.serve.request import Request


@dataclass(frozen=True)
class Verdict:
    """Whether two runs are equal; `reason` is the evidence or the first difference."""

    verified: bool
    reason: str

    def __str__(self) -> str:
        return f"{'true' if self.verified else 'false'} ({self.reason})"


def compare_runs(constrained: Sequence[Request], unconstrained: Sequence[Request]) -> Verdict:
    """Compares requests pair by pair, and names the first request and step that differ.

    A request's `logit_digests` holds a 128-bit XXH3 hash of the logits for each of its
    `output_ids`. Different logits have equal hashes by chance once in 2**128 times.
    """
    for ours, reference in zip(constrained, unconstrained, strict=True):
        difference = _first_difference(ours, reference)
        if difference is not None:
            return Verdict(False, f"request {ours.id!r}, {difference}")
    if not constrained:
        return Verdict(False, "every request failed, so there is nothing to compare")
    steps = sum(len(request.output_ids) for request in constrained)
    return Verdict(
        True,
        f"{counted(len(constrained), 'request')}: all tokens, and the logits of "
        f"{counted(steps, 'step')} bit for bit, are the same as in a pool that holds everything",
    )


def _first_difference(ours: Request, reference: Request) -> str | None:
    assert ours.id == reference.id, "the requests are paired wrongly"
    if reference.error is not None:
        return f"which failed in the pool that holds everything: {reference.error}"
    for request in (ours, reference):
        assert len(request.logit_digests) == len(request.output_ids), "a step has no digest"
    for step, (token, expected, digest, expected_digest) in enumerate(
        zip(
            ours.output_ids,
            reference.output_ids,
            ours.logit_digests,
            reference.logit_digests,
            strict=False,
        )
    ):
        if token != expected:
            return f"step {step}: token {token} instead of {expected}"
        if digest != expected_digest:
            return f"step {step}: the right token {token}, but from other logits"
    count, expected_count = len(ours.output_ids), len(reference.output_ids)
    if count != expected_count:
        return f"step {min(count, expected_count)}: {count} tokens instead of {expected_count}"
    return None
