"""Attention gives the bits of the CPU's fused kernel, and is asynchronous."""

from __future__ import annotations

import pytest
import simnpu
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from conftest import LAZY, NPU, Plan


def inputs(*, kv_heads: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Makes a query [1, 4, 5, 16], and keys and values [1, kv_heads, 9, 16]."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((1, 4, 5, 16), (1, kv_heads, 9, 16), (1, kv_heads, 9, 16))
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return query, key, value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "bias", "grouped"])
def test_attention_has_the_bits_of_the_cpu(schedule: Plan, kind: str, dtype: torch.dtype) -> None:
    """Plain, causal, masked, biased and grouped attention have the CPU's bits."""
    query, key, value = inputs(kv_heads=2 if kind == "grouped" else 4, dtype=dtype)
    mask = torch.arange(9)[None] <= torch.arange(5)[:, None] + 4
    bias = torch.zeros(5, 9, dtype=dtype).masked_fill(~mask, float("-inf"))
    given = {"mask": mask, "bias": bias}.get(kind)

    def attend(device: str) -> Tensor:
        return scaled_dot_product_attention(
            query.to(device),
            key.to(device),
            value.to(device),
            attn_mask=None if given is None else given.to(device),
            is_causal=kind == "causal",
            enable_gqa=kind == "grouped",
        )

    with torch.inference_mode():
        assert torch.equal(attend("cpu"), attend("npu").cpu())


def test_gradients_have_the_bits_of_the_cpu(schedule: Plan) -> None:
    """The backward pass uses the CPU's fused kernel."""
    found = []
    for device in ("cpu", "npu"):
        query, key, value = (tensor.to(device).requires_grad_() for tensor in inputs(kv_heads=4))
        total = scaled_dot_product_attention(query, key, value).sum()
        found.append([tensor.cpu() for tensor in torch.autograd.grad(total, (query, key, value))])
    assert all(torch.equal(expected, actual) for expected, actual in zip(*found, strict=True))


def test_attention_does_not_run_before_somebody_waits() -> None:
    """The result is poison until somebody waits for it."""
    LAZY.set()
    query, key, value = (tensor.to("npu") for tensor in inputs(kv_heads=4))
    NPU.synchronize()
    with torch.inference_mode():
        result = scaled_dot_product_attention(query, key, value).to("cpu", non_blocking=True)
    assert simnpu.pending() > 0
    assert result.isnan().all()
    NPU.synchronize()
    assert not result.isnan().any()
