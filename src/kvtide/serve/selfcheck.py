"""The self-check of exact mode: at which row counts does a row get the same bits?

A library chooses how it computes a row. The choice may depend on the number of rows, the sizes, the
dtype, the instruction set, the number of threads, the thread that computes the row, and the row's
place in memory. Libraries promise little of this, so it is measured at each start, on this machine
and with the current number of threads:

1. A pass of the model is watched for its operations (`kvtide.serve.operations`). Each operation is
   tried at every row count up to 64 and at some up to `max_rows`, with every row in every place, on
   numbers that reveal how it was computed (`kvtide.serve.probes`). Row counts with the same results
   make a set.
2. Attention is tried in the same manner, with the model's heads and widths, for several context
   lengths and up to 64 requests in a call. If the results depend on the number of requests, each
   request gets a call by itself.
3. The cheapest set is tried with whole passes of the model over a small pool. A pass of all trial
   requests must give each the same bits as passes of some of them in another order and with other
   slots, and as passes of many copies of one of them. This is done for answer tokens (one row per
   request) and for chunks of prompts (several rows per request).

A set may have a single count: then every pass has exactly that many rows, in the worst case one. If
not even one row repeats its bits, exact mode is impossible.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtide.device import Device
from kvtide.pool import Pool
from kvtide.serve.adapter import HookedModel, PreTrainedModel
from kvtide.serve.attention import MOST_IN_BUCKET, AttentionPlan
from kvtide.serve.batch import ExactRules, PackedBatch, RowCounts, Segment
from kvtide.serve.operations import PassWatch, trial_row_count
from kvtide.serve.paged import PagedModel
from kvtide.serve.probes import AttentionProbe, AttentionSizes, Probe, ProductProbe, SingleProbe
from kvtide.serve.repeatable import is_mkl_repeatable
from kvtide.serve.supported import geometry_of

# A weight with more numbers than this (a vocabulary) is measured at only a few counts of a set.
_LARGE_WEIGHT = 8_000_000
_SAMPLES = 8
# Context lengths for attention; True means that many numbers of requests are tried, not few.
_LENGTHS = ((64, True), (128, False), (320, False), (1088, False))
_PAGE_SIZE = 16
_SHARED_SLOTS = 144
# Requests share no pass.
_ALONE = RowCounts((1,))
_SEED = 20240517


@dataclass(frozen=True)
class RowCheck:
    """The result of `find_rows`."""

    rules: ExactRules | None
    """The rules for passes, or None if no row count is safe."""
    detail: str
    """One line for people: what was measured, and what makes exact mode slow here."""
    seconds: float

    @property
    def exact_rows(self) -> str | None:
        """The row counts as text, such as `4 to 64`."""
        return None if self.rules is None else str(self.rules.rows)


@torch.inference_mode()
def find_rows(model: PreTrainedModel, device: Device, *, max_rows: int = 256) -> RowCheck:
    """Measures which passes of up to `max_rows` rows are exact on `device`.

    The model must be on the device; it isn't changed. Blocks, for about a second with a small
    model, and allocates a small pool meanwhile. Raises UsageError for a model that isn't served.
    """
    start = time.perf_counter()
    trial = _Trial(model, device, max_rows)
    small, large = trial.probes()
    sets, of_rows = _agreeing_sets(small, _tried_counts(max_rows))
    of_attention = _split_by_neighbours(trial.attention_probes())

    def rules_with(rows: RowCounts, chunk_rows: RowCounts) -> ExactRules:
        return ExactRules(rows, chunk_rows, share_attention=not of_attention)

    def is_safe(rules: ExactRules, *, chunks: bool) -> bool:
        rows = rules.chunk_rows if chunks else rules.rows
        known = chunks and rows == rules.rows  # large weights were tried at them for answers
        agree = known or all(_agree(probe, rows) for probe in large)
        return agree and trial.passes_agree(rules, chunks)

    candidates = _candidates(sets, (1, 2, 4, 8, 16, 32, 64))
    safe = (rows for rows in candidates if is_safe(rules_with(rows, _ALONE), chunks=False))
    rows = next(safe, None)
    if rows is None:
        tried = "; ".join(map(str, candidates)) or "none"
        detail = f"no row count up to {max_rows} is safe here (tried {tried}); {_remedy()}"
        return RowCheck(None, detail, time.perf_counter() - start)
    for chunk_rows in _candidates(sets, (16, 32, 64, 128, 256)):
        if is_safe(rules_with(rows, chunk_rows), chunks=True):
            break
    else:
        chunk_rows = _ALONE
    rules = rules_with(rows, chunk_rows)
    detail = f"passes of {_counted(rows)} agree bit for bit"
    if rows != chunk_rows:
        detail += f", for prompts of {_counted(chunk_rows)}"
    detail += _explain_speed(rules, of_rows, of_attention)
    return RowCheck(rules, detail, time.perf_counter() - start)


def _tried_counts(max_rows: int) -> list[int]:
    """All row counts that steps of answer tokens have, and some larger ones for prompts."""
    fine = min(max_rows, MOST_IN_BUCKET)
    return [*range(1, fine + 1), *range(fine + 32, max_rows + 1, 32)]


def _agreeing_sets(
    probes: Sequence[Probe], counts: Sequence[int]
) -> tuple[list[RowCounts], list[str]]:
    """Sets of row counts at which all probes agree, and the names of probes that split them."""
    kinds: dict[int, list[int | None]] = {count: [] for count in counts}
    splitters: dict[str, None] = {}
    for probe in probes:
        found = _kinds_of(probe, counts)
        for count in counts:
            kinds[count].append(found[count])
        if len(set(found.values())) > 1 or None in found.values():
            splitters.setdefault(probe.name)
    sets: dict[tuple[int | None, ...], list[int]] = defaultdict(list)
    for count in counts:
        if None not in kinds[count]:
            sets[tuple(kinds[count])].append(count)
    return [RowCounts(tuple(alike)) for alike in sets.values()], list(splitters)


def _kinds_of(probe: Probe, counts: Sequence[int]) -> dict[int, int | None]:
    """For each count a number: equal for equal row results, None if rows in one pass differ."""
    outcomes: list[Tensor] = []
    found: dict[int, int | None] = {}
    for count in counts:
        outcome = probe.outcome(count)
        if outcome is None:
            found[count] = None
            continue
        alike = (number for number, other in enumerate(outcomes) if torch.equal(outcome, other))
        found[count] = next(alike, len(outcomes))
        if found[count] == len(outcomes):
            outcomes.append(outcome)
    return found


def _split_by_neighbours(probes: Sequence[tuple[AttentionProbe, Sequence[int]]]) -> list[str]:
    """The name of the first probe whose bits depend on the number of requests in a call."""
    for probe, counts in probes:
        if set(_kinds_of(probe, [1, *counts]).values()) != {0}:
            return [probe.name]
    return []


def _agree(probe: Probe, rows: RowCounts) -> bool:
    """Whether the probe's rows have the same bits at a sample of these counts."""
    return set(_kinds_of(probe, _spread(rows.counts, _SAMPLES)).values()) == {0}


