"""A simulated accelerator for PyTorch, whose work is always as late as it may be.

    import simnpu
    npu = simnpu.install("npu", devices=2)

gives torch a device `npu` whose memory the host can't touch, with streams, events and pinned
memory. Its work runs only when somebody waits for it. Mistakes in the use of asynchronous copies
raise RuntimeError at the next synchronisation.
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
