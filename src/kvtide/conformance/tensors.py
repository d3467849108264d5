"""Fills a tensor of any dtype and strides with random bytes, and compares two by their bytes."""

from __future__ import annotations

import torch


def randomise(tensor: torch.Tensor) -> None:
    """Fills a tensor with random bytes, NaNs among them, by torch's generator.

    A tensor with gaps gets normally distributed numbers instead, so that the gaps keep their bytes.
    """
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        raw = tensor.view(-1).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    else:
        tensor.copy_(torch.randn(tensor.shape).to(tensor.dtype))


def same_bytes(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and the same bytes, so that equal NaNs are equal."""
    return expected.shape == found.shape and torch.equal(_bytes(expected), _bytes(found))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
