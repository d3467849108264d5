"""Threads, garbage collection, forks and the end of the process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable

import simnpu
import torch

from conftest import NPU, Plan


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs `work` in `count` threads for at most a minute, and raises their errors."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def test_each_thread_has_its_own_streams(schedule: Plan) -> None:
    """Four threads copy to the host and back, and each sees its own numbers."""

    def work(number: int) -> None:
        stream = torch.Stream(device="npu")
        with stream:
            for i in range(40):
                value = float(number * 100 + i)
                host = torch.empty(256, pin_memory=True)
                host.copy_(torch.full((256,), value, device="npu") * 2, non_blocking=True)
                stream.synchronize()
                assert bool((host == 2 * value).all())

    in_threads(4, work)
    NPU.synchronize()


def test_each_thread_has_its_own_current_device() -> None:
    """CUDA does the same."""
    NPU.set_device(1)
    seen: list[int] = []
    in_threads(1, lambda _: seen.append(NPU.current_device()))
    assert [0] == seen
    assert 1 == NPU.current_device()


def test_freeing_and_garbage_collection_do_not_deadlock() -> None:
    """The worker drops objects of Python while Python's threads make more of them."""
    simnpu.set_schedule("thread", delay_us=0)
    stop = threading.Event()

    def collect() -> None:
        while not stop.is_set():
            gc.collect(0)

    def work(number: int) -> None:
        stream = torch.Stream(device="npu")
        with stream:
            for i in range(150):
                host = torch.full((64,), float(i))
                host.untyped_storage()  # Python now owns the storage too
                device = host.to("npu", non_blocking=True)
                cycle: list[object] = [device, host]
                cycle.append(cycle)
                device.add_(1)
                if i % 10 == number:
                    stream.synchronize()
                stream.synchronize() if i % 7 == 0 else None
                keep.append(host)

    keep: list[torch.Tensor] = []
    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    in_threads(4, work)
    stop.set()
    collector.join(60)
    NPU.synchronize()
    assert not collector.is_alive()


def run(script: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a new process for at most four minutes."""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240
    )


FORK = """
import os, torch, simnpu
simnpu.install("npu", schedule="thread")
tensor = torch.ones(4, device="npu")
doubled = tensor * 2
pid = os.fork()
if pid == 0:
    for attempt in (lambda: tensor + 1, tensor.cpu, lambda: torch.zeros(2, device="npu"),
                    torch.npu.synchronize, lambda: torch.zeros(2).pin_memory()):
        try:
            attempt()
            print("worked")
        except RuntimeError as error:
            print(str(error)[:59])
    torch.manual_seed(3)
    del tensor, doubled
    print(torch.npu._is_in_bad_fork(), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(doubled.tolist(), torch.npu._is_in_bad_fork())
"""


def test_a_forked_child_has_no_device() -> None:
    """A child would write into its parent's memory, so it can't use the device; the parent can."""
    done = run(FORK)
    refused = "simnpu: this process was forked from one that uses simnpu, "[:59]
    expected = [*[refused] * 5, "True", "[2.0, 2.0, 2.0, 2.0] False"]
    assert (expected, "") == (done.stdout.splitlines(), done.stderr)


LOADER = """
import torch, simnpu
simnpu.install("npu", schedule="thread")
torch.ones(4, device="npu")
data = torch.utils.data.TensorDataset(torch.arange(8.0))
loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, pin_memory=True,
                                     multiprocessing_context="fork")
for (batch,) in loader:
    print(batch.is_pinned(), batch.to("npu", non_blocking=True).sum().item())
"""


def test_data_loaders_may_fork() -> None:
    """The workers of a data loader use no device."""
    assert ["True 6.0", "True 22.0"] == run(LOADER).stdout.splitlines()


EXIT = """
import threading, torch, simnpu
simnpu.install("npu", schedule={schedule!r})
kept = [torch.ones(4, device="npu").to("cpu", non_blocking=True) for _ in range(100)]
source = torch.ones(4); source.untyped_storage()
target = source.to("npu", non_blocking=True)
{rest}
"""


def test_a_process_may_end_with_work_pending() -> None:
    """Nothing runs after Python has ended, and nothing hangs or crashes."""
    for name in ("lazy", "thread"):
        done = run(EXIT.format(schedule=name, rest=""))
        assert (0, "", "") == (done.returncode, done.stdout, done.stderr)


def test_violations_that_were_never_raised_are_printed_at_the_end() -> None:
    """A script that forgets its last synchronise would otherwise hide them."""
    done = run(EXIT.format(schedule="lazy", rest="source.zero_(); simnpu.step(1000)"))
    assert 0 == done.returncode
    assert "the host source was modified before the copy ran" in done.stderr
    assert "nothing synchronised after it" in done.stderr
