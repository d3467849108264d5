"""The one place that touches transformers: its models run unpatched over kvtide's pools.

Two hooks that transformers offers are used and nothing else: a `Cache`, to which the model
hands each layer's new keys and values, and an attention function, registered by name. Both get
the pass at hand through the model's keyword arguments. Everything of transformers that moves
between its releases is in this file; `transformers>=5.24,<5.25` is what it is tested with.

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
4. Experts run token by token (`batched_mm`), not grouped by expert over the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from kvtide.errors import UsageError
from kvtide.pool import Pool
from kvtide.serve.attention import (
    AttentionPlan,
    Workspace,
    attend,
    padded_length,
    plan_attention,
)
from kvtide.serve.batch import PackedBatch, RowRange, Segment
from kvtide.serve.supported import geometry_of

__all__ = [
    "PackedBatch",
    "PagedModel",
    "PreTrainedModel",
    "RowRange",
    "Segment",
    "geometry_of",
]

_ATTENTION_NAME = "kvtide_paged"
# Arguments that models hand to every attention function and that change nothing here.
_HARMLESS_ARGUMENTS = frozenset({"position_ids", "use_cache"})


@dataclass
class _Trial:
    """What a pass that serves nobody has found out about a model."""

    cached: list[int] = field(default_factory=list)
    """The layers that handed over keys and values, in order."""
    attended: list[int] = field(default_factory=list)
    """The layers that called the attention function, in order."""


@dataclass(frozen=True)
class _Pass:
    """One forward pass of the model, as the cache and the attention function need it."""

    pool: Pool
    out_slots: Tensor
    """int64 [row], without the padding rows: their keys and values are dropped."""
    plan: AttentionPlan
    workspace: Workspace
    trial: _Trial | None = None


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


class _PagedCache(Cache):  # type: ignore[misc] # the type checker doesn't follow transformers
    """Writes each layer's new keys and values to the pool; knows no sequences."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes the new tokens' states, [1, kv_head, row, dim], and gives them back."""
        current: _Pass = kwargs["kwargs"]["paged_pass"]
        count = len(current.out_slots)
        for name, states in (("k", key_states), ("v", value_states)):
            plane = current.pool.plane(name, layer_idx)
            rows = states[0].transpose(0, 1)
            if current.trial is not None and rows.shape[1:] != plane.shape[1:]:
                raise UsageError(
                    f"layer {layer_idx} of the model has {name} rows of {list(rows.shape[1:])} "
                    f"(head, dim), the pool of {list(plane.shape[1:])}"
                )
            plane.index_copy_(0, current.out_slots, rows[:count])
        if current.trial is not None:
            current.trial.cached.append(layer_idx)
        return key_states, value_states


def _paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged_pass: _Pass,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention signature: query [1, head, row, dim] to [1, row, head, v_dim].

    Raises UsageError for an argument that would change the result and isn't known here. A
    window reaches it only when `geometry_of` has found it longer than any context.
    """
    changes = {"attention_mask": attention_mask, **others}
    changes |= {"dropout": dropout or None, "is_causal": "no" if is_causal is False else None}
    for name, argument in changes.items():
        # A switch that is off, such as output_attentions, changes nothing either.
        if argument is not None and argument is not False and name not in _HARMLESS_ARGUMENTS:
            raise UsageError(
                f"the model's {type(module).__name__} passes {name!r} to its attention, which "
                "isn't served: it would be ignored; choose a model with plain attention"
            )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if paged_pass.trial is not None:
        paged_pass.trial.attended.append(layer)
    out = attend(
        paged_pass.plan,
        query[0].transpose(0, 1),
        paged_pass.pool.plane("k", layer),
        paged_pass.pool.plane("v", layer),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        paged_pass.workspace,
    )
    return out[None], None


AttentionInterface.register(_ATTENTION_NAME, _paged_attention)


class PagedModel:
    """A transformers model whose keys and values live in a pool.

    Takes the model over: its attention is replaced by name, so its own ``generate`` doesn't
    work until `release`. In exact mode (see the module's text) ``rows`` is the range that the
    self-check found; fast mode needs none and runs each step as one pass.
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
        self._model = model
        self._pool = pool
        self._rows = rows if exact else None
        self._cache = _PagedCache()
        self._workspace = Workspace()
        self._own_attention = model.config._attn_implementation
        self._own_experts = model.config._experts_implementation
        model.eval()
        model.set_attn_implementation(_ATTENTION_NAME)
        if exact:
            model.set_experts_implementation("batched_mm")
        try:
            self._refuse_untrue()
        except Exception:
            self.release()
            raise

    def release(self) -> None:
        """Gives the model its own attention back; this object must not be used afterwards."""
        self._model.set_attn_implementation(self._own_attention)
        self._model.set_experts_implementation(self._own_experts)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits [n, vocab] of ``batch.logit_rows``, in their order.

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
        return torch.cat(logits)[torch.tensor(found_at, dtype=torch.int64, device=logits[0].device)]

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
        """The logits of the pass's rows ``keep``, or of all its rows where it is shared."""
        device = batch.token_ids.device
        sources = torch.tensor(rows.sources, device=device)
        padding = (0, rows.row_count - len(rows.sources))
        plan = plan_attention(
            rows.segments, rows.row_count, self._model.dtype, mix_lengths=self._rows is None
        )
        current = _Pass(self._pool, batch.out_slots[sources], plan, self._workspace)
        return self._call(
            current,
            pad(batch.token_ids[sources], padding),
            pad(batch.positions[sources], padding),
            # The head is a matrix product as well: in a shared pass it sees every row.
            0 if rows.shared else torch.tensor(keep, dtype=torch.int64, device=device),
        )

    def _call(
        self, current: _Pass, token_ids: Tensor, positions: Tensor, keep: Tensor | int
    ) -> Tensor:
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            cache=self._cache,
            use_cache=True,
            logits_to_keep=keep,
            paged_pass=current,
        )
        logits: Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def _refuse_untrue(self) -> None:
        """A pass of padding only, which writes to no slot: does the model do what we rely on?"""
        trial = _Trial()
        nothing = torch.zeros(2, dtype=torch.int64, device=self._model.device)
        current = _Pass(self._pool, nothing[:0], AttentionPlan(2, (), 0), self._workspace, trial)
        logits = self._call(current, nothing, nothing, nothing[:1])
        layers = list(range(self._model.config.get_text_config(decoder=True).num_hidden_layers))
        if trial.cached != layers or trial.attended != layers:
            raise UsageError(
                f"{type(self._model).__name__} isn't served: of {len(layers)} layers, "
                f"{sorted(set(trial.cached))} cache keys and values and "
                f"{sorted(set(trial.attended))} use the replaceable attention; all must"
            )
        if len(logits) != 1:
            raise UsageError(
                f"{type(self._model).__name__} isn't served: asked for the logits of 1 row, "
                f"it gave those of {len(logits)}"
            )
