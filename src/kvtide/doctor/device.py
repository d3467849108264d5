"""Tries kvtide on a device: what it needs, round trips of every layout, and the speed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import final

from kvtide.doctor.finding import Finding, count_failed
from kvtide.doctor.here import Here, Opened, default_device, look_around, open_for_checkup
from kvtide.doctor.needs import check_needs
from kvtide.doctor.report import Page
from kvtide.doctor.roundtrips import RoundTrip, make_round_trips
from kvtide.doctor.speed import MOVES, Speed, choose_size, measure_speed
from kvtide.layout import Geometry
from kvtide.sizes import counted, format_size

_ROUNDS = 7
_SIZE_BYTES = 64 << 20
# A simulated device's speed means nothing, so each operation is tried only once.
_SIMULATED_ROUNDS = 1
_SIMULATED_SIZE_BYTES = 4 << 20


@final
class DeviceReport:
    """See Report. `schedule` is the schedule of a simulated device, None for a real device."""

    def __init__(
        self, name: str | None, *, schedule: str | None = None, size_bytes: int | None = None
    ) -> None:
        """Opens the device `name`, or by default the accelerator of this machine.

        `size_bytes` are copied to measure speed; None chooses a sensible size. Raises UsageError
        for a device that torch doesn't have here.
        """
        self.opened: Opened = open_for_checkup(name or default_device())
        self.here: Here = look_around(self.opened)
        self.schedule = schedule
        self.needs: list[Finding] = []
        self.round_trips: list[RoundTrip] = []
        self.speed: Speed | None = None
        self._size_bytes = size_bytes

    @property
    def findings(self) -> list[Finding]:
        """See Report."""
        trips = [trip.finding for trip in self.round_trips]
        return [*self.needs, *trips, *(self.speed.findings if self.speed else ())]

    def examine(self, page: Page) -> None:
        """See Report. Closes the device."""
        with _closing(self.opened), _said_already():
            page.facts(_facts(self))
            page.heading("What kvtide needs of it")
            for need in check_needs(self.opened, self.here):
                self.needs.append(need)
                page.finding(need)
            if self.opened.device is None:
                page.heading("Neither copies nor speed were tried: there is no device")
            else:
                self._try_round_trips(page)
                self._measure_speed(page)
        page.verdict(f"device {self.opened.name}", self.findings)

    def _try_round_trips(self, page: Page) -> None:
        page.heading("Round trips: created and adopted pools, slots of every kind")
        for trip in make_round_trips(self.opened):
            self.round_trips.append(trip)
            page.finding(trip.finding, name=in_words(trip.geometry), good="exact")

    def _measure_speed(self, page: Page) -> None:
        is_simulated = self.schedule is not None
        rounds = _SIMULATED_ROUNDS if is_simulated else _ROUNDS
        size_bytes = self._size_bytes
        if size_bytes is None:
            wanted_bytes = _SIMULATED_SIZE_BYTES if is_simulated else _SIZE_BYTES
            size_bytes = choose_size(wanted_bytes, self.here)
        note = " (of a simulated device: these figures mean nothing)" if is_simulated else ""
        what = f"{format_size(size_bytes)} each, median of {counted(rounds, 'round')}"
        page.heading(f"Speed, {what}{note}")
        self.speed = measure_speed(self.opened, self.here, size_bytes, rounds=rounds)
        _write_speed(page, self.speed)

    def to_json(self) -> dict[str, object]:
        """See Report."""
        here, speed, failed = self.here, self.speed, count_failed(self.findings)
        return {
            "device": self.opened.name,
            "index": here.index,
            "title": here.title,
            "simulated": self.schedule is not None,
            "schedule": self.schedule,
            "torch": here.torch_version,
            "kvtide": here.kvtide_version,
            "free_bytes": here.free_bytes,
            "total_bytes": here.total_bytes,
            "host_memory": {"pinned": here.pinned, "reason": here.host_reason},
            "needs": [need.to_json() for need in self.needs],
            "round_trips": [trip.to_json() for trip in self.round_trips],
            "speed": None if speed is None else speed.to_json(),
            "checks": len(self.findings),
            "failed": failed,
            "ok": not failed,
        }


def in_words(geometry: Geometry) -> str:
    """A layout on one line: `gqa bfloat16: k 2x[4,64] v 2x[4,64], 2,048 B a token, pages of 128`.

    It states each plane's number of layers and the shape of its row, and each plane's dtype if
    they differ.
    """
    dtypes = {plane.dtype for plane in geometry.planes}
    planes = []
    for plane in geometry.planes:
        row = ",".join(str(size) for size in plane.row_shape)
        dtype = f" {plane.dtype}" if len(dtypes) > 1 else ""
        planes.append(f"{plane.name}{dtype} {plane.layer_count}x[{row}]")
    common = f" {geometry.planes[0].dtype}" if len(dtypes) == 1 else ""
    sizes = f"{geometry.token_bytes:,} B a token, pages of {geometry.page_size}"
    return f"{geometry.layout.name}{common}: {' '.join(planes)}, {sizes}"


def _facts(report: DeviceReport) -> list[tuple[str, str]]:
    here = report.here
    simulated = f"simulated, schedule {report.schedule}" if report.schedule else None
    title = ", ".join(part for part in (here.title, simulated) if part)
    facts = [
        ("device", f"{report.opened.torch_device}: {title or 'torch has no name for it'}"),
        ("versions", f"torch {here.torch_version}, kvtide {here.kvtide_version}"),
    ]
    if here.free_bytes is not None and here.total_bytes is not None:
        free, total = format_size(here.free_bytes), format_size(here.total_bytes)
        facts.append(("device memory", f"{free} free of {total}"))
    elif not report.opened.is_cpu:
        facts.append(("device memory", "torch doesn't tell"))
    kind = "pinned" if here.pinned else "pageable"
    if here.host_reason is not None:
        kind = f"{kind}: {here.host_reason}"
    elif not here.pinned:
        kind = f"{kind}, as both ends are host memory"
    return [*facts, ("host memory", kind)]


def _write_speed(page: Page, speed: Speed) -> None:
    for name, value in speed.gb_s.items():
        page.value(name, f"{value:.1f} GB/s")
    for finding in speed.findings:
        if not finding.ok:
            page.finding(finding)
    if any(speed.ratios.values()):
        moves = [move.replace("_", " ") for move in MOVES]
        rows = []
        for case, ratios in speed.ratios.items():
            figures = [f"{ratios[move]:.2f}" if move in ratios else "" for move in MOVES]
            rows.append([case, *figures, f"of {speed.yardstick}"])
        page.table(["slots, rows of 2 KiB", *moves, ""], rows)


@contextmanager
def _closing(opened: Opened) -> Iterator[None]:
    try:
        yield
    finally:
        # The checks have found a broken device already.
        with suppress(Exception):
            if opened.device is not None:
                opened.device.close()


@contextmanager
def _said_already() -> Iterator[None]:
    """Hides the warning that host memory isn't pinned: the report says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
