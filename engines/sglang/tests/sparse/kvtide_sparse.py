"""A plugin of SGLang that makes any model's attention depend on MiniCPM's compressed keys.

SGLang's backend for that model needs CUDA's kernels. This plugin attaches the same cache in the
same place to torch_native. It writes the keys of a step where SGLang's kernel would, and reads
those of earlier steps from there: their mean is added to each token's attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SIZE, STRIDE = 4, 2


def register() -> None:
    """SGLang calls this to load the plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{backend}.__init__", _begin, HookType.AROUND)
    for method in ("forward_extend", "forward_decode"):
        HookRegistry.register(f"{backend}.{method}", _attend, HookType.AROUND)


def _begin(original: Callable[..., Any], backend: Any, runner: Any) -> None:
    from sglang.srt.layers.attention.minicpm.cache import attach_compressed_cache

    original(backend, runner)
    attach_compressed_cache(
        runner.req_to_token_pool,
        runner.token_to_kv_pool_allocator,
        kernel_size=SIZE,
        kernel_stride=STRIDE,
        enable_memory_saver=False,
    )


def _attend(
    original: Callable[..., Any],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    batch: Any,
    *more: Any,
    **named: Any,
) -> Any:
    answer = original(backend, q, k, v, layer, batch, *more, **named)
    keys = backend.token_to_kv_pool.get_key_buffer(layer.layer_id)
    lengths = batch.seq_lens.tolist()
    is_decode = batch.forward_mode.is_decode()
    before = [length - 1 for length in lengths] if is_decode else batch.extend_prefix_lens.tolist()
    of_tokens = answer.view(-1, layer.tp_q_head_num, layer.v_head_dim)
    first = 0
    for row, old, length in zip(batch.req_pool_indices.tolist(), before, lengths, strict=True):
        for times in (1, 4):
            entries = _compress(backend.req_to_token_pool, keys, row, old, length, times)
            for token in range(old, length):
                seen = entries[: _complete(token + 1, times)]
                if len(seen):
                    of_tokens[first + token - old] += seen.mean((0, 1))
        first += length - old
    return answer


def _complete(length: int, times: int) -> int:
    """Returns how many entries `length` tokens have."""
    return max(0, (length - SIZE * times) // (STRIDE * times) + 1)


def _compress(
    pool: Any, keys: torch.Tensor, row: int, old: int, length: int, times: int
) -> torch.Tensor:
    """Returns all entries of a request, [entry, head, head_dim]; tokens from `old` on are new."""
    tokens = pool.req_to_token[row, :length].long()
    table = pool.req_to_sparse_k1_token if times == 1 else pool.req_to_sparse_k2_token
    slots = table[row, : _complete(length, times)].long()
    for entry in range(_complete(old, times), len(slots)):
        first = entry * STRIDE * times
        keys[slots[entry]] = keys[tokens[first : first + SIZE * times]].mean(0)
    return keys[slots]
