from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

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
    """Makes an item that raises the error."""

    def item() -> int:
        raise error

    return item


def noting(value: int, ran: list[int]) -> Callable[[], int]:
    """Makes an item that records that it ran."""

    def item() -> int:
        ran.append(value)
        return value

    return item


def test_devices_open_by_name() -> None:
    """`cpu` is a known name, and the device has it."""
    device: Device = open_device("cpu")
    assert ("cpu", torch.device("cpu")) == (device.name, device.torch_device)
    device.close()


def test_an_unknown_device_is_refused_by_name() -> None:
    """The message has the name and the known names."""
    with pytest.raises(UsageError, match="'tpu' isn't known here; known are: cpu"):
        open_device("tpu")


def test_device_memory_comes_zeroed(device: CPUDevice) -> None:
    """Memory is uint8 [size_bytes], also for zero bytes."""
    assert [0] * 1000 == device.allocate(1000).tolist()
    assert [(0,), (0,), (7,)] == [
        tuple(tensor.shape)
        for tensor in (device.allocate(0), device.allocate_host(0), device.allocate_host(7))
    ]
    assert torch.uint8 == device.allocate_host(7).dtype


def test_a_block_is_a_window_of_its_slab() -> None:
    """Its view begins at its offset, has the requested length, and writes to the slab."""
    slab = torch.arange(10, dtype=torch.uint8)
    view = Block(slab, 3).bytes_view(4)
    assert [3, 4, 5, 6] == list(view)
    view[1] = 99
    assert 99 == slab[4]


def test_results_come_in_the_order_of_the_items(device: CPUDevice) -> None:
    """The order doesn't depend on which lane is faster."""

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
    """No lane runs an item of another lane."""
    ran: list[int] = []
    submit(device, [noting(number, ran) for number in range(500)]).wait()
    assert list(range(500)) == sorted(ran)


def test_a_phase_begins_when_the_phase_before_has_ended(device: CPUDevice) -> None:
    """Each item of the second phase sees that all items of the first have ended."""
    ran: list[int] = []

    def slow() -> int:
        time.sleep(0.001)
        ran.append(0)
        return 0

    assert [0] * 12 + [12] * 12 == submit(device, [slow] * 12, [lambda: len(ran)] * 12).wait()


def test_jobs_run_in_the_order_submitted(device: CPUDevice) -> None:
    """A job waits for the earlier jobs, however short it is."""
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
    """If it waited for the work, this test would wait for itself."""
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
    """Any error in any item is raised; a deque raises IndexError, too, so the test tries it."""
    items: list[Callable[[], int]] = [lambda: 1] * 8
    items[place] = raising(error_type("of the item"))
    job = submit(device, items)
    for _ in range(2):
        with pytest.raises(error_type, match="of the item"):
            job.wait()
    assert job.done()
    assert [5] == submit(device, [lambda: 5]).wait(), "the queue goes on"


