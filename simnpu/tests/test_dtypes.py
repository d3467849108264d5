"""Operators that move KV: gathers, scatters and views of every dtype don't wait."""

from __future__ import annotations

import pytest
import simnpu
import torch

from conftest import NPU, Plan

DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128),
]


@pytest.fixture(autouse=True)
def permissive() -> None:
    """Turns the deny list off, so that every dtype is accepted."""
    simnpu._C.set_refusals([])


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Makes random bytes, and random bits for bool."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    width = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * width), dtype=torch.uint8).view(dtype)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compares bytes, so that NaN equals itself."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_rows_are_gathered_and_scattered(
    schedule: Plan, dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    """Gathered and scattered rows have the same bytes as on the host."""
    host, rows = sample(dtype, 48, 1, 16), torch.tensor([3, 40, 0, 7])
    pool, index = host.to("npu"), rows.to("npu", index_dtype)
    picked = pool[index].to("cpu", non_blocking=True)
    selected = pool.index_select(0, index).to("cpu", non_blocking=True)
    NPU.synchronize()
    assert same_bytes(host[rows], picked)
    assert same_bytes(host[rows], selected)
    fresh = sample(dtype, 4, 1, 16)
    pool[index] = fresh.to("npu")
    host[rows] = fresh
    assert same_bytes(host, pool.cpu())


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.int64, torch.complex128], ids=str
)
def test_operators_of_a_mover_do_not_wait(dtype: torch.dtype) -> None:
    """The mover calls index_select into a buffer, index_copy_, index_put_, and views."""
    host, rows = sample(dtype, 16, 8), torch.tensor([5, 2, 9])
    pool, index = host.to("npu"), rows.to("npu")
    staging = torch.zeros(3, 8, dtype=dtype, device="npu")
    NPU.synchronize()
    before = simnpu.stats().blocking_kernels
    torch.index_select(pool, 0, index, out=staging)
    pool.index_copy_(0, index + 1, staging)
    pool.index_put_((index + 2,), staging)
    row_bytes = pool.view(torch.uint8).as_strided((2, 8), (16, 1), 16)
    result = row_bytes.to("cpu", non_blocking=True)
    assert simnpu.pending() >= 5
    assert before == simnpu.stats().blocking_kernels
    NPU.synchronize()
    picked = host[rows].clone()
    host[rows + 1] = picked
    host[rows + 2] = picked
    assert same_bytes(host, pool.cpu())
    assert torch.equal(host.view(torch.uint8).flatten().as_strided((2, 8), (16, 1), 16), result)


def test_views_share_memory_and_copy_nothing() -> None:
    """Making a view queues nothing."""
    tensor = torch.arange(24, device="npu").view(2, 3, 4)
    NPU.synchronize()
    views = [
        tensor[1, :, 2],
        tensor.transpose(0, 1),
        tensor.unfold(2, 2, 2),
        tensor.view(torch.uint8),
        tensor.view(torch.float64).view(torch.complex128),
        torch.view_as_real(tensor.view(torch.complex64)),
        *tensor.chunk(2, 2),
    ]
    assert 0 == simnpu.pending()
    storage = tensor.untyped_storage().data_ptr()
    assert {storage} == {view.untyped_storage().data_ptr() for view in views}
    assert [14, 18, 22] == views[0].tolist()


def test_masks_select_and_assign(schedule: Plan) -> None:
    """The shape of these results depends on data, so torch waits for them."""
    tensor = torch.arange(10.0, device="npu")
    mask = tensor > 6
    assert [7, 8, 9] == tensor[mask].tolist()
    tensor[mask] = torch.tensor([1.0, 2.0, 3.0], device="npu")
    assert [1, 2, 3] == tensor[-3:].tolist()
    assert [7, 8, 9] == torch.where(mask)[0].tolist()
    assert 7 == torch.unique(tensor).numel()


def test_conjugates_and_negatives_are_copied_by_value(schedule: Plan) -> None:
    """Such tensors are views with a bit set, which must not get lost in a copy."""
    host = torch.tensor([1 + 2j, 3 - 4j])
    conjugate = host.to("npu").conj()
    assert torch.equal(host.conj().resolve_conj(), conjugate.cpu().resolve_conj())
    assert [-2.0, 4.0] == conjugate.imag.cpu().tolist()
    target = torch.zeros(2, dtype=torch.complex64)
    target.copy_(conjugate, non_blocking=True)
    NPU.synchronize()
    assert torch.equal(host.conj().resolve_conj(), target)
    assert torch.equal(host.conj().resolve_conj(), host.conj().to("npu").cpu().resolve_conj())


def test_copies_broadcast_and_convert(schedule: Plan) -> None:
    """Copies convert dtypes and broadcast shapes as on any device."""
    target = torch.zeros(3, 2, dtype=torch.int32, device="npu")
    target.copy_(torch.tensor([1.0, 2.0], device="npu"))
    assert [[1, 2]] * 3 == target.tolist()
    column = torch.tensor([[5.0], [6.0], [7.0]])
    target.copy_(column, non_blocking=True)
    assert [[5, 5], [6, 6], [7, 7]] == target.tolist()
