"""A fork, which engines use for their workers.

In the child only the thread that forked is left, so the work of all other threads never ends there,
and nobody may wait for it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PATIENCE_S = 120.0
BEGIN = """
import os, signal, threading
from kvtide.device import CPUDevice
from kvtide.errors import ProcessForked, SlotsLost
from support.broken_devices import GatedDevice
from support.pools import image_of, same_image, with_rows
from support.tides import make_tide

def works(tide, before):
    "A round trip in the threads of the device, and one in the calling thread."
    snapshot = tide.start_offload(range(4)).wait()
    tide.start_restore(snapshot, range(4, 8)).wait()
    tide.discard(snapshot)
    snapshot = tide.offload(range(4))
    tide.restore(snapshot, range(16, 20))
    tide.discard(snapshot)
    expected = with_rows(before, [*range(4, 8), *range(16, 20)], before, [*range(4)] * 2)
    assert same_image(expected, image_of(tide.pool))

def raises(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")

def in_child(work):
    "Ends with its work's outcome, without what belongs to the parent."
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(60)
    try:
        work()
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
    os._exit(1)
"""


def run(program: str) -> None:
    """Runs a program in a new process; an error, or no end in time, is a failure."""
    found = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        cwd=Path(__file__).parent,
        timeout=PATIENCE_S,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (0, "") == (found.returncode, found.stderr)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("has_moved", [False, True])
def test_a_child_can_move(lanes: int, has_moved: bool) -> None:
    """The child starts threads, and the parent keeps its own; a child's child works, too."""
    run(f"""
tide = make_tide(CPUDevice(lanes={lanes}))
before = image_of(tide.pool)
if {has_moved}:
    works(tide, before)
    before = image_of(tide.pool)
assert 0 == in_child(lambda: (works(tide, before), in_child(lambda: works(tide, before))))
works(tide, before)
tide.pool.device.close()
assert 0 == in_child(lambda: raises(RuntimeError, lambda: tide.offload(range(4))))
""")


def test_a_pending_move_fails_in_the_child_and_ends_in_the_parent() -> None:
    """The child gets the error at once, gets its memory and pages back, and goes on."""
    run("""
device = GatedDevice()
tide = make_tide(device, block_count=2)
before = image_of(tide.pool)
device.gate.clear()
ticket, queued = tide.start_offload(range(4)), tide.start_offload(range(4, 8))
assert device.is_there.wait(60)

def child():
    device.gate = threading.Event()
    device.gate.set()
    assert "under way when the process forked" in raises(ProcessForked, ticket.wait)
    raises(ProcessForked, ticket.wait)
    raises(ProcessForked, queued.wait)
    assert 0 == tide.arena.used_bytes
    works(tide, before)
    tide.close()

assert 0 == in_child(child)
device.gate.set()
snapshots = ticket.wait(), queued.wait()
assert same_image(before, image_of(tide.pool))
for snapshot in snapshots:
    tide.discard(snapshot)
works(tide, before)
""")


def test_a_restore_that_was_writing_has_lost_its_slots_in_the_child() -> None:
    """The child's memory is a copy from the middle of the writes; a queued restore lost nothing."""
    run("""
device = GatedDevice()
tide = make_tide(device)
before = image_of(tide.pool)
snapshot = tide.offload(range(4))
device.gate.clear()
device.is_there.clear()
ticket = tide.start_restore(snapshot, range(8, 12))
queued = tide.start_restore(snapshot, range(12, 16))
assert device.is_there.wait(60)

def child():
    raises(SlotsLost, ticket.wait)
    raises(ProcessForked, queued.wait)
    tide.discard(snapshot)
    assert 0 == tide.arena.used_bytes

assert 0 == in_child(child)
device.gate.set()
ticket.wait()
queued.wait()
assert same_image(with_rows(before, range(8, 16), before, [*range(4)] * 2), image_of(tide.pool))
tide.discard(snapshot)
""")


def test_a_blocking_move_of_another_thread_never_ends_in_the_child() -> None:
    """Later moves in the child don't wait for it."""
    run("""
device = GatedDevice()
tide = make_tide(device)
before = image_of(tide.pool)
device.gate.clear()
snapshots = []
other = threading.Thread(target=lambda: snapshots.append(tide.offload(range(4))))
other.start()
assert device.is_there.wait(60)

def child():
    device.gate = threading.Event()
    device.gate.set()
    works(make_tide(device), before)

assert 0 == in_child(child)
device.gate.set()
other.join()
tide.discard(snapshots[0])
works(tide, before)
""")


def test_an_accelerator_says_at_once_that_the_child_cannot_use_it() -> None:
    """The device belongs to the parent; the child may open it itself, if the device allows it."""
    run("""
from support.simulated import simulated
from kvtide.device import AcceleratorDevice, Step
with simulated("lazy") as npu:
    device = AcceleratorDevice(npu)
    job = lambda: device.submit(lambda: [[Step(lambda: 1)]])
    said = "was opened by process"
    assert 0 == in_child(lambda: raises(ProcessForked, job).index(said))
    assert [1] == job().wait()
    device.close()
""")
