"""Runs a packed step as passes of the model.

Exact mode
----------
A request's logits have the same bits whichever other requests are in the step. No operation that
computes them sees a shape that depends on other requests:

1. Attention is computed for each request by itself (`kvtide.serve.attention`).
2. A matrix product chooses its kernel, and so its order of additions, by the number of rows. A
   function of single numbers computes the last few numbers of a pass by other code than the rest.
   `kvtide.serve.selfcheck` measures at which row counts a row gets the same bits. A step runs as
   several passes: segments that fit share a pass, padded to such a count. A minimum row count is
   not enough: with AMX in bfloat16, 1 to 32 rows agree, but 33, 37, 192 and 256 rows each have
   another order. Tokens of answers and of prompts may have different counts: a token is always
   computed as one kind.
3. The head is a matrix product too. In a shared pass it sees only the rows whose logits are wanted,
   padded to such a count.
4. A prompt may be cut into steps anywhere: a chunk that is too long for such a count runs as
   several passes, and attention is computed in blocks of positions (`kvtide.serve.query_blocks`).
   Where the self-check finds that this doesn't give the same bits, a longer chunk is a pass by
   itself, unpadded, and exact mode relies on the scheduler: a prompt's chunks must depend on the
   request alone, not on the room that is left.
5. Experts run token by token. They don't collect the tokens of a batch by expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtide.errors import UsageError
from kvtide.pool import Pool
from kvtide.serve.adapter import HookedModel, PreTrainedModel
from kvtide.serve.attention import Sharing, padded_length, plan_attention
from kvtide.serve.batch import ExactRules, PackedBatch, RowCounts, Segment
from kvtide.serve.packed import PackedWeights
from kvtide.serve.query_blocks import cut
from kvtide.serve.supported import geometry_of


@dataclass(frozen=True)
class _PassRows:
    """The rows of a packed batch that one pass computes."""

    segments: tuple[Segment, ...]
    """Here `first` counts rows of the pass."""
    sources: list[int]
    """For each row of the pass, its row in the packed batch. Padding is left out."""
    rows: RowCounts | None
    """The counts to which the pass is padded; None for a pass without padding."""

    @classmethod
    def from_segments(cls, segments: Sequence[Segment], rows: RowCounts | None) -> _PassRows:
        """The pass of these segments in this order."""
        placed: list[Segment] = []
        sources: list[int] = []
        for segment in segments:
            placed.append(replace(segment, first=len(sources)))
            sources += range(segment.first, segment.first + segment.count)
        return cls(tuple(placed), sources, rows)

    def padded(self, rows: int) -> int:
        """How many rows the pass computes for `rows` wanted rows."""
        return rows if self.rows is None else self.rows.padded(rows)


class PagedModel:
    """A transformers model whose keys and values live in a pool.

    It takes the model over: the model's `generate` doesn't work until `release`. With `exact`, the
    rules that the self-check found, it runs in exact mode (see the module's docstring). Without, it
    runs each step as one pass.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: Pool,
        *,
        exact: ExactRules | None,
        packing: PackedWeights | None = None,
    ) -> None:
        """Raises UsageError for a model that isn't served or doesn't fit the pool.

        `packing` is released with this.
        """
        expected = geometry_of(model.config, model.dtype, pool.page_size)
        if expected.fingerprint != pool.geometry.fingerprint:
            raise UsageError(
                f"the pool holds {pool.geometry.planes}, the model needs {expected.planes}"
            )
        self._dtype: torch.dtype = model.dtype
        self._device = pool.device.torch_device
        self._exact = exact
        self._query_rows = None if exact is None else exact.query_rows
        self._sharing = Sharing.ANY
        if exact is not None:
            self._sharing = Sharing.ALIKE if exact.share_attention else Sharing.NONE
        self._packing = packing
        self._model = HookedModel(model, pool, experts_by_token=exact is not None)

    @property
    def needs_whole_chunks(self) -> bool:
        """Whether the bits of a prompt's token depend on the chunk of the prompt that it is in.

        In fast mode they do too, but there no bits are promised.
        """
        return self._exact is not None and self._query_rows is None

    def release(self) -> None:
        """Gives the model its attention function back. Don't use this object afterwards."""
        self._model.release()
        if self._packing is not None:
            self._packing.release()

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits [n, vocab] of `batch.logit_rows`, in their order, on the host.

        Writes the keys and values of all rows to `batch.out_slots` and changes no other slot. The
        slots of a segment must hold what earlier steps wrote to them. In exact mode the caller must
        choose a request's logit rows by that request alone, such as its last row once its prompt is
        done: in an unpadded pass their number is a row count, too.
        """
        wanted = {row: place for place, row in enumerate(batch.logit_rows.tolist())}
        logits: list[Tensor] = []
        places: list[int] = []
        for model_pass in self._passes(batch.segments):
            keep = [index for index, row in enumerate(model_pass.sources) if row in wanted]
            places += [wanted[model_pass.sources[index]] for index in keep]
            logits.append(self._run(model_pass, batch, keep))
        found = logits[0] if len(logits) == 1 else torch.cat(logits)
        if places == sorted(places):
            return found
        return found[torch.tensor(places).argsort()]

    def _passes(self, segments: Sequence[Segment]) -> Iterator[_PassRows]:
        """Splits a step into passes; within a pass segments of one query come first, by length."""
        singles = [segment for segment in segments if self._is_single(segment)]
        singles.sort(key=lambda segment: padded_length(len(segment.slots)))
        chunks = [segment for segment in segments if not self._is_single(segment)]
        if self._exact is not None and self._query_rows is not None:
            most = self._exact.chunk_rows.most
            chunks = [piece for chunk in chunks for piece in cut(chunk, most)]
        if self._exact is None:
            yield _PassRows.from_segments(singles + chunks, None)
        elif self._exact.rows == self._exact.chunk_rows:
            yield from _shared_passes(singles + chunks, self._exact.rows)
        else:
            yield from _shared_passes(singles, self._exact.rows)
            yield from _shared_passes(chunks, self._exact.chunk_rows)

    def _is_single(self, segment: Segment) -> bool:
        """Whether the segment's attention is that of a token of an answer."""
        return segment.count == 1 and not (self._query_rows and segment.of_prompt)

    def _run(self, rows: _PassRows, batch: PackedBatch, keep: list[int]) -> Tensor:
        """The logits of the pass's rows `keep`.

        Ids, positions and slots are computed on the host and copied to the device here. The copies
        block, because their sources are freed when this returns.
        """
        sources = torch.tensor(rows.sources)
        row_count = rows.padded(len(rows.sources))
        padding = (0, row_count - len(rows.sources))
        plan = plan_attention(
            rows.segments,
            row_count,
            self._dtype,
            sharing=self._sharing,
            query_rows=self._query_rows,
        )
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
    """Yields as few passes as the order allows. A segment too long to share has its own pass."""
    shared: list[Segment] = []
    for segment in segments:
        if segment.count > rows.most:
            yield _PassRows.from_segments([segment], None)
            continue
        if sum(other.count for other in shared) + segment.count > rows.most:
            yield _PassRows.from_segments(shared, rows)
            shared = []
        shared.append(segment)
    if shared:
        yield _PassRows.from_segments(shared, rows)
