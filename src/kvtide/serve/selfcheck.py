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
3. Attention of a prompt's block of positions (`kvtide.serve.query_blocks`) is tried in one step and
   in several, and with fewer queries in a call, for several lengths.
4. The cheapest set is tried with whole passes of the model over a small pool. A pass of all trial
   requests must give each the same bits as passes of some of them in another order and with other
   slots, and as passes of many copies of one of them. This is done for answer tokens (one row per
   request) and for chunks of prompts (several rows per request), which are cut in two, too.

If a cut changes bits, a prompt is computed in whole chunks, and each of them in one step.

A set may have a single count: then every pass has exactly that many rows, in the worst case one. If
not even one row repeats its bits, exact mode is impossible.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from kvtide.device import Device
from kvtide.serve.adapter import PreTrainedModel
from kvtide.serve.attention import MOST_IN_BUCKET
from kvtide.serve.batch import ExactRules, RowCounts
from kvtide.serve.packed import PackedWeights
from kvtide.serve.probes import AttentionProbe, CutProbe, Probe
from kvtide.serve.query_blocks import QUERY_ROWS, WHOLE_BLOCKS
from kvtide.serve.repeatable import is_mkl_repeatable
from kvtide.serve.trial_passes import SAMPLES, TrialPasses, spread

# Requests share no pass.
_ALONE = RowCounts((1,))
_FEW_ROWS = 16
# A block of a prompt is computed whole, and in two steps of which the second begins at these.
_CUTS = (1, 13, QUERY_ROWS - 1)
# Numbers of queries that a call for a part of a block may have.
_QUERY_COUNTS = range(4, QUERY_ROWS + 1, 4)


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
    with PackedWeights(model):
        return _find_rows(model, device, max_rows)


def _find_rows(model: PreTrainedModel, device: Device, max_rows: int) -> RowCheck:
    start = time.perf_counter()
    trial = TrialPasses(model, device, max_rows)
    small, large = trial.probes()
    sets, of_rows = _agreeing_sets(small, _tried_counts(max_rows))
    of_attention = _split_by_neighbours(trial.attention_probes())
    search = _Search(trial, sets, large, max_rows, share_attention=not of_attention)
    tried = _candidates(sets, (1, 2, 4, 8, 16, 32, 64))
    rows = search.answer_rows(tried)
    if rows is None:
        listed = "; ".join(map(str, tried)) or "none"
        detail = f"no row count up to {max_rows} is safe here (tried {listed}); {_remedy()}"
        return RowCheck(None, detail, time.perf_counter() - start)
    query_rows, of_cuts = _agreeing_queries(trial.cut_probes())
    rules = search.prompt_rules(rows, query_rows)
    detail = f"passes of {_counted(rows)} agree bit for bit"
    if rows != rules.chunk_rows:
        detail += f", for prompts of {_counted(rules.chunk_rows)}"
    detail += _explain_speed(rules, of_rows, of_attention)
    detail += _explain_sharing(rules, of_cuts)
    return RowCheck(rules, detail, time.perf_counter() - start)


@dataclass(frozen=True)
class _Search:
    """Tries row counts with whole passes of the model."""

    trial: TrialPasses
    sets: list[RowCounts]
    large: list[Probe]
    max_rows: int
    share_attention: bool

    def answer_rows(self, candidates: Sequence[RowCounts]) -> RowCounts | None:
        """The first of `candidates` that is safe for passes of answer tokens."""
        for rows in candidates:
            if self._is_safe(ExactRules(rows, _ALONE, self.share_attention), chunks=False):
                return rows
        return None

    def prompt_rules(self, rows: RowCounts, query_rows: Sequence[RowCounts]) -> ExactRules:
        """The rules with the cheapest row counts for prompts, if possible cut anywhere.

        For that each of `query_rows` is tried in turn.
        """
        candidates = _candidates(self.sets, (16, 32, 64, 128, 256))
        # A prompt in passes of a few rows is slower than one that shares less.
        least = max(2, min(_FEW_ROWS, self.max_rows))
        long = [chunk_rows for chunk_rows in candidates if chunk_rows.most >= least]
        for chunk_rows, queries in (*product(long, query_rows), *product(candidates, (None,))):
            rules = ExactRules(rows, chunk_rows, self.share_attention, queries)
            if self._is_safe(rules, chunks=True):
                return rules
        return ExactRules(rows, _ALONE, self.share_attention)

    def _is_safe(self, rules: ExactRules, *, chunks: bool) -> bool:
        rows = rules.chunk_rows if chunks else rules.rows
        known = chunks and rows == rules.rows  # large weights were tried at them for answers
        agree = known or all(_agree(probe, rows) for probe in self.large)
        return agree and self.trial.passes_agree(rules, chunks)


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


def _agreeing_queries(probes: Sequence[CutProbe]) -> tuple[list[RowCounts], list[str]]:
    """Which numbers of queries the calls for a block may have, the cheapest first.

    If its bits depend on how a block is cut there are none, but the name of a probe that shows it.
    """
    sets, _ = _agreeing_sets(probes, _QUERY_COUNTS)
    alike = [rows for rows in sets if QUERY_ROWS in rows.counts]
    candidates = [*alike, WHOLE_BLOCKS] if WHOLE_BLOCKS not in alike else alike
    split = {rows: _split_by_cuts(probes, rows) for rows in candidates}
    return [rows for rows in candidates if not split[rows]], split[candidates[-1]]


def _split_by_cuts(probes: Sequence[CutProbe], query_rows: RowCounts) -> list[str]:
    """The name of the first probe whose bits depend on how a block of a prompt is cut."""
    for probe in probes:
        whole = probe.in_steps((), query_rows)
        if not all(torch.equal(whole, probe.in_steps((cut,), query_rows)) for cut in _CUTS):
            return [probe.name]
    return []


def _agree(probe: Probe, rows: RowCounts) -> bool:
    """Whether the probe's rows have the same bits at a sample of these counts."""
    return set(_kinds_of(probe, spread(rows.counts, SAMPLES)).values()) == {0}


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


def _explain_sharing(rules: ExactRules, of_cuts: Sequence[str]) -> str:
    """Why prompts share only whole chunks; empty if they share more."""
    if rules.query_rows:
        return ""
    what = " and ".join(of_cuts) or "a pass of the model"
    return f"; prompts share whole chunks alone, since another cut of a prompt changes {what}"


def _counted(rows: RowCounts) -> str:
    return "1 row" if rows.counts == (1,) else f"{rows} rows"


def _remedy() -> str:
    if is_mkl_repeatable() is False:
        return (
            "torch computed before kvtide.serve was imported, so MKL doesn't repeat its results: "
            "import it first, or set MKL_CBWR=AUTO"
        )
    return "--threads 1 may help, and --fast does without exactness"
