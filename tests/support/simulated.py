"""The simulated accelerator of the tests: what has not been waited for has not happened.

To register it with torch is for good, and is done by the first test that asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import simnpu
import torch

from kvtide.cli.simulated import parse_schedule
from kvtide.device import AcceleratorDevice
from support.lazy_device import LazyQueue

SCHEDULES = ("lazy", "eager", "random:0", "random:1", "random:2", "thread")


@contextmanager
def simulated(schedule: str, *, pageable_async: bool = True) -> Iterator[str]:
    """torch's device `npu`, simulated by that schedule and the strictest rules there are.

    When it ends nothing may be left undone, and no mistake unreported.
    """
    simnpu.install("npu", devices=2)
    simnpu.reset()
    kind, seed = parse_schedule(schedule)
    simnpu.set_schedule(kind, seed=seed, delay_us=20)
    simnpu.set_policy(pageable_async=pageable_async, strict_free=True)
    try:
        yield "npu"
        torch.accelerator.synchronize()
        assert [] == simnpu.take_violations()
        assert 0 == simnpu.pending()
    finally:
        simnpu.reset()


def lazy_accelerator(name: str) -> AcceleratorDevice:
    """An accelerator whose jobs begin when somebody waits for one: the latest that may be.

    They run in the thread that waits, so what a test does in between comes first, each time.
    """
    device = AcceleratorDevice(name)
    device._queue.close()
    device._queue = LazyQueue()  # type: ignore[assignment] # all that it needs of a queue
    return device
