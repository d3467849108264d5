"""A plugin of SGLang with plain torch code for models of the tests that a CPU can't run.

SGLang 0.5.23's torch_native attention reads a window's rows by the full layers' slots, and takes
latents for keys in a prefill. Its short convolutions are CUDA's or Triton's, and LoRA adapters need
pinned memory. Without a tokenizer there is no backend for grammars; the one here has a single
grammar: the n-th token of an answer is n modulo 5.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

MODULO = 5


def register() -> None:
    """SGLang calls this to load the plugin."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as latents
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    for method in ("forward_extend", "forward_decode"):
        HookRegistry.register(f"{backend}.{method}", _by_window_slots, HookType.AROUND)
    latents.AttentionBackendRegistry.register(
        "torch_native", lambda attention, batch: latents.AttnForwardMethod.MLA
    )
    _replace_convolutions()
    _leave_pageable()
    manager = "sglang.srt.constrained.grammar_manager.GrammarManager.__init__"
    HookRegistry.register(manager, _with_a_backend, HookType.AROUND)


def _by_window_slots(
    original: Callable[..., Any],
    backend: Any,
    *qkv_and_layer: Any,
    **more: Any,
) -> Any:
    pool, rows = backend.token_to_kv_pool, backend.req_to_token_pool
    layer = qkv_and_layer[3]
    if not backend.use_sliding_window_kv_pool or not pool.layers_mapping[layer.layer_id][1]:
        return original(backend, *qkv_and_layer, **more)
    table = pool.full_to_swa_index_mapping[rows.req_to_token.long()]
    backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
    try:
        return original(backend, *qkv_and_layer, **more)
    finally:
        backend.req_to_token_pool = rows


def _replace_convolutions() -> None:
    from sglang.srt.models import lfm2

    lfm2.causal_conv1d_fn, lfm2.causal_conv1d_update = _convolve, _convolve_one
    # LFM2's backend imports these, and they need kernels that aren't here.
    for name in ("gdn_backend", "kda_backend", "lightning_backend"):
        module = types.ModuleType(f"sglang.srt.layers.attention.linear.{name}")
        module.__getattr__ = lambda wanted: type(wanted, (), {})  # type: ignore[method-assign]
        sys.modules[module.__name__] = module


def _leave_pageable() -> None:
    """Leaves the memory of LoRA adapters pageable: torch pins only beside an accelerator."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    def pageable(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *shape, pin_memory=False, **more: make(*shape, **more)

    setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # noqa: B010
    for module in (layers, torch_backend):
        module.torch = SimpleNamespace(**{**vars(torch), "tensor": pageable(torch.tensor)})
    torch_backend.torch.zeros = pageable(torch.zeros)


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    conv_states: torch.Tensor,
    activation: str | None = None,
) -> torch.Tensor:
    """Convolves prompts [channel, token], each after its state [channel, width - 1]."""
    assert activation is None
    starts = query_start_loc.tolist()
    answer = torch.empty_like(x)
    for number, slot in enumerate(cache_indices.tolist()):
        part = slice(starts[number], starts[number + 1])
        before = conv_states[slot] * bool(has_initial_state[number])
        whole = torch.cat([before.to(x.dtype), x[:, part]], 1)
        convolved = functional.conv1d(whole[None], weight[:, None], bias, groups=len(x))
        answer[:, part] = convolved[0]
        conv_states[slot] = whole[:, 1 - weight.shape[1] :]
    return answer


def _convolve_one(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolves a token [request, channel] of each request, after its state."""
    assert activation is None
    whole = torch.cat([conv_state[conv_state_indices], x[:, :, None]], 2)
    conv_state[conv_state_indices] = whole[:, :, 1:]
    answer = (whole * weight).sum(2)
    return answer if bias is None else answer + bias


def _with_a_backend(original: Callable[..., Any], manager: Any, *more: Any) -> None:
    original(manager, *more)
    manager.grammar_backend = _counting_backend()


def _counting_backend() -> Any:
    from sglang.srt.constrained.base_grammar_backend import (
        BaseGrammarBackend,
        BaseGrammarObject,
    )

    class Counting(BaseGrammarObject):  # type: ignore[misc]
        """Allows tokens by their number in the answer."""

        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def accept_token(self, token: int) -> None:
            assert token % MODULO == self.count % MODULO, (token, self.count)
            self.count += 1

        def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> Any:
            return torch.zeros(batch_size, vocab_size, dtype=torch.bool, device=device)

        def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
            tokens = torch.arange(vocab_mask.shape[1])
            vocab_mask[idx] = tokens % MODULO != self.count % MODULO

        @staticmethod
        def reset_vocab_mask(vocab_mask: torch.Tensor) -> None:
            vocab_mask.zero_()

        @staticmethod
        def move_vocab_mask(vocab_mask: torch.Tensor, device: Any) -> torch.Tensor:
            return vocab_mask.to(device)

        @staticmethod
        def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
            logits.masked_fill_(vocab_mask, float("-inf"))

        def copy(self) -> Counting:
            return Counting()

    class CountingBackend(BaseGrammarBackend):  # type: ignore[misc]
        """Has a single grammar, whichever is requested."""

        def dispatch_regex(self, key_string: str) -> Counting:
            return Counting()

    return CountingBackend()