def _candidates(sets: list[RowCounts], steps: Sequence[int]) -> list[RowCounts]:
    """Row counts to try: the two sets that make these steps cheapest, then single counts."""
    best = sorted(sets, key=lambda rows: _cost(rows, steps))[:2]
    singles = [
        RowCounts((count,)) for count in (32, 16, 1) if any(count in rows.counts for rows in sets)
    ]
    return best + [rows for rows in singles if rows not in best]


def _cost(rows: RowCounts, steps: Sequence[int]) -> float:
    """The relative time of steps of these row counts, if 64 more rows double a pass's time."""
    total = 0.0
    for wanted in steps:
        full, rest = divmod(wanted, rows.most)
        total += full + (rest > 0) + (full * rows.most + rows.padded(rest)) / 64
    return total


def _explain_speed(rules: ExactRules, of_rows: Sequence[str], of_attention: Sequence[str]) -> str:
    """Why exact mode is slow here, and a remedy; empty if it isn't."""
    rows = rules.rows
    costs = []
    if rows.most < 16 or rows.padded(1) > 8:
        why = f", since other numbers of rows change {' and '.join(of_rows)}" if of_rows else ""
        costs.append(f"all passes have {_counted(rows)}{why}")
    if not rules.share_attention:
        changed = " and ".join(of_attention)
        costs.append(f"each request needs a call by itself, since others in it change {changed}")
    return f"; that is slow: {'; '.join(costs)}; {_remedy()}" if costs else ""


