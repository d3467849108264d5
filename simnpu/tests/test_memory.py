"""Device memory and pinned host memory."""

from __future__ import annotations

import gc

import pytest
import simnpu
import torch

from conftest import NPU

MIB = 1 << 20


def allocate(size_bytes: int) -> torch.Tensor:
    """Allocates memory on the current device."""
    return torch.empty(size_bytes, dtype=torch.uint8, device="npu")


def test_allocated_memory_is_counted() -> None:
    """torch.accelerator and torch.npu report the same numbers."""
    gc.collect()  # earlier tests' garbage must not be freed between the counts
    before = torch.accelerator.memory_allocated()
    tensor = allocate(MIB)
    assert MIB == torch.accelerator.memory_allocated() - before
    assert NPU.memory_allocated() == torch.accelerator.memory_allocated()
    free, total = torch.accelerator.get_memory_info()
    assert (2 << 30, torch.accelerator.memory_allocated()) == (total, total - free)
    assert (free, total) == NPU.mem_get_info()
    stats = torch.accelerator.memory_stats()
    assert torch.accelerator.memory_allocated() == stats["allocated_bytes.all.current"]
    del tensor
    assert before == torch.accelerator.memory_allocated()


def test_the_peak_is_kept_and_can_be_reset() -> None:
    """A reset sets the peak to the memory in use."""
    del_me = allocate(3 * MIB)
    del del_me
    assert NPU.max_memory_allocated() >= NPU.memory_allocated() + 3 * MIB
    torch.accelerator.reset_peak_memory_stats()
    assert NPU.max_memory_allocated() == NPU.memory_allocated()


def test_more_memory_than_the_device_has_is_refused() -> None:
    """torch's own error is raised."""
    with pytest.raises(torch.OutOfMemoryError, match=r"simnpu: out of memory on npu:0.*in use"):
        allocate(4 << 30)


def test_queued_frees_run_when_an_allocation_needs_the_memory() -> None:
    """The device behaves like a caching allocator, and doesn't free memory sooner than needed."""
    for _ in range(3):
        allocate(900 * MIB)[:1].fill_(1)
    NPU.synchronize()


def test_adjoining_free_blocks_are_merged() -> None:
    """The memory of many small blocks serves one large block."""
    NPU.synchronize()
    blocks = [allocate(64 * MIB) for _ in range(8)]
    reserved = NPU.memory_reserved()
    del blocks
    large = allocate(512 * MIB)
    assert reserved == NPU.memory_reserved()
    del large


def test_addresses_count_bytes_of_the_storage() -> None:
    """Addresses and sizes have the meaning that they have on any device."""
    tensor = torch.arange(24, device="npu").view(2, 3, 4)
    assert 12 * 8 == tensor[1].data_ptr() - tensor.data_ptr()
    assert "npu" == tensor.untyped_storage().device.type
    assert 24 * 8 == tensor.nbytes
    NPU.synchronize()


def test_a_storage_that_grows_keeps_what_it_held() -> None:
    """The copy is queued like all others."""
    tensor = torch.arange(4, device="npu")
    tensor.untyped_storage().resize_(8 * 8)
    tensor.resize_(8)[4:] = 9
    assert [0, 1, 2, 3, 9, 9, 9, 9] == tensor.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_fresh_memory_is_not_a_number(dtype: torch.dtype) -> None:
    """Fresh floats are NaN, whatever their width."""
    assert bool(torch.empty(5, dtype=dtype, device="npu").cpu().float().isnan().all())


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_fresh_integers_have_a_pattern(dtype: torch.dtype) -> None:
    """Every byte is 0xFD, which makes an invalid index and an invalid count."""
    fresh = torch.empty(5, dtype=dtype, device="npu").cpu()
    assert {0xFD} == set(fresh.view(torch.uint8).tolist())


def test_pinned_memory_is_known_as_such() -> None:
    """Memory may be pinned by either way of asking, and its parts are pinned, too."""
    pinned = torch.zeros(4, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned[2:].is_pinned()
    assert torch.zeros(4).pin_memory().is_pinned()
    assert not torch.zeros(4).is_pinned()
    assert not torch.empty(4, device="npu").is_pinned()


def test_device_memory_cannot_be_pinned() -> None:
    """The error is the one of every torch device."""
    with pytest.raises(RuntimeError, match=r"only .*CPU.* can be pinned"):
        torch.empty(4, device="npu").pin_memory()


def test_pinning_beyond_the_limit_is_refused() -> None:
    """The error is that of a reached lock limit; memory that is freed can be pinned again."""
    gc.collect()
    used = simnpu.stats().pinned_bytes
    simnpu.set_policy(pinned_limit_bytes=used + 100)
    first = torch.empty(60, dtype=torch.uint8, pin_memory=True)
    with pytest.raises(RuntimeError, match="can't pin 60 bytes of host memory"):
        torch.empty(60, dtype=torch.uint8, pin_memory=True)
    del first
    assert torch.empty(60, dtype=torch.uint8).pin_memory().is_pinned()


def test_a_result_on_the_host_is_poisoned_until_it_arrives() -> None:
    """A float is NaN until then, so a read that comes too early shows."""
    result = torch.ones(4, device="npu").to("cpu", non_blocking=True)
    assert bool(result.isnan().all())
    NPU.synchronize()
    assert [1.0] * 4 == result.tolist()


def test_a_recorded_stream_delays_the_free() -> None:
    """The memory is free again when the recorded stream is done."""
    NPU.synchronize()
    before = NPU.memory_allocated()
    tensor = allocate(MIB)
    stream = torch.Stream(device="npu")
    with stream:
        result = tensor.to("cpu", non_blocking=True)
    tensor.record_stream(stream)
    del tensor
    assert MIB == NPU.memory_allocated() - before
    torch.accelerator.current_stream().synchronize()
    assert before == NPU.memory_allocated()
    assert {0xFD} == set(result.tolist())
