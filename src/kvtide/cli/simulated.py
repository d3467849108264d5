"""`--simulate`: a simulated accelerator under a real name, by the separate package simnpu."""

from __future__ import annotations

from typing import Literal, get_args

from kvtide.errors import UsageError

Schedule = Literal["lazy", "eager", "random", "thread"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
# The pause between two operations of the schedule `thread`, so that the host runs ahead.
_DELAY_US = 50


def parse_schedule(text: str) -> tuple[Schedule, int]:
    """Parses `lazy`, `eager`, `thread`, `random` or `random:SEED` to (schedule, seed).

    Raises UsageError for anything else.
    """
    name, _, seed = text.partition(":")
    is_seeded = name == "random" and seed.isdecimal() and seed.isascii() and len(seed) < 19
    for schedule in SCHEDULES:
        if name == schedule and (is_seeded or ":" not in text):
            return schedule, int(seed or 0)
    raise UsageError(
        f"schedule {text!r} is unknown; known are: {', '.join(SCHEDULES)}, random:SEED"
    )


def simulate(name: str, schedule: str = "lazy") -> None:
    """Makes torch's device `name`, such as `npu` or `npu:1`, a simulated device until the exit.

    `schedule` decides when the device's operations happen; at the latest when the host waits for
    them. If the host waits too little, the next synchronisation raises RuntimeError. Raises
    UsageError if simnpu isn't installed or torch has another accelerator.
    """
    kind, seed = parse_schedule(schedule)
    device, _, index = name.partition(":")
    if device in ("", "cpu") or not (index.isdecimal() or ":" not in name):
        raise UsageError(f"device {name!r} can't be simulated; name an accelerator, such as npu")
    try:
        import simnpu
    except ImportError as error:
        raise UsageError(
            "simulation needs simnpu, which isn't installed: pip install ./simnpu (in kvtide's "
            "source tree; it needs a C++ compiler)"
        ) from error
    try:
        simnpu.install(device, devices=2)
    except RuntimeError as error:
        raise UsageError(f"device {name!r} can't be simulated: {error}") from error
    simnpu.set_schedule(kind, seed=seed, delay_us=_DELAY_US)
