from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvtide.device import Block, CPUDevice, Device, open_device
from kvtide.device.threads import drain
from kvtide.errors import UsageError
from support.jobs import submit
from support.lazy_device import LazyDevice

PATIENCE_S = 30


@pytest.fixture(params=[1, 2, 5], ids=lambda lanes: f"lanes={lanes}")
def device(request: pytest.FixtureRequest) -> Iterator[CPUDevice]:
    """CPU devices of one lane and of several."""
    device = CPUDevice(lanes=request.param)
    yield device
    device.close()


def raising(error: BaseException) -> Callable[[], int]:
    """An item that fails."""

    def item() -> int:
        raise error

    return item


def noting(value: int, ran: list[int]) -> Callable[[], int]:
    """An item that notes that it ran."""

    def item() -> int:
        ran.append(value)
        return value

    return item


def test_devices_open_by_name() -> None:
    """`cpu` is known, and says so."""
    device: Device = open_device("cpu")
    assert ("cpu", torch.device("cpu")) == (device.name, device.torch_device)
    device.close()


def test_an_unknown_device_is_refused_by_name() -> None:
    """The message names it, and those there are."""
    with pytest.raises(UsageError, match="'tpu' isn't known here; known are: cpu"):
        open_device("tpu")


def test_device_memory_comes_zeroed(device: CPUDevice) -> None:
    """It is uint8 [size_bytes], of zero bytes too."""
    assert [0] * 1000 == device.allocate(1000).tolist()
    assert [(0,), (0,), (7,)] == [
        tuple(tensor.shape)
        for tensor in (device.allocate(0), device.allocate_host(0), device.allocate_host(7))
    ]
    assert torch.uint8 == device.allocate_host(7).dtype


def test_a_block_is_a_window_of_its_slab() -> None:
    """Its view begins at its offset, ends after the size asked for, and writes to the slab."""
    slab = torch.arange(10, dtype=torch.uint8)
    view = Block(slab, 3).bytes_view(4)
    assert [3, 4, 5, 6] == list(view)
    view[1] = 99
    assert 99 == slab[4]


def test_results_come_in_the_order_of_the_items(device: CPUDevice) -> None:
    """Whichever lane was faster."""

    def item(number: int) -> Callable[[], int]:
        def run() -> int:
            time.sleep(0.002 if number % 3 == 0 else 0)
            return number

        return run

    assert list(range(40)) == submit(device, [item(number) for number in range(40)]).wait()


def test_results_are_those_of_the_last_phase(device: CPUDevice) -> None:
    """Also where it is shorter than the one before it, or empty."""
    ones, twos = [lambda: 1] * 7, [lambda: 2] * 3
    assert [2, 2, 2] == submit(device, ones, twos).wait()
    assert [] == submit(device, ones, []).wait()
    assert [1] * 7 == submit(device, [], ones).wait()
    assert [] == submit(device).wait()


def test_every_item_runs_once(device: CPUDevice) -> None:
    """No lane takes another's item."""
    ran: list[int] = []
    submit(device, [noting(number, ran) for number in range(500)]).wait()
    assert list(range(500)) == sorted(ran)


def test_a_phase_begins_when_the_one_before_has_ended(device: CPUDevice) -> None:
    """All items of the first phase are seen by each item of the second."""
    ran: list[int] = []

    def slow() -> int:
        time.sleep(0.001)
        ran.append(0)
        return 0

    assert [12] * 12 == submit(device, [slow] * 12, [lambda: len(ran)] * 12).wait()


def test_jobs_run_in_the_order_submitted(device: CPUDevice) -> None:
    """A job waits for the earlier ones, however short it is."""
    gate = threading.Event()
    ran: list[str] = []

    def slow() -> None:
        assert gate.wait(PATIENCE_S)
        ran.append("slow")

    slow_job = submit(device, [slow])
    fast_job = submit(device, [lambda: ran.append("fast")])
    assert not slow_job.done()
    assert not fast_job.done()
    gate.set()
    fast_job.wait()
    assert slow_job.done()
    assert ["slow", "fast"] == ran


def test_submitting_returns_before_the_work_is_done(device: CPUDevice) -> None:
    """Otherwise this test would wait for itself."""
    gate = threading.Event()
    job = submit(device, [lambda: gate.wait(PATIENCE_S)])
    assert not job.done()
    gate.set()
    assert [True] == job.wait()
    assert job.done()


@pytest.mark.parametrize("at", [0, 3, 7])
@pytest.mark.parametrize("error_type", [IndexError, ValueError, StopIteration])
def test_an_error_of_an_item_is_raised_at_each_wait(
    device: CPUDevice, at: int, error_type: type[BaseException]
) -> None:
    """Whatever it is, wherever it happens; an IndexError too, which a deque raises as well."""
    items: list[Callable[[], int]] = [lambda: 1] * 8
    items[at] = raising(error_type("of the item"))
    job = submit(device, items)
    for _ in range(2):
        with pytest.raises(error_type, match="of the item"):
            job.wait()
    assert job.done()
    assert [5] == submit(device, [lambda: 5]).wait(), "the queue goes on"


