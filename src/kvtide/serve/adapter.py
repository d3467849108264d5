"""Runs transformers models over a pool. Only this module and `adapter_files` import transformers.

`HookedModel` uses two hooks that transformers offers and patches nothing: a `Cache`, which gets
each layer's new keys and values, and an attention function, registered by name. Both find the
current pass in a context variable. Two small functions make the tiny model and narrow a
distribution before a token is drawn. `adapter_files` reads and writes files.

transformers changes fast, and these two files hold all that depends on its release. They are
tested with `transformers>=5.24,<5.25`.
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
# Models pass these arguments to every attention function; they don't change its result.
_HARMLESS_ARGUMENTS = frozenset({"logits_to_keep", "position_ids", "use_cache"})


@dataclass(frozen=True)
class _Pass:
    """What the cache and the attention function need to know of a forward pass."""

    pool: Pool
    out_slots: Tensor
    """int64 [row] without padding rows. The keys and values of padding are dropped."""
    plan: AttentionPlan
    workspace: Workspace
    trial: Trial | None = None


# Not an argument of the model: many architectures drop an unknown argument before it reaches the
# cache or the attention function.
_RUNNING: ContextVar[_Pass] = ContextVar("kvtide_pass")


class _PagedCache(Cache):  # type: ignore[misc] # the type checker doesn't follow transformers
    """Writes each layer's new keys and values to the pool. It knows no sequences."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores the new tokens' states, [1, kv_head, row, dim], and returns them."""
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
    """Attention as transformers calls it: query [1, head, row, dim] to [1, row, head, v_dim].

    Raises UsageError for an unknown argument, which may change the result. A sliding window is
    ignored: the trial pass has checked that no context is longer.
    """
    changes = {"attention_mask": attention_mask, **others}
    changes |= {"dropout": dropout or None, "is_causal": "no" if is_causal is False else None}
    for name, argument in changes.items():
        # A switch that is off, such as output_attentions=False, changes nothing either.
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
    """A transformers model whose layers write keys and values to a pool and attend to them there.

    It takes the model over: the model's attention function is replaced by name, so the model's
    `generate` doesn't work until `release`. With `experts_by_token` experts run token by token;
    otherwise they run over all tokens of a pass that chose them.
    """

    def __init__(self, model: PreTrainedModel, pool: Pool, *, experts_by_token: bool) -> None:
        """Raises UsageError, and releases the model, if the model doesn't use both hooks right."""
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
            self._check_hooks()
        except BaseException:  # Ctrl-C too must give the model back
            self.release()
            raise

    def release(self) -> None:
        """Gives the model its attention function back. Don't use this object afterwards."""
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
        """One pass over `token_ids` and `positions` (int64 [row]); gives logits [n, vocab].

        `out_slots` (int64) names the slots for the keys and values of the first rows; further rows
        are padding. `keep` names the rows whose logits are wanted (int64 [n]); 0 means all rows.
        Call this in inference mode.
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
    def _check_hooks(self) -> None:
        """Runs a pass of padding, which writes no slot; raises UsageError if a hook isn't used."""
        text = self._model.config.get_text_config(decoder=True)
        trial = Trial(limit=getattr(text, "max_position_embeddings", None))
        nothing = torch.zeros(2, dtype=torch.int64, device=self._model.device)
        # A token from the middle of the vocabulary: a padding token's states are often all zero.
        tokens = nothing + self._model.get_input_embeddings().num_embeddings // 2
        current = _Pass(self._pool, nothing[:0], AttentionPlan(2, ()), self._workspace, trial)
        try:
            logits = self._call(current, tokens, nothing, nothing[:1])
        except UsageError:
            raise
        # Architectures that drop a cache or an argument raise all kinds of errors.
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
                f"it gave logits of {len(logits)}"
            )


def wrap_tokenizer(
    tokenizer: Tokenizer, *, bos: str, eos: str, pad: str, chat_template: str
) -> PreTrainedTokenizerBase:
    """Wraps a tokenizer of the tokenizers library as a tokenizer of transformers."""
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
    """A Llama of the given sizes with random weights, which differ between releases.

    Doesn't change torch's random state.
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
    """A function that narrows scores [request, vocab]: an excluded token gets minus infinity.

    `temperature` is above 0; `top_k` 0 and `top_p` 1 exclude nothing.
    """
    processors = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(float(top_p)))
    # These processors don't look at the tokens so far.
    no_tokens = torch.empty(1, 0, dtype=torch.int64)

    def warp(scores: Tensor) -> Tensor:
        warped: Tensor = processors(no_tokens, scores)
        return warped

    return warp
