"""Each kind of mistake shows, and correct code shows nothing.

An attempt returns whether something went wrong. `lazy` must show each mistake at the first try.
`random` and `thread` may run an operation in time, so they must show it in one of many tries.
`eager` runs everything at once: it shows only mistakes that don't depend on the order.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import simnpu
import torch

from conftest import NPU, Plan

TRIES = 200

Attempt = Callable[[bool], bool]


def synchronize_raises(expected: str) -> bool:
    """Returns whether synchronising raises an error; the error must be the expected one."""
    try:
        NPU.synchronize()
    except RuntimeError as error:
        message = str(error)
        assert message.startswith("simnpu: ")
        assert expected in message
        return True
    return False


def differs(left: torch.Tensor, right: float) -> bool:
    """Returns whether any element differs from the number."""
    return not bool((left == right).all())


def synchronise(right: bool) -> bool:
    """A result on the host is read only after a synchronise."""
    result = torch.ones(8, device="npu").to("cpu", non_blocking=True)
    if right:
        NPU.synchronize()
    went_wrong = differs(result, 1)
    NPU.synchronize()
    return went_wrong


def synchronise_the_stream_of_the_copy(right: bool) -> bool:
    """Only the copy's stream knows when the copy is done."""
    source = torch.ones(8, device="npu")
    NPU.synchronize()
    stream = torch.Stream(device="npu")
    with stream:
        result = source.to("cpu", non_blocking=True)
    (stream if right else torch.accelerator.current_stream()).synchronize()
    went_wrong = differs(result, 1)
    NPU.synchronize()
    return went_wrong


def wait_for_the_event(right: bool) -> bool:
    """A stream that reads what another stream writes waits for it."""
    source = torch.zeros(8, device="npu")
    stream = torch.Stream(device="npu")
    NPU.synchronize()
    source.fill_(3.0)
    if right:
        stream.wait_event(torch.accelerator.current_stream().record_event())
    with stream:
        result = source.to("cpu", non_blocking=True)
    stream.synchronize()
    went_wrong = differs(result, 3)
    NPU.synchronize()
    return went_wrong


def record_the_stream(right: bool) -> bool:
    """A tensor that another stream still reads is recorded on it before it is dropped."""
    source = torch.ones(8, device="npu")
    NPU.synchronize()
    stream = torch.Stream(device="npu")
    with stream:
        result = source.to("cpu", non_blocking=True)
    if right:
        source.record_stream(stream)
    del source
    torch.accelerator.current_stream().synchronize()
    went_wrong = synchronize_raises("device memory was freed before it ran")
    assert right <= (not differs(result, 1))
    return went_wrong


def leave_the_source(right: bool, make: Callable[[], torch.Tensor]) -> bool:
    """The host source stays unchanged until the copy has run."""
    source = make().fill_(1.0)
    target = source.to("npu", non_blocking=True)
    if right:
        NPU.synchronize()
    source.fill_(7.0)
    went_wrong = synchronize_raises("the host source was modified before the copy ran")
    assert right <= (not differs(target.cpu(), 1))
    return went_wrong


def leave_the_target(right: bool, make: Callable[[], torch.Tensor]) -> bool:
    """Nobody writes to the host target until the copy has run."""
    target = make()
    target.copy_(torch.ones(4, 4, device="npu"), non_blocking=True)
    if right:
        NPU.synchronize()
    target[3, 2] = 5.0
    return synchronize_raises("the host target was written before the copy ran")


def keep_the_source(right: bool, make: Callable[[], torch.Tensor]) -> bool:
    """The host source exists until the copy has run."""
    source = make().fill_(1.0)
    target = source.to("npu", non_blocking=True)
    if right:
        NPU.synchronize()
    del source
    went_wrong = synchronize_raises("the host tensor was freed before the copy ran")
    assert right <= (not differs(target.cpu(), 1))
    return went_wrong


def keep_the_target(right: bool, make: Callable[[], torch.Tensor]) -> bool:
    """The host target exists until the copy has run."""
    target = make()
    target.copy_(torch.ones(4, 4, device="npu"), non_blocking=True)
    if right:
        NPU.synchronize()
    del target
    return synchronize_raises("the host tensor was freed before the copy ran")


def write_before_reading(right: bool) -> bool:
    """Memory that nobody wrote to reads as NaN."""
    tensor = torch.empty(8, device="npu")
    if right:
        tensor.zero_()
    return bool(tensor.cpu().isnan().any())


def write_after_growing(right: bool) -> bool:
    """The part that a tensor gains by growing is written before it is read."""
    tensor = torch.zeros(2, device="npu").resize_(8)
    if right:
        tensor.zero_()
    return differs(tensor.cpu(), 0)


def index_within_bounds(right: bool) -> bool:
    """An invalid index is found when the kernel runs."""
    tensor = torch.zeros(4, device="npu")
    tensor[torch.tensor([1 if right else 9], device="npu")] = 1.0
    return synchronize_raises("index 9 is out of bounds for dimension 0 with size 4")


def pageable() -> torch.Tensor:
    """Makes ordinary host memory."""
    return torch.zeros(4, 4)


def pinned() -> torch.Tensor:
    """Makes pinned host memory."""
    return torch.zeros(4, 4).pin_memory()


def strided() -> torch.Tensor:
    """Makes a view of every other column of pinned host memory."""
    return torch.zeros(4, 8).pin_memory()[:, ::2]


def transposed() -> torch.Tensor:
    """Makes a transposed part of ordinary host memory."""
    return torch.zeros(6, 4)[1:5].t()


