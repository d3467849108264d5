from __future__ import annotations

import pytest
import torch

from kvtide.conformance.tensors import randomise, same_bytes


def test_every_byte_of_a_tensor_can_change() -> None:
    """A byte that never changed could hide a copy that left it out; this holds for every dtype."""
    torch.manual_seed(0)
    for dtype in (torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.int64):
        tensor = torch.zeros(4, 64, dtype=dtype)
        seen = torch.zeros(tensor.numel() * tensor.itemsize, dtype=torch.bool)
        for _ in range(4):
            randomise(tensor)
            seen |= tensor.view(-1).view(torch.uint8) != 0
        assert seen.all(), dtype


def test_bytes_between_rows_stay() -> None:
    """The gaps of a view may belong to somebody else."""
    memory = torch.zeros(8, 16)
    randomise(memory[:, :12])
    assert not memory[:, 12:].any()
    assert memory[:, :12].all()


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (torch.tensor([0.0, float("nan")]), True),
        (torch.tensor([-0.0, float("nan")]), False),
        (torch.tensor([[0.0, float("nan")]]), False),
    ],
)
def test_bytes_are_compared_and_not_numbers(found: torch.Tensor, expected: bool) -> None:
    """NaN equals itself, and -0 differs from 0."""
    assert expected == same_bytes(torch.tensor([0.0, float("nan")]), found)