def test_an_interrupt_ends_the_wait_and_not_the_move(device: CPUDevice) -> None:
    """Real signals, while many jobs are waited for: none is lost, none runs twice."""
    ran: list[int] = []
    interrupts = 0
    is_waiting = False

    def interrupt(*_: object) -> None:
        if is_waiting:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for number in range(200):
            pause = [lambda: time.sleep(0.0005)]
            job = submit(device, pause, [noting(number, ran)] * 4, [noting(number, ran)])
            while not job.done():
                try:
                    is_waiting = True
                    job.wait()
                    is_waiting = False
                except KeyboardInterrupt:
                    is_waiting = False
                    interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 0
    assert sorted(list(range(200)) * 5) == sorted(ran)


def test_without_threads_to_give_nothing_runs_after_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job that failed has let go of its memory: no lane may write there later."""
    device = CPUDevice(lanes=3)
    ran: list[int] = []
    start = device._lanes._others.submit
    calls: list[int] = []

    def submit_once(*given: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("can't start new thread")
        return start(*given)

    monkeypatch.setattr(device._lanes._others, "submit", submit_once)

    def note() -> None:
        time.sleep(0.001)
        ran.append(1)

    job = submit(device, [note] * 50)
    with pytest.raises(RuntimeError, match="new thread"):
        job.wait()
    count = len(ran)
    time.sleep(0.02)
    assert count == len(ran) < 50
    device.close()


def test_submitting_does_not_wait_for_the_job_at_work(device: CPUDevice) -> None:
    """A move is queued behind another one at once; what it needs may still be written."""
    gate, started = threading.Event(), threading.Event()

    def hold() -> bool:
        started.set()
        return gate.wait(PATIENCE_S)

    first = submit(device, [hold])
    assert started.wait(PATIENCE_S)
    second = submit(device, [lambda: True])
    assert not second.done()
    gate.set()
    assert [True] == second.wait()
    assert first.done()


def test_after_an_error_no_later_phase_begins(device: CPUDevice) -> None:
    """That is what keeps a damaged snapshot from being written."""
    ran: list[int] = []
    items: list[Callable[[], int]] = [lambda: 0, raising(ValueError()), lambda: 0]
    job = submit(device, items, [noting(1, ran)])
    with pytest.raises(ValueError):
        job.wait()
    assert [] == ran


def test_after_an_error_the_remaining_items_are_dropped() -> None:
    """Neither the lane that failed nor another one finds any more."""
    ran: list[int] = []
    items = deque(enumerate([noting(0, ran), raising(ValueError()), noting(2, ran)]))
    with pytest.raises(ValueError):
        drain(items, {})
    assert [] == list(items)
    assert [0] == ran


@pytest.mark.parametrize("failing_lane", ["kvtide-queue", "kvtide-lane"])
def test_a_failed_job_ends_when_its_last_lane_does(failing_lane: str) -> None:
    """Whichever lane fails: when the job has ended nothing copies any more."""
    device = CPUDevice(lanes=2)
    both, failed = threading.Barrier(2), threading.Event()
    ended: list[str] = []

    def item() -> None:
        both.wait(PATIENCE_S)
        if threading.current_thread().name.startswith(failing_lane):
            failed.set()
            raise ValueError(failing_lane)
        assert failed.wait(PATIENCE_S)
        time.sleep(0.05)
        ended.append("the other")

    job = submit(device, [item, item])
    with pytest.raises(ValueError, match=failing_lane):
        job.wait()
    assert ["the other"] == ended
    device.close()


def test_as_many_items_run_side_by_side_as_there_are_lanes() -> None:
    """Each waits for all the others, so fewer lanes would never get through."""
    device = CPUDevice(lanes=4)
    together = threading.Barrier(4)
    assert 4 == len(set(submit(device, [lambda: together.wait(PATIENCE_S)] * 4).wait()))
    device.close()


def test_lanes_follow_torch_threads_unless_said() -> None:
    """The person who gave torch its threads has said how many cores there are."""
    device = CPUDevice()
    assert torch.get_num_threads() == device.lanes
    device.close()


def test_lanes_write_to_tensors_of_inference_mode(device: CPUDevice) -> None:
    """An engine's pool may have been made in it."""
    with torch.inference_mode():
        tensor = torch.zeros(3)
    submit(device, [lambda: tensor.fill_(7)]).wait()
    assert [7, 7, 7] == tensor.tolist()


def test_closing_waits_for_the_queue(device: CPUDevice) -> None:
    """What was submitted has run when close returns; closing again is harmless."""
    ran: list[int] = []

    def slow() -> int:
        time.sleep(0.005)
        return 0

    jobs = [submit(device, [slow], [noting(number, ran)]) for number in range(4)]
    device.close()
    assert [0, 1, 2, 3] == ran
    assert all(job.done() for job in jobs)
    device.close()


def test_the_lazy_device_does_nothing_by_itself() -> None:
    """The tests of fences depend on it: only `wait` runs jobs, and in their order."""
    device: Device = LazyDevice()
    ran: list[int] = []
    first, second = (submit(device, [noting(n, ran)]) for n in (1, 2))
    assert ([], False, False) == (ran, first.done(), second.done())
    second.wait()
    assert ([1, 2], True, True) == (ran, first.done(), second.done())
