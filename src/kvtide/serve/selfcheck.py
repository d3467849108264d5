"""The start-up self-check of exact mode: at which row counts does a row get the same bits?

How a library computes a row is its own choice, by the number of rows, the sizes, the dtype, the
instruction set, the number of threads, which of them computes it and where it lies in memory.
Little of that is promised, so it is measured, at each start, on this machine, with the threads in
force:

1. A pass of the model is watched for its operations (`kvtide.serve.operations`). Each of them is
   tried at every row count up to ``max_rows``, and at every place, with numbers that show how it
   was computed (`kvtide.serve.probes`). That sorts the counts into sets that agree.
2. So is attention, with the model's own heads and widths, for contexts of several lengths and up to
   ``max_rows`` requests at once. Where it depends on them, each request has a call of its own.
3. The set that costs least is then tried with whole passes of the model over a small pool: some of
   the requests, in another order and from other slots, against all of them, and many copies of one.

A set may be a single count: then every pass has exactly that many rows; in the worst case one,
each request by itself. Where not even that repeats its bits, exact mode can't be had.
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
from kvtide.serve.attention import AttentionPlan
from kvtide.serve.batch import ExactRules, PackedBatch, RowCounts, Segment
from kvtide.serve.operations import PassWatch, trial_row_count
from kvtide.serve.paged import PagedModel
from kvtide.serve.probes import AttentionProbe, AttentionSizes, Probe, ProductProbe, SingleProbe
from kvtide.serve.repeatable import is_mkl_repeatable
from kvtide.serve.supported import geometry_of

# A weight of more numbers than this (a vocabulary) is measured at a few counts of a set only.
_LARGE_WEIGHT = 8_000_000
_SAMPLES = 8
# Contexts that attention is tried with, and whether by many requests at once or by few.
_LENGTHS = ((64, True), (128, False), (320, False), (1088, False))
_PAGE_SIZE = 16
_SHARED_SLOTS = 144
_SEED = 20240517


@dataclass(frozen=True)
class RowCheck:
    """What `find_rows` found."""

    rules: ExactRules | None
    """How passes are made up, or None where no row count is safe."""
    detail: str
    """One line for people: what was measured, and what costs speed and why."""
    seconds: float

    @property
    def exact_rows(self) -> str | None:
        """The row counts, such as "4 to 64"."""
        return None if self.rules is None else str(self.rules.rows)


@torch.inference_mode()
def find_rows(model: PreTrainedModel, device: Device, *, max_rows: int = 64) -> RowCheck:
    """Measures how passes of up to ``max_rows`` rows can be exact on ``device``, now.

    The model is on it already. Blocks, for about a second with a small model; allocates a small
    pool for the time being and leaves the model as it was. Raises UsageError for a model that
    isn't served.
    """
    start = time.perf_counter()
    trial = _Trial(model, device, max_rows)
    small, large = trial.probes()
    sets, of_rows = _agreeing_sets(small, max_rows)
    of_attention = _split_by_company(trial.attention_probes())
    tried: list[str] = []
    for rows in _candidates(sets):
        rules = ExactRules(rows, share_attention=not of_attention)
        if all(_agree(probe, rows) for probe in large) and trial.passes_agree(rules):
            detail = f"passes of {rows} rows agree bit for bit"
            detail += _explain_speed(rules, of_rows, of_attention)
            return RowCheck(rules, detail, time.perf_counter() - start)
        tried.append(str(rows))
    whole = f"no row count up to {max_rows} is safe here (tried {'; '.join(tried) or 'none'})"
    detail = f"{whole}; {_remedy()}"
    return RowCheck(None, detail, time.perf_counter() - start)


def _agreeing_sets(probes: Sequence[Probe], max_rows: int) -> tuple[list[RowCounts], list[str]]:
    """The sets of row counts at which the rows of all probes agree; who splits them, by name."""
    counts = range(1, max_rows + 1)
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
    return [RowCounts(tuple(one)) for one in sets.values()], list(splitters)


def _kinds_of(probe: Probe, counts: Sequence[int]) -> dict[int, int | None]:
    """Row counts whose rows agree have the same number; None is for those where places matter."""
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


def _split_by_company(probes: Sequence[tuple[AttentionProbe, Sequence[int]]]) -> list[str]:
    """The first probe, by name, whose requests get other bits in company than alone."""
    for probe, counts in probes:
        if set(_kinds_of(probe, [1, *counts]).values()) != {0}:
            return [probe.name]
    return []


def _agree(probe: Probe, rows: RowCounts) -> bool:
    """Whether the probe's rows agree at some of these counts and at other places."""
    return set(_kinds_of(probe, _spread(rows.counts, _SAMPLES)).values()) == {0}


def _candidates(sets: list[RowCounts]) -> list[RowCounts]:
    """What to try, best first: the two cheapest sets, then single counts."""
    best = sorted(sets, key=_cost)[:2]
    singles = [
        RowCounts((count,)) for count in (32, 16, 1) if any(count in rows.counts for rows in sets)
    ]
    return best + [rows for rows in singles if rows not in best]


def _cost(rows: RowCounts) -> float:
    """Relative time of steps of 1 to 64 requests, where 64 more rows double a pass's time."""
    total = 0.0
    for requests in (1, 2, 4, 8, 16, 32, 64):
        full, rest = divmod(requests, rows.most)
        total += full + (rest > 0) + (full * rows.most + rows.padded(rest)) / 64
    return total