class PickyError(Exception):
    """An error that can't be copied: it is made of two values and keeps one."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


@pytest.mark.parametrize("error", [OSError("of the item"), PickyError("of the item", "no copy")])
@pytest.mark.parametrize("at_once", [False, True])
def test_an_error_names_its_place_though_its_frames_are_dropped(
    device: CPUDevice, error: Exception, at_once: bool
) -> None:
    """The place is in a note, since the frames belong to the item and others wait for the error."""
    job = submit(device, [raising(error)], at_once=at_once)
    for _ in range(2):
        with pytest.raises(type(error), match="of the item") as caught:
            job.wait()
        (note,) = caught.value.__notes__
        assert "test_cpu.py" in note
        assert "of the item" in note
        assert caught.value.__traceback__ is not None
        assert error.__traceback__ is None, "whoever keeps it holds nobody's frames"


def test_an_interrupt_ends_the_wait_but_not_the_job(device: CPUDevice) -> None:
    """Real signals arrive while many jobs are waited for: no job is lost, and none runs twice."""
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


def test_a_blocking_job_of_an_idle_device_runs_in_the_calling_thread() -> None:
    """Two changes of threads cost as much as copying a megabyte."""
    device = CPUDevice(lanes=1)
    job = submit(device, [threading.get_ident], at_once=True)
    assert (True, [threading.get_ident()]) == (job.done(), job.wait())
    device.close()


def test_a_blocking_job_of_a_busy_device_waits_its_turn(device: CPUDevice) -> None:
    """A restore must neither overtake an offload of the same slots, nor run beside it."""
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


def test_other_jobs_wait_for_a_blocking_job(device: CPUDevice) -> None:
    """Another thread submits a job, which must not run at the same time."""
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


# Python drops errors that are raised within a callback of the garbage collector, and warns.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_ends_a_blocking_job(device: CPUDevice) -> None:
    """Real signals arrive at any moment: after it no lane runs, and the rest is dropped."""
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


def test_a_failing_blocking_job_ends_wherever_an_interrupt_comes(device: CPUDevice) -> None:
    """Neither its thread nor the jobs after it wait for it."""

    def make() -> tuple[None, Callable[[], object]]:
        def fail() -> None:
            with pytest.raises(OSError, match="link is down"):
                submit(device, [raising(OSError("link is down"))], at_once=True).wait()

        return None, fail

    for where, _, _ in every_interrupt(make):
        assert [1] == submit(device, [lambda: 1]).wait(), where
        assert [2] == submit(device, [lambda: 2], at_once=True).wait(), where


def test_a_closed_device_refuses_a_blocking_job(device: CPUDevice) -> None:
    """The device has no lanes any more."""
    device.close()
    with pytest.raises(RuntimeError, match="is closed"):
        submit(device, [lambda: 5], at_once=True)


def test_a_job_runs_or_is_cancelled() -> None:
    """It never does both: the first of the two calls decides."""
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
    """Their threads may still run another job, and nothing is left for them to do."""
    lane, gate, started = Threads(1, "lane"), threading.Event(), threading.Event()

    def busy() -> None:
        started.set()
        gate.wait(PATIENCE_S)

    lane.start(busy)
    started.wait(PATIENCE_S)
    assert [1, 2, 3] == lane.run([lambda n=n: n for n in (1, 2, 3)])  # type: ignore[misc]
    gate.set()
    lane.close()


def test_threads_end_with_their_device() -> None:
    """Closed and forgotten devices keep no threads, so a server may open many devices."""
    before = threading.active_count()
    closed, forgotten = CPUDevice(lanes=3), CPUDevice(lanes=3)
    assert before + 6 == threading.active_count()
    closed.close()
    del forgotten
    assert before == threading.active_count()


def test_a_process_ends_with_devices_open() -> None:
    """Submitted jobs have ended by then, on all lanes, before older exit handlers run."""
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


def test_closing_waits_for_a_blocking_job_of_another_thread() -> None:
    """Otherwise the job would find no lanes in its next phase."""
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


def test_submitting_does_not_wait_for_the_running_job(device: CPUDevice) -> None:
    """A job is queued at once, even if the bytes that it needs are still being written."""
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
    """Otherwise a damaged snapshot would be written."""
    ran: list[int] = []
    items: list[Callable[[], int]] = [lambda: 0, raising(ValueError()), lambda: 0]
    job = submit(device, items, [noting(1, ran)])
    with pytest.raises(ValueError):
        job.wait()
    assert [] == ran


def test_after_an_error_the_remaining_items_are_dropped() -> None:
    """Neither the lane that failed nor another lane finds any more items."""
    ran: list[int] = []
    items = deque(enumerate([noting(0, ran), raising(ValueError()), noting(2, ran)]))
    with pytest.raises(ValueError):
        run_items(items, {})
    assert [] == list(items)
    assert [0] == ran


@pytest.mark.parametrize("failing_lane", ["kvtide-queue", "kvtide-lane"])
def test_a_failed_job_ends_with_its_last_lane(failing_lane: str) -> None:
    """Any lane may fail; when the job has ended, nothing copies any more."""
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
    """Each item waits for all others, so with fewer lanes the job would not end."""
    device = CPUDevice(lanes=4)
    together = threading.Barrier(4)
    assert 4 == len(set(submit(device, [lambda: together.wait(PATIENCE_S)] * 4).wait()))
    device.close()


def test_the_default_number_of_lanes_is_torchs_number_of_threads() -> None:
    """A user who sets torch's threads says how many cores may be used."""
    device = CPUDevice()
    assert torch.get_num_threads() == device.lanes
    device.close()


def test_closing_waits_for_the_queue(device: CPUDevice) -> None:
    """Submitted jobs have run when close returns; a second close is harmless."""
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
    """Tests of fences depend on it: only `wait` runs jobs, in their order."""
    device: Device = LazyDevice()
    ran: list[int] = []
    first, second = (submit(device, [noting(n, ran)]) for n in (1, 2))
    assert ([], False, False) == (ran, first.done(), second.done())
    second.wait()
    assert ([1, 2], True, True) == (ran, first.done(), second.done())


def test_blocking_jobs_that_have_ended_are_forgotten() -> None:
    """A server with only blocking calls doesn't grow, though the queue's thread never runs."""
    device = CPUDevice(lanes=1)
    for _ in range(3):
        assert [7] == submit(device, [lambda: 7], at_once=True).wait()
    assert not device._queue._jobs
    device.close()


def test_large_pages_of_host_memory_become_ready_by_themselves() -> None:
    """A disk reads into them almost three times as fast. Meanwhile the memory is used already."""
    device = CPUDevice(lanes=1, large_pages=True)
    memory = device.allocate_host(64 << 20)
    memory[: 1 << 20] = memory[-1 << 20 :] = 7
    ends_at = time.monotonic() + PATIENCE_S
    while int(fields_of(memory.data_ptr())["Rss"][0]) < 64 << 10:
        assert time.monotonic() < ends_at, "they don't become ready"
        time.sleep(0.01)
    flags = fields_of(memory.data_ptr())["VmFlags"]
    device.close()
    has_large_pages = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert (14 << 20, has_large_pages) == (int(memory.sum()), "hg" in flags)


def test_host_memory_has_the_pages_of_the_system_unless_large_ones_are_asked_for() -> None:
    """Where they are dear, a small process would pay for all of a slab."""
    device = CPUDevice(lanes=1)
    memory = device.allocate_host(8 << 20)
    fields = fields_of(memory.data_ptr())
    device.close()
    assert (0, False) == (int(fields["Rss"][0]), "hg" in fields["VmFlags"])


def fields_of(address: int) -> dict[str, list[str]]:
    """What the system says of the memory at an address of this process. Sizes are in KiB."""
    fields: dict[str, list[str]] | None = None
    for line in Path("/proc/self/smaps").read_text("ascii").splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            if fields:
                return fields
            first, stop = (int(end, 16) for end in name.split("-"))
            fields = {} if first <= address < stop else None
        elif fields is not None:
            fields[name[:-1]] = values
    assert fields, f"no memory at {address:#x}"
    return fields
