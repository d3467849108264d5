"""The one place that touches transformers, with `adapter_files`: nothing else in kvtide imports it.

`HookedModel` runs a transformers model, unpatched, over a pool. Two hooks that transformers
offers are used and nothing else: a `Cache`, to which the model hands each layer's new keys and
values, and an attention function, registered by name. Both get the pass at hand through the
model's keyword arguments. Below it are the thin functions that make the tiny model and narrow a
distribution before a token is drawn; what reads and writes files is in `adapter_files`.

Transformers moves fast. What moves between its releases is in these two files;
`transformers>=5.24,<5.25` is what it is tested with.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import Cache

from kvtide.errors import UsageError
from kvtide.pool import Pool
from kvtide.serve.adapter_files import quiet
from kvtide.serve.attention import AttentionPlan, Workspace, attend
from kvtide.serve.trial import Trial

__all__ = [
    "HookedModel",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "random_llama",
    "warper",
    "wrap_tokenizer",
]

_ATTENTION_NAME = "kvtide_paged"
# Arguments that models hand to every attention function and that change nothing here.
_HARMLESS_ARGUMENTS = frozenset({"logits_to_keep", "position_ids", "use_cache"})


@dataclass(frozen=True)
class _Pass:
    """One forward pass of the model, as the cache and the attention function need it."""

    pool: Pool
    out_slots: Tensor
    """int64 [row], without the padding rows: their keys and values are dropped."""
    plan: AttentionPlan
    workspace: Workspace
    trial: Trial | None = None


# Not handed through the model: many architectures drop an argument that they don't know on its way
# to the cache or to the attention function.
_RUNNING: ContextVar[_Pass] = ContextVar("kvtide_pass")


class _PagedCache(Cache):  # type: ignore[misc] # the type checker doesn't follow transformers
    """Writes each layer's new keys and values to the pool; knows no sequences."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes the new tokens' states, [1, kv_head, row, dim], and gives them back."""
        current = _RUNNING.get()
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
            current.trial.see_cached(layer_idx, key_states, value_states)
        return key_states, value_states


def _paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention signature: query [1, head, row, dim] to [1, row, head, v_dim].

    Raises UsageError for an argument that would change the result and isn't known here. A
    window changes nothing: the trial pass has found it longer than any context.
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
    paged_pass = _RUNNING.get()
    if paged_pass.trial is not None:
        paged_pass.trial.see_attended(module, layer, key, value, window=sliding_window)
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


class HookedModel:
    """A transformers model whose layers write to a pool and attend to what it holds.

    Takes the model over: its attention is replaced by name, so its own ``generate`` doesn't
    work until `release`. With ``experts_by_token`` experts run token by token, not grouped by
    expert over the pass.
    """

    def __init__(self, model: PreTrainedModel, pool: Pool, *, experts_by_token: bool) -> None:
        """Raises UsageError, and releases the model, if it doesn't use both hooks as it must."""
        self._model = model
        self._pool = pool
        self._cache = _PagedCache()
        self._workspace = Workspace()
        self._own_attention = model.config._attn_implementation
        self._own_experts = model.config._experts_implementation
        model.eval()
        model.set_attn_implementation(_ATTENTION_NAME)
        if experts_by_token:
            model.set_experts_implementation("batched_mm")
        try:
            self._refuse_untrue()
        except BaseException:  # Ctrl-C, too, gives the model back
            self.release()
            raise

    def release(self) -> None:
        """Gives the model its own attention back; this object must not be used afterwards."""
        self._model.set_attn_implementation(self._own_attention)
        self._model.set_experts_implementation(self._own_experts)

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        out_slots: Tensor,
        plan: AttentionPlan,
        keep: Tensor | int,
    ) -> Tensor:
        """One pass over int64 ``token_ids`` and ``positions`` [row]: logits [n, vocab].

        ``out_slots`` takes the keys and values of as many rows as it is long, from the first;
        the rest are padding. ``keep`` is the rows whose logits are wanted, int64 [n], or 0 for
        all. To be called in inference mode.
        """
        current = _Pass(self._pool, out_slots, plan, self._workspace)
        return self._call(current, token_ids, positions, keep)

    def _call(
        self, current: _Pass, token_ids: Tensor, positions: Tensor, keep: Tensor | int
    ) -> Tensor:
        token = _RUNNING.set(current)
        try:
            output = self._model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                cache=self._cache,
                use_cache=True,
                logits_to_keep=keep,
            )
        finally:
            _RUNNING.reset(token)
        logits: Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def _refuse_untrue(self) -> None:
        """A pass of padding only, which writes to no slot: does the model do what we rely on?"""
        text = self._model.config.get_text_config(decoder=True)
        trial = Trial(limit=getattr(text, "max_position_embeddings", None))
        nothing = torch.zeros(2, dtype=torch.int64, device=self._model.device)
        # From the middle of the vocabulary: a padding token's states are often all zero.
        tokens = nothing + self._model.get_input_embeddings().num_embeddings // 2
        current = _Pass(self._pool, nothing[:0], AttentionPlan(2, ()), self._workspace, trial)
        try:
            logits = self._call(current, tokens, nothing, nothing[:1])
        except UsageError:
            raise
        # Each architecture fails in its own way over a cache or an argument it doesn't pass on.
        except Exception as error:
            raise UsageError(
                f"{type(self._model).__name__} isn't served: it can't run over a paged cache "
                f"({type(error).__name__}: {error}); choose a decoder such as Llama or Qwen"
            ) from error
        reason = trial.reason_to_refuse(list(range(text.num_hidden_layers)))
        if reason is not None:
            raise UsageError(f"{type(self._model).__name__} isn't served: {reason}")
        if len(logits) != 1:
            raise UsageError(
                f"{type(self._model).__name__} isn't served: asked for the logits of 1 row, "
                f"it gave those of {len(logits)}"
            )


def wrap_tokenizer(
    tokenizer: Tokenizer, *, bos: str, eos: str, pad: str, chat_template: str
) -> PreTrainedTokenizerBase:
    """A tokenizer of the tokenizers library, as transformers hands them out."""
    wrapped: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = chat_template
    return wrapped


def random_llama(
    tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, **sizes: int
) -> PreTrainedModel:
    """A Llama of these configured sizes, in numbers that may change with a release.

    Leaves torch's random numbers as they were.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    with quiet(), torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def warper(temperature: float, top_k: int, top_p: float) -> Callable[[Tensor], Tensor]:
    """What turns scores [request, vocab] into those to draw from, excluded ones minus infinity.

    ``temperature`` is above 0; ``top_k`` 0 and ``top_p`` 1 exclude nothing.
    """
    processors = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(float(top_p)))
    # None of these looks at the tokens so far.
    no_tokens = torch.empty(1, 0, dtype=torch.int64)

    def warp(scores: Tensor) -> Tensor:
        warped: Tensor = processors(no_tokens, scores)
        return warped

    return warp
