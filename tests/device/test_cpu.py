from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest
import torch

from kvtide.device import Block, CPUDevice, Device, open_device
from kvtide.device.threads import QueuedJob, Threads, run_items
from kvtide.errors import UsageError
from support.interrupts import every_interrupt
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


def test_results_are_those_of_all_phases_in_order(device: CPUDevice) -> None:
    """A phase may be shorter than the phase before it, or empty."""
    ones, twos = [lambda: 1] * 7, [lambda: 2] * 3
    assert [1] * 7 + [2] * 3 == submit(device, ones, twos).wait()
    assert [1] * 7 == submit(device, ones, []).wait()
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

    assert [0] * 12 + [12] * 12 == submit(device, [slow] * 12, [lambda: len(ran)] * 12).wait()


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


@pytest.mark.parametrize("place", [0, 3, 7])
@pytest.mark.parametrize("error_type", [IndexError, ValueError, StopIteration])
def test_an_error_of_an_item_is_raised_at_each_wait(
    device: CPUDevice, place: int, error_type: type[BaseException]
) -> None:
    """Whatever it is, wherever it happens; an IndexError too, which a deque raises as well."""
    items: list[Callable[[], int]] = [lambda: 1] * 8
    items[place] = raising(error_type("of the item"))
    job = submit(device, items)
    for _ in range(2):
        with pytest.raises(error_type, match="of the item"):
            job.wait()
    assert job.done()
    assert [5] == submit(device, [lambda: 5]).wait(), "the queue goes on"


class PickyError(Exception):
    """Copying fails: it is made of two things, and keeps one."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


@pytest.mark.parametrize("error", [OSError("of the item"), PickyError("of the item", "no copy")])
@pytest.mark.parametrize("at_once", [False, True])
def test_an_error_says_where_it_was_though_its_frames_are_let_go(
    device: CPUDevice, error: Exception, at_once: bool
) -> None:
    """In a note: what was there is the item's, and those who wait are others."""
    job = submit(device, [raising(error)], at_once=at_once)
    for _ in range(2):
        with pytest.raises(type(error), match="of the item") as caught:
            job.wait()
        (note,) = caught.value.__notes__
        assert "test_cpu.py" in note
        assert "of the item" in note
        assert caught.value.__traceback__ is not None
        assert error.__traceback__ is None, "whoever keeps it holds nobody's frames"


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


def test_at_once_an_idle_device_works_in_the_calling_thread() -> None:
    """Two changes of threads cost as much as it takes to copy a megabyte."""
    device = CPUDevice(lanes=1)
    job = submit(device, [threading.get_ident], at_once=True)
    assert (True, [threading.get_ident()]) == (job.done(), job.wait())
    device.close()


def test_at_once_a_busy_device_works_in_turn(device: CPUDevice) -> None:
    """A restore must not overtake the offload of the same slots, nor run beside it."""
    gate, ran = threading.Event(), list[int]()

    def slow() -> int:
        gate.wait(PATIENCE_S)
        return noting(1, ran)()

    submit(device, [slow])
    job = submit(device, [noting(2, ran)], at_once=True)
    assert ([], False) == (ran, job.done())
    gate.set()
    job.wait()
    assert [1, 2] == ran


def test_what_is_submitted_meanwhile_waits_for_the_job_at_once(device: CPUDevice) -> None:
    """By another thread: jobs never run side by side."""
    started, gate, ran = threading.Event(), threading.Event(), list[int]()

    def slow() -> int:
        started.set()
        gate.wait(PATIENCE_S)
        return noting(1, ran)()

    caller = threading.Thread(target=lambda: submit(device, [slow], at_once=True))
    caller.start()
    started.wait(PATIENCE_S)
    jobs = [submit(device, [noting(2, ran)]), submit(device, [noting(3, ran)], at_once=True)]
    time.sleep(0.01)
    assert ([], False, False) == (ran, *(job.done() for job in jobs))
    gate.set()
    jobs[-1].wait()
    caller.join()
    assert [1, 2, 3] == ran