def _counted(rows: RowCounts) -> str:
    return "1 row" if rows.counts == (1,) else f"{rows} rows"


def _remedy() -> str:
    if is_mkl_repeatable() is False:
        return (
            "torch computed before kvtide.serve was imported, so MKL doesn't repeat its results: "
            "import it first, or set MKL_CBWR=AUTO"
        )
    return "--threads 1 may help, and --fast does without exactness"


def _spread(counts: Sequence[int], most: int) -> list[int]:
    """At most `most` of `counts`, evenly spread, with both ends."""
    last = len(counts) - 1
    return sorted({counts[last * step // (most - 1)] for step in range(most)})


class _Trial:
    """Makes probes for a model, and runs trial passes of it."""

    def __init__(self, model: PreTrainedModel, device: Device, max_rows: int) -> None:
        self._model = model
        self._device = device
        self._max_rows = max_rows
        self._geometry = geometry_of(model.config, model.dtype, _PAGE_SIZE)

    def probes(self) -> tuple[list[Probe], list[Probe]]:
        """Probes for the operations of a pass; those with large weights are the second list."""
        watch = self._watched_pass()
        device, dtype = self._device.torch_device, self._model.dtype
        small: list[Probe] = []
        large: list[Probe] = []
        for product in watch.products:
            is_large = product.out_features * product.in_features > _LARGE_WEIGHT
            probe = ProductProbe(product, dtype, device, self._max_rows)
            (large if is_large else small).append(probe)
        singles = [SingleProbe(operation, device) for operation in watch.singles]
        small += [probe for probe in singles if probe.may_differ]
        return small, large

    def attention_probes(self) -> list[tuple[AttentionProbe, Sequence[int]]]:
        """Probes of attention, each with the numbers of requests to try."""
        config = self._model.config.get_text_config(decoder=True)
        pool = self._pool(1)
        (kv_heads, head_dim), (_, v_head_dim) = (pool.plane(n, 0).shape[1:] for n in ("k", "v"))
        sizes = AttentionSizes(
            config.num_attention_heads, kv_heads, head_dim, v_head_dim, self._model.dtype
        )
        most = min(self._max_rows, MOST_IN_BUCKET)
        many = sorted({*range(2, min(most, 9)), *_spread(range(1, most + 1), _SAMPLES)})
        few = [2, min(most, 3), most]
        return [
            (
                AttentionProbe(sizes, self._device.torch_device, length, of_scores=of_scores),
                many if by_many else few,
            )
            for length, by_many in _LENGTHS
            for of_scores in (True, False)
        ]

    def passes_agree(self, rules: ExactRules, chunks: bool) -> bool:
        """Whether a request gets the same bits in passes with different other requests.

        With `chunks` each request has several queries, as chunks of prompts have; otherwise one.
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
                found = self._outcomes(paged, pool, some, base)
                expected = [whole[member.number] for member in some]
                if not all(map(torch.equal, expected, found)):
                    return False
        finally:
            paged.release()
        return True

    def _outcomes(
        self, paged: PagedModel, pool: Pool, members: Sequence[_Member], base: int
    ) -> list[Tensor]:
        """For each member, as bytes, its logits and the keys and values that the pass wrote."""
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
            found.append(torch.cat([scores.contiguous().view(torch.uint8), rows.flatten()]))
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

    @property
    def earlier(self) -> int:
        """How many tokens come before the computed ones."""
        return self.number * 37 % _SHARED_SLOTS


def _members(most: int, *, chunks: bool) -> list[_Member]:
    """Requests that fill a pass of `most` rows, or nearly."""
    members: list[_Member] = []
    used = 0
    while True:
        count = min(most, 2 + len(members) * 7 % 11) if chunks else 1
        if members and used + count > most:
            return members
        members.append(_Member(len(members), count, used))
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
        shared = torch.arange(base, base + member.earlier)
        segments.append(Segment(len(token_ids), member.count, torch.cat([shared, computed])))
        first = member.number * 7919
        token_ids += [(first + step * 613) % vocabulary for step in range(member.count)]
        positions += range(member.earlier, member.earlier + member.count)
        out_slots.append(computed)
    return PackedBatch(
        torch.tensor(token_ids),
        torch.tensor(positions),
        torch.cat(out_slots),
        tuple(segments),
        torch.tensor([segment.first + segment.count - 1 for segment in segments]),
    )
