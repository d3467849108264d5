"""A packed step as passes of the model: who shares one, how it is padded, what comes back.

Exact mode
----------
A request's logits are the same bits whoever else is in the step, because no operation that
computes them sees a shape that depends on others:

1. Attention is each request's own (`kvtide.serve.attention`).
2. Matrix products choose their kernels, and with them the order of additions, by the number of
   rows; functions of single numbers treat the last few of a pass in another way than the rest.
   `kvtide.serve.selfcheck` measures at which row counts a row's numbers agree, and a step is run
   as several passes: segments that fit share passes, padded up to such a count; a longer segment
   is a pass of its own, of exactly its rows. A mere minimum wouldn't do: with AMX in bfloat16,
   passes of 1 to 32 rows agree, and 33, 37, 192 and 256 rows each begin another order. So what
   has one query and what has more may go by other counts, since a request's tokens are always
   computed as the one or as the other.
3. The head is a matrix product as well. In a shared pass it sees the rows whose logits are wanted,
   padded up to such a count, too.
4. Chunk boundaries are the scheduler's: exact mode relies on the segments of a request, its
   positions and counts, being a function of the request alone, never of what room is left.
5. Experts run token by token, not grouped by expert over the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtide.errors import UsageError
from kvtide.pool import Pool
from kvtide.serve.adapter import HookedModel, PreTrainedModel
from kvtide.serve.attention import Sharing, padded_length, plan_attention
from kvtide.serve.batch import ExactRules, PackedBatch, RowCounts, Segment
from kvtide.serve.supported import geometry_of


@dataclass(frozen=True)
class _PassRows:
    """Which rows of a packed batch one pass runs."""

    segments: tuple[Segment, ...]
    """With ``first`` counted in the pass."""
    sources: list[int]
    """The packed row of each of the pass's rows, without the padding."""
    rows: RowCounts | None
    """What it is padded to; None for a pass that runs as it is."""

    @classmethod
    def of(cls, segments: Sequence[Segment], rows: RowCounts | None) -> _PassRows:
        """The pass of these segments in this order."""
        placed: list[Segment] = []
        sources: list[int] = []
        for one in segments:
            placed.append(Segment(len(sources), one.count, one.slots))
            sources += range(one.first, one.first + one.count)
        return cls(tuple(placed), sources, rows)

    def padded(self, rows: int) -> int:
        """How many rows the pass computes for so many."""
        return rows if self.rows is None else self.rows.padded(rows)


class PagedModel:
    """A transformers model whose keys and values live in a pool.

    Takes the model over: its own ``generate`` doesn't work until `release`. With ``exact`` it runs
    in exact mode (see the module's text), by the rules that the self-check found; without it runs
    each step as one pass.
    """

    def __init__(self, model: PreTrainedModel, pool: Pool, *, exact: ExactRules | None) -> None:
        """Raises UsageError for a model that isn't served or doesn't fit the pool."""
        expected = geometry_of(model.config, model.dtype, pool.page_size)
        if expected.fingerprint != pool.geometry.fingerprint:
            raise UsageError(
                f"the pool holds {pool.geometry.planes}, the model needs {expected.planes}"
            )
        self._dtype: torch.dtype = model.dtype
        self._device = pool.device.torch_device
        self._exact = exact
        self._sharing = Sharing.ANY
        if exact is not None:
            self._sharing = Sharing.ALIKE if exact.share_attention else Sharing.NONE
        self._model = HookedModel(model, pool, experts_by_token=exact is not None)

    def release(self) -> None:
        """Gives the model its own attention back; this object must not be used afterwards."""
        self._model.release()

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits [n, vocab] of ``batch.logit_rows``, in their order, on the host.

        Writes the keys and values of all rows to ``batch.out_slots`` and touches no other
        slot. The slots of a segment must hold what earlier steps wrote to them. In exact mode
        ask for logits by each request's own state alone (say, its last row when its prompt is
        done): in a pass of its own, their number is a row count, too.
        """
        wanted = {row: place for place, row in enumerate(batch.logit_rows.tolist())}
        logits: list[Tensor] = []
        places: list[int] = []
        for one in self._passes(batch.segments):
            keep = [at for at, row in enumerate(one.sources) if row in wanted]
            places += [wanted[one.sources[at]] for at in keep]
            logits.append(self._run(one, batch, keep))
        found = logits[0] if len(logits) == 1 else torch.cat(logits)
        if places == sorted(places):
            return found
        return found[torch.tensor(places).argsort()]

    def _passes(self, segments: Sequence[Segment]) -> Iterator[_PassRows]:
        """Which segments run in one pass: those of one query first, by length."""
        singles = [one for one in segments if one.count == 1]
        singles.sort(key=lambda one: padded_length(len(one.slots)))
        chunks = [one for one in segments if one.count > 1]
        if self._exact is None:
            yield _PassRows.of(singles + chunks, None)
        elif self._exact.rows == self._exact.chunk_rows:
            yield from _shared_passes(singles + chunks, self._exact.rows)
        else:
            yield from _shared_passes(singles, self._exact.rows)
            yield from _shared_passes(chunks, self._exact.chunk_rows)

    def _run(self, rows: _PassRows, batch: PackedBatch, keep: list[int]) -> Tensor:
        """The logits of the pass's rows ``keep``.

        All that says who is where is worked out on the host and goes to the device from here:
        by copies that block, since what they read is gone when this returns.
        """
        sources = torch.tensor(rows.sources)
        row_count = rows.padded(len(rows.sources))
        padding = (0, row_count - len(rows.sources))
        plan = plan_attention(rows.segments, row_count, self._dtype, sharing=self._sharing)
        heads = pad(torch.tensor(keep, dtype=torch.int64), (0, rows.padded(len(keep)) - len(keep)))
        device = self._device
        logits = self._model.run(
            pad(batch.token_ids[sources], padding).to(device),
            pad(batch.positions[sources], padding).to(device),
            batch.out_slots[sources].to(device),
            plan.to(device),
            heads.to(device),
        )
        return logits[: len(keep)].cpu()


def _shared_passes(segments: Sequence[Segment], rows: RowCounts) -> Iterator[_PassRows]:
    """As few passes as their order allows; what is too long for one that is shared has its own."""
    group: list[Segment] = []
    for one in segments:
        if one.count > rows.most:
            yield _PassRows.of([one], None)
            continue
        if sum(other.count for other in group) + one.count > rows.most:
            yield _PassRows.of(group, rows)
            group = []
        group.append(one)
    if group:
        yield _PassRows.of(group, rows)
