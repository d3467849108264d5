"""The tests' simulated accelerator, whose work may come as late as the first wait for it.

The first test that needs it registers it with torch, which lasts until the process ends.
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
    """Simulates torch's device `npu` with that schedule and the strictest rules.

    At the end no work may be pending, and no violation unreported.
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
    """Makes an accelerator whose jobs begin as late as possible: when somebody waits for one.

    They run in the thread that waits, so everything that a test does before the wait comes first.
    """
    device = AcceleratorDevice(name)
    device._queue.close()
    device._queue = LazyQueue()  # type: ignore[assignment] # it has all methods that the device calls
    return device
