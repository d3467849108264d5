"""A violation names the operation, the tensors, and the line that issued it."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable

import pytest
import simnpu
import torch

from conftest import NPU, Plan


def message() -> str:
    """Returns the error of the next synchronise."""
    with pytest.raises(RuntimeError) as raised:
        NPU.synchronize()
    return str(raised.value)


def line_of(function: Callable[..., object], marker: str) -> str:
    """Returns the marked line of `function` in the form of a message."""
    lines, first = inspect.getsourcelines(function)
    number = next(first + i for i, line in enumerate(lines) if f"# {marker}" in line)
    return f"{__file__}:{number} in {function.__qualname__}"


def upload(source: torch.Tensor) -> torch.Tensor:
    """Copies to the device, from a marked line."""
    return source.to("npu", non_blocking=True)  # here


def test_a_copy_is_named_with_its_tensors_and_its_line() -> None:
    """The test compares the whole text of a message."""
    source = torch.ones(4, 2, dtype=torch.float16).pin_memory()
    target = upload(source)
    source.fill_(2)
    expected = (
        "simnpu: copy to device: the host source was modified before the copy ran; leave it alone "
        "until an event recorded after the copy is done\n"
        f"  source float16 [4, 2] at {source.data_ptr():#x} (pinned)\n"
        f"  target float16 [4, 2] at {target.data_ptr():#x} on npu:0\n"
        f"  issued at {line_of(upload, 'here')}"
    )
    assert expected == message()


def fetch(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies to the host, from a marked line."""
    target.copy_(source, non_blocking=True)  # here


def test_a_freed_pageable_target_is_named() -> None:
    """The message has the address of the freed tensor, so that it can be found in a log."""
    target = torch.zeros(3, dtype=torch.int32)
    address = target.data_ptr()
    fetch(target, torch.ones(3, dtype=torch.int32, device="npu"))
    del target
    text = message()
    assert f"target int32 [3] at {address:#x} (pageable)" in text
    assert text.endswith(f"issued at {line_of(fetch, 'here')}")


def scatter(pool: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes rows on the device, from a marked line."""
    pool[rows] = 1.0  # here


def test_a_failing_kernel_is_named_with_its_tensors_and_its_line(schedule: Plan) -> None:
    """The message names the line of the call, not of the synchronise."""
    pool, rows = torch.zeros(4, device="npu"), torch.tensor([9], device="npu")
    scatter(pool, rows)
    text = message()
    assert text.startswith("simnpu: aten::_index_put_impl_ failed: index 9 is out of bounds")
    assert f"  self float32 [4] at {pool.data_ptr():#x} on npu:0\n" in text
    assert f"  indices int64 [1] at {rows.data_ptr():#x} on npu:0\n" in text
    assert text.endswith(f"issued at {line_of(scatter, 'here')}")


class Gather(torch.nn.Module):
    """A module, so that frames of torch lie between the test and the operator."""

    def forward(self, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Reads rows on the device, from a marked line."""
        return torch.nn.functional.embedding(rows, table)  # here


def test_frames_of_torch_are_skipped() -> None:
    """The message names the user's line, even if torch's Python called the operator."""
    Gather()(torch.zeros(4, 2, device="npu"), torch.tensor([7], device="npu"))
    assert message().endswith(f"issued at {line_of(Gather.forward, 'here')}")


def test_a_thread_without_python_is_named() -> None:
    """autograd runs backward operations on its own thread, which has no line of Python."""
    table = torch.zeros(4, 2, device="npu", requires_grad=True)
    rows = torch.tensor([1], device="npu")
    picked = table.index_select(0, rows)
    NPU.synchronize()
    rows.data.fill_(9)  # autograd doesn't notice this
    torch.autograd.backward(picked.sum())
    assert "issued at a thread that runs no Python" in message()


def test_all_violations_come_at_once_and_only_once() -> None:
    """They come in the order in which they were found, and are forgotten then."""
    sources = [torch.ones(2 + i) for i in range(3)]
    for source in sources:
        upload(source)
        source.zero_()
    assert ["[2]", "[3]", "[4]"] == re.findall(r"source float32 (\S+)", message())
    NPU.synchronize()


def test_many_violations_are_counted() -> None:
    """A loop of mistakes keeps a limited number of messages and counts the others."""
    for _ in range(130):
        upload(torch.ones(2))
    assert message().endswith("simnpu: and 30 more")


def test_take_violations_forgets_them() -> None:
    """A test that expects a violation takes it, so that it isn't raised later."""
    upload(torch.ones(2))
    simnpu.step(1)
    [violation] = simnpu.take_violations()
    assert "the host tensor was freed" in violation
    NPU.synchronize()


def test_changing_the_schedule_keeps_what_was_found() -> None:
    """Changing the schedule runs pending operations and raises nothing."""
    upload(torch.ones(2))
    simnpu.set_schedule("eager")
    assert "the host tensor was freed" in message()


def test_every_wait_raises_violations() -> None:
    """An event, a stream, a blocking copy and .item() raise violations, too."""
    tensor = torch.ones(1, device="npu")
    waits: list[Callable[[], object]] = [
        lambda: torch.accelerator.current_stream().record_event().synchronize(),
        lambda: torch.accelerator.current_stream().synchronize(),
        tensor.cpu,
        tensor.item,
        torch.accelerator.synchronize,
    ]
    for wait in waits:
        upload(torch.ones(2))
        with pytest.raises(RuntimeError, match="simnpu: copy to device"):
            wait()


def test_lines_are_taken_without_a_deadlock(schedule: Plan) -> None:
    """Threads that compete for Python's lock and the simulator's lock all finish."""

    def work() -> None:
        for _ in range(200):
            torch.ones(4, device="npu").add_(1).sum()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    NPU.synchronize()
