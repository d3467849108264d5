"""A simulated accelerator for PyTorch: asynchronous, and worse than any real one.

    import simnpu
    npu = simnpu.install("npu", devices=2)

gives torch a device `npu` whose memory the host can't touch, with streams, events and pinned
memory. Nothing has happened on it until somebody waits for it. Mistakes in the use of
asynchronous copies come out as RuntimeError at the next synchronisation.
"""

from simnpu.control import (
    Schedule,
    Stats,
    install,
    pending,
    reset,
    set_policy,
    set_schedule,
    stats,
    step,
    take_violations,
)
from simnpu.refusals import Refusal
from simnpu.torch_npu import install as install_torch_npu

__all__ = [
    "Refusal",
    "Schedule",
    "Stats",
    "install",
    "install_torch_npu",
    "pending",
    "reset",
    "set_policy",
    "set_schedule",
    "stats",
    "step",
    "take_violations",
]
