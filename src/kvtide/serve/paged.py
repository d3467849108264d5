"""A packed step as passes of the model: who shares one, how it is padded, what comes back.

Exact mode
----------
A request's logits are the same bits whoever else is in the step, because no operation that
computes them sees a shape that depends on others:

1. Attention is each request's own (`kvtide.serve.attention`).
2. Matrix products choose their kernels, and with them the order of additions, by the number of
   rows. `kvtide.serve.selfcheck` measures a range of row counts that agree, and a step is run
   as several passes: segments that fit into that range share passes of a row count within it,
   padded up to it where needed; a longer segment is a pass of its own, of exactly its rows.
   A mere minimum wouldn't do: with AMX in bfloat16, passes of 1 to 32 rows agree, and 33, 37,
   192 and 256 rows each begin another order of additions.
3. Chunk boundaries are the scheduler's: exact mode relies on the segments of a request, its
   positions and counts, being a function of the request alone, never of what room is left.
4. Experts run token by token, not grouped by expert over the batch.
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
from kvtide.serve.attention import padded_length, plan_attention
from kvtide.serve.batch import PackedBatch, RowRange, Segment
from kvtide.serve.supported import geometry_of


@dataclass(frozen=True)
class _PassRows:
    """Which rows of a packed batch one pass runs."""

    segments: tuple[Segment, ...]
    """With ``first`` counted in the pass."""
    sources: list[int]
    """The packed row of each of the pass's rows, without the padding."""
    row_count: int
    """With the padding."""
    shared: bool
    """Whether requests share it in exact mode, so that only its row count may matter."""

    @classmethod
    def of(cls, segments: Sequence[Segment], least: int, *, shared: bool) -> _PassRows:
        """The pass of these segments in this order, padded to at least ``least`` rows."""
        placed: list[Segment] = []
        sources: list[int] = []
        for one in segments:
            placed.append(Segment(len(sources), one.count, one.slots))
            sources += range(one.first, one.first + one.count)
        return cls(tuple(placed), sources, max(len(sources), least), shared)


class PagedModel:
    """A transformers model whose keys and values live in a pool.

    Takes the model over: its own ``generate`` doesn't work until `release`. In exact mode (see
    the module's text) ``rows`` is the range that the self-check found; fast mode needs none and
    runs each step as one pass.
    """

    def __init__(
        self, model: PreTrainedModel, pool: Pool, *, exact: bool, rows: RowRange | None = None
    ) -> None:
        """Raises UsageError for a model that isn't served or doesn't fit the pool."""
        if exact and rows is None:
            raise UsageError("exact mode needs the row range that the self-check found")
        dtype = str(model.dtype).removeprefix("torch.")
        expected = geometry_of(model.config, dtype, pool.page_size)
        if expected.fingerprint != pool.geometry.fingerprint:
            raise UsageError(
                f"the pool holds {pool.geometry.planes}, the model needs {expected.planes}"
            )
        self._dtype: torch.dtype = model.dtype
        self._device = pool.device.torch_device
        self._rows = rows if exact else None
        self._model = HookedModel(model, pool, experts_by_token=exact)

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
        found_at = [0] * len(wanted)
        total = 0
        for one in self._passes(batch.segments):
            keep = [at for at, row in enumerate(one.sources) if row in wanted]
            heads = one.row_count if one.shared else len(keep)
            for number, at in enumerate(keep):
                found_at[wanted[one.sources[at]]] = total + (at if one.shared else number)
            logits.append(self._run(one, batch, keep))
            total += heads
        if found_at == list(range(total)):
            return logits[0] if len(logits) == 1 else torch.cat(logits)
        return torch.cat(logits)[torch.tensor(found_at, dtype=torch.int64)]

    def _passes(self, segments: Sequence[Segment]) -> Iterator[_PassRows]:
        """Which segments run in one pass: those of one query first, by length."""
        singles = [one for one in segments if one.count == 1]
        singles.sort(key=lambda one: padded_length(len(one.slots)))
        chunks = [one for one in segments if one.count > 1]
        if self._rows is None:
            yield _PassRows.of(singles + chunks, 0, shared=False)
            return
        group: list[Segment] = []
        for one in singles + chunks:
            if one.count > self._rows.most:
                yield _PassRows.of([one], 0, shared=False)
                continue
            if sum(other.count for other in group) + one.count > self._rows.most:
                yield _PassRows.of(group, self._rows.least, shared=True)
                group = []
            group.append(one)
        if group:
            yield _PassRows.of(group, self._rows.least, shared=True)

    def _run(self, rows: _PassRows, batch: PackedBatch, keep: list[int]) -> Tensor:
        """The logits of the pass's rows ``keep``, or of all its rows where it is shared.

        All that says who is where is worked out on the host and goes to the device from here:
        by copies that block, since what they read is gone when this returns.
        """
        sources = torch.tensor(rows.sources)
        padding = (0, rows.row_count - len(rows.sources))
        plan = plan_attention(
            rows.segments, rows.row_count, self._dtype, mix_lengths=self._rows is None
        )
        device = self._device
        return self._model.run(
            pad(batch.token_ids[sources], padding).to(device),
            pad(batch.positions[sources], padding).to(device),
            batch.out_slots[sources].to(device),
            plan.to(device),
            # The head is a matrix product as well: in a shared pass it sees every row.
            0 if rows.shared else torch.tensor(keep, dtype=torch.int64).to(device),
        ).cpu()
