"""Compares answers with those of a run in which nothing was retracted, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvtide.sizes import counted

if TYPE_CHECKING:
    from kvtide.serve.options import EngineOptions
    from kvtide.serve.request import Request


@dataclass(frozen=True)
class Verdict:
    """Whether two runs are equal; `reason` is the evidence or the first difference."""

    verified: bool
    reason: str

    def __str__(self) -> str:
        return f"{'true' if self.verified else 'false'} ({self.reason})"


@dataclass(frozen=True)
class KeptLine:
    """The line of a prompt that an earlier run answered, and the line that the other run gives."""

    prompt_id: str
    line: Mapping[str, Any]
    reference: Mapping[str, Any]


def reference_options(options: EngineOptions) -> EngineOptions:
    """How the engine of the other run is built: a request waits until it has room to its end.

    So nothing is retracted, however little memory is free, and the pool is as large as what runs at
    once needs. Nothing goes to host memory, and nothing comes from a tier or from the KV of another
    request. Everything that changes an answer stays as it is.
    """
    return replace(
        options,
        kv_memory_bytes=None,
        host_memory_bytes=0,
        disk_dir=None,
        disk_memory_bytes=None,
        mooncake=None,
        on_pressure="wait",
        share_prefixes=False,
    )


def reference_requests(answered: Sequence[Request]) -> list[Request]:
    """The same requests anew. Each needs room for no more tokens than its answer has.

    An answer that wouldn't end there in the other run shows nevertheless: it ends by its length.
    """
    from kvtide.serve.request import Request

    return [
        Request(
            request.id,
            request.prompt_ids,
            request.params
            if request.finish_reason == "length"
            else replace(request.params, max_new_tokens=max(1, len(request.output_ids))),
        )
        for request in answered
    ]


def compare_runs(
    answered: Sequence[Request], reference: Sequence[Request], kept: Sequence[KeptLine] = ()
) -> Verdict:
    """Compares requests pair by pair, and names the first request and step that differ.

    A request's `logit_digests` holds a 128-bit XXH3 hash of the logits for each of its
    `output_ids`. Different logits have equal hashes by chance once in 2**128 times. Of a kept
    answer only the line is left to be compared.
    """
    for ours, theirs in zip(answered, reference, strict=True):
        difference = _first_difference(ours, theirs)
        if difference is not None:
            return Verdict(False, f"request {ours.id!r}, {difference}")
    for pair in kept:
        difference = _different_field(pair)
        if difference is not None:
            return Verdict(False, f"request {pair.prompt_id!r}, {difference}")
    if not answered and not kept:
        return Verdict(False, "every request failed, so there is nothing to compare")
    return Verdict(True, _evidence(answered, kept))


def _evidence(answered: Sequence[Request], kept: Sequence[KeptLine]) -> str:
    steps = sum(len(request.output_ids) for request in answered)
    said = []
    if answered:
        said.append(
            f"{counted(len(answered), 'request')}: all tokens, and the logits of "
            f"{counted(steps, 'step')} bit for bit, are the same as in a run in which nothing was "
            "retracted"
        )
    if kept:
        said.append(
            f"{counted(len(kept), 'answer')} of earlier runs: the lines are the same as those of "
            "such a run, and no logits of theirs are left to compare"
        )
    return "; ".join(said)


def _different_field(pair: KeptLine) -> str | None:
    ours, theirs = _compared(pair.line), _compared(pair.reference)
    names = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
    if not names:
        return None
    return f"an answer of an earlier run: its {names[0]!r} is not that of a run without retractions"


def _compared(line: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a line that neither memory nor names decide, as JSON gives them back."""
    fields: dict[str, Any] = json.loads(json.dumps(line))
    # A line of a file may hold anything in any place.
    samples = fields["samples"] if isinstance(fields.get("samples"), list) else []
    for part in [fields, *samples]:
        if isinstance(part, dict):
            part.pop("retractions", None)
            part.pop("cached_tokens", None)
    fields.pop("key", None)
    response = fields.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    if isinstance(body, dict):
        body.pop("model", None)  # the key told that it is the same model, whatever its name
    return fields


def _first_difference(ours: Request, reference: Request) -> str | None:
    assert ours.id == reference.id, "the requests are paired wrongly"
    if reference.error is not None:
        return f"which failed in the run without retractions: {reference.error}"
    assert reference.retractions == 0, "the run to compare with had retractions"
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
    if ours.finish_reason != reference.finish_reason:
        return f"step {count}: the end is {ours.finish_reason!r}, not {reference.finish_reason!r}"
    return None
