"""Measures how fast KV moves, as ratios to plain copies of as many bytes.

The plain copies are single `copy_` calls between host memory and the device, for pinned and for
pageable memory; on the CPU there is only `memcpy`. A gather is compared with a copy to the host, a
scatter with a copy to the device. `kvtide.measure.timing` says how time is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import final

import torch

from kvtide.arena import HostArena
from kvtide.device import Device
from kvtide.doctor.finding import Finding, attempt
from kvtide.doctor.here import Here, Opened
from kvtide.form import chunk_tokens_for
from kvtide.measure.copies import make_moves, make_pool
from kvtide.measure.timing import Operation, Timing, time_in_turns
from kvtide.measure.workload import PAGE_BYTES, make_slots

CASES = ("contiguous", "pages", "random")
MOVES = ("gather", "sealed_gather", "scatter")
TO_HOST, TO_DEVICE = "to_host", "to_device"

# The pool is four times as large as the moved bytes; plain copies and staging need more.
_DEVICE_SHARE = 8

Key = tuple[str, str]


@final
@dataclass(frozen=True, slots=True)
class Speed:
    """The measured speeds.

    `gb_s` has the bandwidth of each plain copy. `ratios` has the bandwidths of each case's moves,
    relative to the plain copy `yardstick`. `findings` has one entry for each operation; a failed
    operation has no figure.
    """

    size_bytes: int
    rounds: int
    yardstick: str
    gb_s: Mapping[str, float]
    ratios: Mapping[str, Mapping[str, float]]
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, object]:
        """The figures with three digits, and the failed operations."""
        return {
            "size_bytes": self.size_bytes,
            "rounds": self.rounds,
            "gb_s": {name.replace(" ", "_"): round(value, 3) for name, value in self.gb_s.items()},
            "yardstick": self.yardstick,
            "ratios": {
                case: {move: round(value, 3) for move, value in ratios.items()}
                for case, ratios in self.ratios.items()
            },
            "errors": [finding.to_json() for finding in self.findings if not finding.ok],
        }


def choose_size(wanted_bytes: int, here: Here) -> int:
    """`wanted_bytes`, or less if the device has no room for the pool."""
    if here.free_bytes is None:
        return wanted_bytes
    fitting = here.free_bytes // _DEVICE_SHARE // PAGE_BYTES * PAGE_BYTES
    return max(PAGE_BYTES, min(wanted_bytes, fitting))


def measure_speed(opened: Opened, here: Here, size_bytes: int, *, rounds: int) -> Speed:
    """Tries each operation once, then times those that work. `size_bytes` is whole MiB."""
    yardstick = "memcpy" if opened.is_cpu else "pinned" if here.pinned else "pageable"
    findings: list[Finding] = []
    timings: dict[Key, Timing] = {}

    def measure() -> None:
        assert opened.device is not None, "only an open device is measured"
        with _operations(opened, opened.device, here, size_bytes) as operations:
            usable: dict[Key, Operation] = {}
            for key, call in operations.items():
                finding = attempt(
                    f"speed of {_label(*key)}", partial(_call, call), settle=opened.synchronize
                )
                findings.append(finding)
                if finding.ok:
                    usable[key] = call
            timings.update(time_in_turns(usable, rounds))

    whole = attempt("speed", measure, settle=opened.synchronize)
    if not whole.ok:
        findings.append(whole)
    return Speed(
        size_bytes,
        rounds,
        yardstick,
        {
            _label(*key): size_bytes / timing.seconds / 1e9
            for key, timing in timings.items()
            if key[0] not in CASES
        },
        {case: _ratios(timings, case, yardstick) for case in CASES},
        tuple(findings),
    )


@contextmanager
def _operations(
    opened: Opened, device: Device, here: Here, size_bytes: int
) -> Iterator[dict[Key, Operation]]:
    """The timed operations by kind and name; each moves `size_bytes`."""
    with ExitStack() as stack:
        pool = make_pool(device, size_bytes)
        chunk_tokens = chunk_tokens_for(pool.geometry, min(device.chunk_bytes, size_bytes))
        block_bytes = chunk_tokens * pool.geometry.token_bytes
        block_count = -(-size_bytes // block_bytes)
        arena = HostArena(device, limit_bytes=block_count * block_bytes, block_bytes=block_bytes)
        lease = arena.lease(block_count)
        stack.callback(lease.release)
        operations = _yardsticks(opened, device, here, size_bytes)
        token_count = size_bytes // pool.geometry.token_bytes
        for case, slots in make_slots(token_count, pool.slot_count).items():
            moves = make_moves(pool, [slots], lease.blocks, chunk_bytes=block_bytes)
            operations.update({(case, name): call for name, call in moves.items()})
        yield operations


def _yardsticks(
    opened: Opened, device: Device, here: Here, size_bytes: int
) -> dict[Key, Operation]:
    inside = device.allocate(size_bytes)
    pageable = torch.ones(size_bytes, dtype=torch.uint8)
    if opened.is_cpu:
        return {("memcpy", ""): lambda: inside.copy_(pageable)}
    kinds = {"pageable": pageable}
    if here.pinned:
        kinds = {"pinned": device.allocate_host(size_bytes), **kinds}
    operations: dict[Key, Operation] = {}
    for kind, outside in kinds.items():
        operations[kind, TO_HOST] = _copying(inside, outside, opened)
        operations[kind, TO_DEVICE] = _copying(outside, inside, opened)
    return operations


def _copying(source: torch.Tensor, target: torch.Tensor, opened: Opened) -> Operation:
    def copy() -> None:
        target.copy_(source, non_blocking=True)
        opened.synchronize()

    return copy


def _call(operation: Operation) -> None:
    operation()


def _ratios(timings: Mapping[Key, Timing], case: str, yardstick: str) -> dict[str, float]:
    """The bandwidths of a case's moves, relative to the plain copy's."""
    ratios: dict[str, float] = {}
    for move in MOVES:
        direction = TO_DEVICE if move == "scatter" else TO_HOST
        unit = timings.get((yardstick, "" if yardstick == "memcpy" else direction))
        timing = timings.get((case, move))
        if unit is not None and timing is not None:
            ratios[move] = unit.seconds / timing.seconds
    return ratios


def _label(kind: str, name: str) -> str:
    return f"{kind} {name}".replace("_", " ").strip()