def _explain_speed(rules: ExactRules, of_rows: Sequence[str], of_attention: Sequence[str]) -> str:
    """What exact mode costs here, why, and what to do; nothing where that is next to nothing."""
    rows = rules.rows
    ways = []
    if rows.most < 16 or rows.padded(1) > 8:
        why = f", since other numbers of rows change {' and '.join(of_rows)}" if of_rows else ""
        ways.append(f"passes of {rows} rows only{why}")
    if not rules.share_attention:
        changed = " and ".join(of_attention)
        ways.append(f"a call of the attention for each request, since company changes {changed}")
    return f"; that is slow: {'; '.join(ways)}; {_remedy()}" if ways else ""


def _remedy() -> str:
    if is_mkl_repeatable() is False:
        return (
            "torch computed before kvtide.serve was imported, so MKL doesn't repeat its results: "
            "import it first, or set MKL_CBWR=AUTO"
        )
    return "--threads 1 may help, and --fast does without exactness"


def _spread(counts: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of ``counts``, with both ends."""
    last = len(counts) - 1
    return sorted({counts[last * step // (most - 1)] for step in range(most)})


class _Trial:
    """The model at hand, on its device: its probes, and whole passes of it."""

    def __init__(self, model: PreTrainedModel, device: Device, max_rows: int) -> None:
        self._model = model
        self._device = device
        self._max_rows = max_rows
        dtype = str(model.dtype).removeprefix("torch.")
        self._geometry = geometry_of(model.config, dtype, _PAGE_SIZE)

    def probes(self) -> tuple[list[Probe], list[Probe]]:
        """Of each operation of a pass that may depend on its rows; those of large weights apart."""
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
        """And the numbers of requests to try each with."""
        config = self._model.config.get_text_config(decoder=True)
        pool = self._pool(1)
        (kv_heads, head_dim), (_, v_head_dim) = (pool.plane(n, 0).shape[1:] for n in ("k", "v"))
        sizes = AttentionSizes(
            config.num_attention_heads, kv_heads, head_dim, v_head_dim, self._model.dtype
        )
        most = self._max_rows
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

    def passes_agree(self, rules: ExactRules) -> bool:
        """Whether whole passes give each request the same bits whoever else is in them."""
        slot_count = 2 * (_SHARED_SLOTS + self._max_rows)
        half = slot_count // 2
        pool = self._pool(-(-slot_count // _PAGE_SIZE))
        generator = torch.Generator().manual_seed(_SEED)
        for plane in self._geometry.planes:
            for layer in range(plane.layer_count):
                typed = pool.plane(plane.name, layer)
                # Random numbers of the host, so that they are the same for every device.
                numbers = torch.randn(half, *typed.shape[1:], generator=generator).to(typed)
                typed[:half], typed[half:slot_count] = numbers, numbers
        paged = PagedModel(self._model, pool, exact=rules)
        try:
            everyone = list(range(rules.rows.most))
            whole = self._outcome(paged, pool, everyone, 0)
            return all(
                torch.equal(self._outcome(paged, pool, members, base), whole[members])
                for members, base in _companies(rules.rows.most, half, generator)
            )
        finally:
            paged.release()

    def _outcome(self, paged: PagedModel, pool: Pool, members: Sequence[int], base: int) -> Tensor:
        """Each member's logits, and the keys and values that its pass has written, as bytes."""
        batch = _requests(self._model, members, base)
        parts = [paged.forward(batch)]
        slots = batch.out_slots.to(self._device.torch_device)
        for plane in self._geometry.planes:
            for layer in range(plane.layer_count):
                parts.append(pool.plane(plane.name, layer)[slots].flatten(1).cpu())
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)

    def _watched_pass(self) -> PassWatch:
        """A pass of padding only, which writes to no slot."""
        count = trial_row_count(self._model)
        device = self._device.torch_device
        # As many positions as rows, so that no two of them are alike.
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


def _companies(most: int, half: int, generator: torch.Generator) -> Iterator[tuple[list[int], int]]:
    """Who is in each trial pass, and the slot from which their copy of the KV starts.

    Some of all in another order, and many of the same one.
    """
    for step, count in enumerate(sorted({1, most // 2 | 1, most}), 1):
        yield (
            torch.randperm(most, generator=generator)[: min(count, most)].tolist(),
            half * (step % 2),
        )
    for member in {0, most // 3, most - 1}:
        yield [member] * most, 0


def _requests(model: PreTrainedModel, members: Sequence[int], base: int) -> PackedBatch:
    """One decoding query of each member; contexts share slots but for their last one."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    segments, token_ids, positions, out_slots = [], [], [], []
    for row, member in enumerate(members):
        context = 1 + member * 37 % _SHARED_SLOTS
        own = base + _SHARED_SLOTS + member
        shared = torch.arange(base, base + context - 1)
        segments.append(Segment(row, 1, torch.cat([shared, torch.tensor([own])])))
        token_ids.append(member * 7919 % vocabulary)
        positions.append(context - 1)
        out_slots.append(own)
    return PackedBatch(
        torch.tensor(token_ids),
        torch.tensor(positions),
        torch.tensor(out_slots),
        tuple(segments),
        torch.arange(len(members)),
    )