def on(
    attempt: Callable[[bool, Callable[[], torch.Tensor]], bool], make: Callable[[], torch.Tensor]
) -> Attempt:
    """Makes the attempt with host memory of one kind."""

    def made(right: bool) -> bool:
        return attempt(right, make)

    made.__name__ = f"{attempt.__name__}_{make.__name__}"
    return made


ORDER: list[Attempt] = [
    synchronise,
    synchronise_the_stream_of_the_copy,
    wait_for_the_event,
    record_the_stream,
    *(on(leave_the_source, make) for make in (pageable, pinned, strided, transposed)),
    *(on(leave_the_target, make) for make in (pageable, pinned, strided, transposed)),
    *(on(keep_the_source, make) for make in (pageable, pinned, strided)),
    *(on(keep_the_target, make) for make in (pageable, pinned, strided)),
]
ANY_ORDER: list[Attempt] = [write_before_reading, write_after_growing, index_within_bounds]


@pytest.mark.parametrize("attempt", ORDER, ids=lambda attempt: attempt.__name__)
def test_a_mistake_that_depends_on_order_shows(schedule: Plan, attempt: Attempt) -> None:
    """lazy shows it at once, random and thread in one of many tries; eager hides it."""
    simnpu.set_policy(strict_free=True)
    if schedule.schedule == "lazy":
        assert attempt(False)
    elif schedule.schedule == "eager":
        assert not any(attempt(False) for _ in range(5))
    else:
        assert any(attempt(False) for _ in range(TRIES))


@pytest.mark.parametrize("attempt", ANY_ORDER, ids=lambda attempt: attempt.__name__)
@pytest.mark.usefixtures("schedule")
def test_a_mistake_that_does_not_depend_on_order_shows(attempt: Attempt) -> None:
    """Every schedule shows it, eager too."""
    assert attempt(False)


@pytest.mark.parametrize("attempt", ORDER + ANY_ORDER, ids=lambda attempt: attempt.__name__)
@pytest.mark.usefixtures("schedule")
def test_the_right_way_shows_nothing(attempt: Attempt) -> None:
    """No schedule reports correct code."""
    simnpu.set_policy(strict_free=True)
    assert not any(attempt(True) for _ in range(10))


HOST_ACCESS = """
import ctypes, os, torch, simnpu
for schedule in ("lazy", "eager", "random", "thread"):
    child = os.fork()
    if child == 0:
        simnpu.install("npu", schedule=schedule)
        tensor = torch.full((4,), 2.0, device="npu")
        print(schedule, tensor.tolist(), flush=True)
        ctypes.string_at(tensor.data_ptr(), 4)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_the_host_cannot_touch_device_memory() -> None:
    """A copy to the host works; a read through data_ptr() ends the process with SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", HOST_ACCESS], capture_output=True, text=True)
    expected = [
        line
        for name in ("lazy", "eager", "random", "thread")
        for line in (f"{name} [2.0, 2.0, 2.0, 2.0]", "-11")
    ]
    assert (expected, 0) == (done.stdout.splitlines(), done.returncode)


@pytest.mark.usefixtures("schedule")
def test_pinned_memory_may_be_dropped_without_strict_free() -> None:
    """A real allocator of pinned memory keeps it until the copy has run."""
    source = torch.ones(64).pin_memory()
    target = source.to("npu", non_blocking=True)
    del source
    assert 64 == target.sum().item()


def test_without_pageable_async_pageable_sources_are_read_at_the_call() -> None:
    """The driver stages the source, so it may change after the call."""
    simnpu.set_policy(pageable_async=False)
    source = torch.ones(64)
    target = source.to("npu", non_blocking=True)
    assert simnpu.pending() > 0
    source.fill_(7.0)
    assert not differs(target.cpu(), 1)


def test_without_pageable_async_a_copy_to_pageable_memory_blocks() -> None:
    """Pageable targets have no staging, so the call waits."""
    simnpu.set_policy(pageable_async=False)
    target = torch.zeros(64)
    target.copy_(torch.ones(64, device="npu"), non_blocking=True)
    assert not differs(target, 1)


@pytest.mark.usefixtures("schedule")
def test_copies_ordered_by_their_stream_may_share_host_memory() -> None:
    """Copies to the host, to the device and back may use one buffer, though its content changes."""
    buffer = torch.zeros(8).pin_memory()
    first, second = torch.ones(8, device="npu"), torch.zeros(8, device="npu")
    for _ in range(3):
        buffer.copy_(first, non_blocking=True)
        second.copy_(buffer, non_blocking=True)
        second += 1
        buffer.copy_(second, non_blocking=True)
    NPU.synchronize()
    assert not differs(buffer, 2)


def test_host_arguments_are_read_at_the_call() -> None:
    """An index on the host may change as soon as the call has returned."""
    tensor = torch.arange(4.0, device="npu")
    index = torch.tensor([2])
    picked = tensor[index]
    index.fill_(0)
    assert [2.0] == picked.tolist()


def test_only_the_elements_of_a_target_are_poisoned() -> None:
    """Memory between the elements of a strided target belongs to somebody else."""
    whole = torch.zeros(4, 8).pin_memory()
    whole[:, ::2].copy_(torch.ones(4, 4, device="npu"), non_blocking=True)
    assert bool(whole[:, ::2].isnan().all())
    assert not differs(whole[:, 1::2], 0)
    whole[:, 1::2] = 5.0
    NPU.synchronize()
    assert not differs(whole[:, ::2], 1)
