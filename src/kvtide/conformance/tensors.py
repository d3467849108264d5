"""A tensor's bytes, whatever its dtype and strides: filled at random, and compared."""

from __future__ import annotations

import torch


def randomise(tensor: torch.Tensor) -> None:
    """Other bytes in all of a tensor, in place, by torch's generator; NaNs may be among them.

    Where rows don't adjoin, normal numbers of its dtype, so that what lies between them stays.
    """
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        raw = tensor.view(-1).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    else:
        tensor.copy_(torch.randn(tensor.shape).to(tensor.dtype))


def same_bytes(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether two tensors are of one shape and have the same bytes: NaNs are equal, too."""
    return expected.shape == found.shape and torch.equal(_bytes(expected), _bytes(found))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