# Python loses what is raised within a callback of the collector, and says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_breaks_off_the_job_at_once(device: CPUDevice) -> None:
    """Real signals at any moment: when it is raised no lane runs, and the rest is dropped."""
    running: set[int] = set()
    ran: list[int] = []

    def work() -> None:
        running.add(threading.get_ident())
        time.sleep(0.0002)
        ran.append(1)
        running.discard(threading.get_ident())

    def interrupt(*_: object) -> None:
        running.discard(threading.get_ident())
        raise KeyboardInterrupt

    before, interrupts = signal.signal(signal.SIGALRM, interrupt), 0
    try:
        for number in range(100):
            ran.clear()
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0001 + number * 0.00002)
                submit(device, [work] * 200, [work] * 200, at_once=True)
                time.sleep(0.01)
            except KeyboardInterrupt:
                interrupts += 1
                assert set() == running
                assert len(ran) < 200
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 90
    assert [5] == submit(device, [lambda: 5]).wait(), "the queue goes on"


def test_a_job_at_once_that_fails_ends_wherever_an_interrupt_comes(device: CPUDevice) -> None:
    """Nothing waits for it: neither the thread that it was in, nor the jobs after it."""

    def make() -> tuple[None, Callable[[], object]]:
        def fail() -> None:
            with pytest.raises(OSError, match="link is down"):
                submit(device, [raising(OSError("link is down"))], at_once=True).wait()

        return None, fail

    for where, _, _ in every_interrupt(make):
        assert [1] == submit(device, [lambda: 1]).wait(), where
        assert [2] == submit(device, [lambda: 2], at_once=True).wait(), where


def test_a_closed_device_takes_no_job_at_once(device: CPUDevice) -> None:
    """Its lanes are gone."""
    device.close()
    with pytest.raises(RuntimeError, match="is closed"):
        submit(device, [lambda: 5], at_once=True)


def test_a_job_runs_or_is_cancelled() -> None:
    """Never both: whoever is first has it."""
    ran: list[int] = []
    job = QueuedJob(noting(1, ran))
    assert job.cancel()
    job.run()
    assert [] == ran
    other = QueuedJob(noting(2, ran))
    other.run()
    assert not other.cancel()
    assert (2, [2]) == (other.wait(), ran)


def test_lanes_that_have_not_begun_are_not_waited_for() -> None:
    """Their threads may be at another job still; there is nothing left for them to do."""
    lane, gate, started = Threads(1, "lane"), threading.Event(), threading.Event()

    def busy() -> None:
        started.set()
        gate.wait(PATIENCE_S)

    lane.start(busy)
    started.wait(PATIENCE_S)
    assert [1, 2, 3] == lane.run([lambda n=n: n for n in (1, 2, 3)])  # type: ignore[misc]
    gate.set()
    lane.close()


def test_threads_end_with_what_they_belong_to() -> None:
    """Closed or forgotten: a server that opens devices again and again keeps no threads."""
    before = threading.active_count()
    closed, forgotten = CPUDevice(lanes=3), CPUDevice(lanes=3)
    assert before + 6 == threading.active_count()
    closed.close()
    del forgotten
    assert before == threading.active_count()


def test_a_process_ends_with_devices_open() -> None:
    """What was submitted has happened then, on all lanes, while what is older is still there."""
    program = (
        "import atexit, os, time; from kvtide.device import CPUDevice, Step\n"
        "atexit.register(lambda: os.write(1, b'older ends\\n'))\n"
        "def late(): time.sleep(0.2); os.write(1, b'done\\n')\n"
        "device = CPUDevice(lanes=2)\n"
        "device.submit(lambda: [[Step(late), Step(late)], [Step(late), Step(late)]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=PATIENCE_S, check=False
    )
    assert (0, b"") == (done.returncode, done.stderr)
    assert [b"done"] * 4 + [b"older ends"] == done.stdout.splitlines()


def test_closing_waits_for_the_job_at_once_of_another_thread() -> None:
    """Which would find no lanes in its next phase."""
    device, started = CPUDevice(lanes=2), threading.Event()
    ran: list[int] = []

    def slow() -> int:
        started.set()
        time.sleep(0.05)
        return noting(1, ran)()

    caller = threading.Thread(
        target=lambda: submit(device, [slow] * 2, [noting(2, ran)] * 2, at_once=True).wait()
    )
    caller.start()
    started.wait(PATIENCE_S)
    device.close()
    assert [1, 1, 2, 2] == ran
    caller.join()


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
        run_items(items, {})
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


def test_jobs_that_were_done_at_once_are_forgotten() -> None:
    """A server whose calls all block doesn't grow, though its queue's thread never comes by."""
    device = CPUDevice(lanes=1)
    for _ in range(3):
        assert [7] == submit(device, [lambda: 7], at_once=True).wait()
    assert not device._queue._jobs
    device.close()
