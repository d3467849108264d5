"""Trial passes of the self-check: does a request get the same bits in any company?

`TrialPasses` also makes the probes of a model's operations, since it knows the model's sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvtide.device import Device
from kvtide.pool import Pool
from kvtide.serve.adapter import HookedModel, PreTrainedModel
from kvtide.serve.attention import MOST_IN_BUCKET, AttentionPlan
from kvtide.serve.batch import ExactRules, PackedBatch, Segment
from kvtide.serve.operations import PassWatch, trial_row_count
from kvtide.serve.paged import PagedModel
from kvtide.serve.probes import (
    AttentionProbe,
    AttentionSizes,
    CutProbe,
    Probe,
    ProductProbe,
    SingleProbe,
)
from kvtide.serve.supported import geometry_of

# A weight with more numbers than this (a vocabulary) is measured at only a few counts of a set.
_LARGE_WEIGHT = 8_000_000
SAMPLES = 8
# Context lengths for attention; True means that many numbers of requests are tried, not few.
_LENGTHS = ((64, True), (128, False), (320, False), (1088, False))
_PROMPT_LENGTHS = (64, 288, 544, 1088)
_PAGE_SIZE = 16
_SHARED_SLOTS = 144
_SEED = 20240517


def spread(counts: Sequence[int], most: int) -> list[int]:
    """At most `most` of `counts`, evenly spread, with both ends."""
    last = len(counts) - 1
    return sorted({counts[last * step // (most - 1)] for step in range(most)})


class TrialPasses:
    """Makes probes for a model, and runs trial passes of it."""

    def __init__(self, model: PreTrainedModel, device: Device, max_rows: int) -> None:
        self._model = model
        self._device = device
        self._max_rows = max_rows
        self._geometry = geometry_of(model.config, model.dtype, _PAGE_SIZE)

    def probes(self) -> tuple[list[Probe], list[Probe]]:
        """Probes for the operations of a pass; those with large weights are the second list."""
        watch = self._watched_pass()
        device = self._device.torch_device
        small: list[Probe] = []
        large: list[Probe] = []
        for product in watch.products:
            is_large = product.out_features * product.in_features > _LARGE_WEIGHT
            probe = ProductProbe(product, device, self._max_rows)
            (large if is_large else small).append(probe)
        singles = [SingleProbe(operation, device) for operation in watch.singles]
        small += [probe for probe in singles if probe.may_differ]
        return small, large

    def attention_probes(self) -> list[tuple[AttentionProbe, Sequence[int]]]:
        """Probes of attention, each with the numbers of requests to try."""
        sizes = self._attention_sizes()
        most = min(self._max_rows, MOST_IN_BUCKET)
        many = sorted({*range(2, min(most, 9)), *spread(range(1, most + 1), SAMPLES)})
        few = [2, min(most, 3), most]
        return [
            (
                AttentionProbe(sizes, self._device.torch_device, length, of_scores=of_scores),
                many if by_many else few,
            )
            for length, by_many in _LENGTHS
            for of_scores in (True, False)
        ]

    def cut_probes(self) -> list[CutProbe]:
        """Probes of attention that compute a block of a prompt in one step and in two."""
        sizes, device = self._attention_sizes(), self._device.torch_device
        return [
            CutProbe(sizes, device, length, of_scores=of_scores)
            for length in _PROMPT_LENGTHS
            for of_scores in (True, False)
        ]

    def _attention_sizes(self) -> AttentionSizes:
        config = self._model.config.get_text_config(decoder=True)
        pool = self._pool(1)
        (kv_heads, head_dim), (_, v_head_dim) = (pool.plane(n, 0).shape[1:] for n in ("k", "v"))
        return AttentionSizes(
            config.num_attention_heads, kv_heads, head_dim, v_head_dim, self._model.dtype
        )

    def passes_agree(self, rules: ExactRules, chunks: bool) -> bool:
        """Whether a request gets the same bits in passes with different other requests.

        With `chunks` each request has several queries, as chunks of prompts have; otherwise one.
        Where prompts may be cut anywhere, half of the requests are computed in two steps, too.
        """
        rows = rules.chunk_rows if chunks else rules.rows
        most = rows.most if chunks else min(rows.most, MOST_IN_BUCKET)
        members = _members(most, chunks=chunks)
        slot_count = 2 * (_SHARED_SLOTS + sum(member.count for member in members))
        half = slot_count // 2
        pool = self._pool(-(-slot_count // _PAGE_SIZE))
        generator = torch.Generator().manual_seed(_SEED)
        for plane in self._geometry.planes:
            for layer in range(plane.layer_count):
                typed = pool.plane(plane.name, layer)
                # The host's random numbers, so that all devices get the same.
                numbers = torch.randn(half, *typed.shape[1:], generator=generator).to(typed)
                typed[:half], typed[half:slot_count] = numbers, numbers
        paged = PagedModel(self._model, pool, exact=rules)
        try:
            whole = self._outcomes(paged, pool, members, 0)
            for some, base in _trial_passes(members, half, generator):
                is_cut = rules.query_rows is not None and chunks and len(some) > 1
                found = self._outcomes(paged, pool, some, base, is_cut=is_cut)
                expected = [whole[member.number] for member in some]
                if not all(map(torch.equal, expected, found)):
                    return False
        finally:
            paged.release()
        return True

    def _outcomes(
        self,
        paged: PagedModel,
        pool: Pool,
        members: Sequence[_Member],
        base: int,
        *,
        is_cut: bool = False,
    ) -> list[Tensor]:
        """For each member, as bytes, its logits and the keys and values that were written.

        If `is_cut` each member is computed in two steps.
        """
        if not is_cut:
            return [torch.cat(pair) for pair in self._step(paged, pool, members, base)]
        first = self._step(paged, pool, [member.halves()[0] for member in members], base)
        second = self._step(paged, pool, [member.halves()[1] for member in members], base)
        return [
            torch.cat([logits, early, late])
            for (_, early), (logits, late) in zip(first, second, strict=True)
        ]

    def _step(
        self, paged: PagedModel, pool: Pool, members: Sequence[_Member], base: int
    ) -> list[tuple[Tensor, Tensor]]:
        """For each member, as bytes, its logits and the keys and values that the step wrote."""
        batch = _requests(self._model, members, base)
        logits = paged.forward(batch)
        slots = batch.out_slots.to(self._device.torch_device)
        written = torch.cat(
            [
                pool.plane(plane.name, layer)[slots].flatten(1).cpu().view(torch.uint8)
                for plane in self._geometry.planes
                for layer in range(plane.layer_count)
            ],
            1,
        )
        found = []
        for scores, segment in zip(logits, batch.segments, strict=True):
            rows = written[segment.first : segment.first + segment.count]
            found.append((scores.contiguous().view(torch.uint8), rows.flatten()))
        return found

    def _watched_pass(self) -> PassWatch:
        """Watches a pass of padding, which writes no slot."""
        count = trial_row_count(self._model)
        device = self._device.torch_device
        # Each row has another position, so that rows differ.
        positions = torch.arange(count, device=device)
        hooked = HookedModel(self._model, self._pool(1), experts_by_token=True)
        try:
            watch = PassWatch(count)
            with watch:
                nothing = positions[:0]
                hooked.run(positions * 0, positions, nothing, AttentionPlan(count, ()), 0)
        finally:
            hooked.release()
        return watch

    def _pool(self, page_count: int) -> Pool:
        return Pool.create(self._geometry, self._device, page_count=page_count)


@dataclass(frozen=True)
class _Member:
    """A request of the trial passes. Its last `count` tokens are computed."""

    number: int
    count: int
    first_slot: int
    """The slot of its first computed token, counted behind the shared slots."""
    of_prompt: bool
    done: int = 0
    """How many of these tokens an earlier step has computed."""

    def halves(self) -> tuple[_Member, _Member]:
        """The member in two steps, of which one may be a single token."""
        first = 1 + self.number % (self.count - 1)
        return replace(self, count=first), replace(self, done=first)

    @property
    def earlier(self) -> int:
        """How many tokens come before the computed ones."""
        return self.number * 37 % _SHARED_SLOTS


def _members(most: int, *, chunks: bool) -> list[_Member]:
    """Requests that fill a pass of `most` rows, or nearly: several, if it has room for two rows."""
    members: list[_Member] = []
    used = 0
    longest = min(most, max(2, most // 4)) if chunks else 1
    while True:
        count = min(longest, 3 + len(members) * 23 % 59)
        if members and used + count > most:
            return members
        members.append(_Member(len(members), count, used, chunks))
        used += count


def _trial_passes(
    members: Sequence[_Member], half: int, generator: torch.Generator
) -> Iterator[tuple[list[_Member], int]]:
    """The members of each trial pass, and the first slot of the copy of the KV that they use.

    The passes are: one member; half of the members in another order; all members if each has one
    row; many copies of one member.
    """
    everyone, total = len(members), sum(member.count for member in members)
    is_cheap = total == everyone
    for step, count in enumerate(sorted({1, everyone // 2 | 1, everyone if is_cheap else 1}), 1):
        order = torch.randperm(everyone, generator=generator)[: min(count, everyone)]
        yield [members[number] for number in order.tolist()], half * (step % 2)
    for number in sorted({0, everyone // 3, everyone - 1} if is_cheap else {everyone // 2}):
        member = members[number]
        yield [member] * max(1, min(64, total) // member.count), 0


def _requests(model: PreTrainedModel, members: Sequence[_Member], base: int) -> PackedBatch:
    """A batch of the members' queries. Their contexts share all slots before the computed ones."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    segments: list[Segment] = []
    token_ids: list[int] = []
    positions: list[int] = []
    out_slots: list[Tensor] = []
    for member in members:
        computed = base + _SHARED_SLOTS + member.first_slot + torch.arange(member.count)
        slots = torch.cat([torch.arange(base, base + member.earlier), computed])
        steps = range(member.done, member.count)
        segments.append(Segment(len(token_ids), len(steps), slots, member.of_prompt))
        first = member.number * 7919
        token_ids += [(first + step * 613) % vocabulary for step in steps]
        positions += [member.earlier + step for step in steps]
        out_slots.append(computed[member.done :])
    return PackedBatch(
        torch.tensor(token_ids),
        torch.tensor(positions),
        torch.cat(out_slots),
        tuple(segments),
        torch.tensor([segment.first + segment.count - 1 for segment in segments]),
    )
