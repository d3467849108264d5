"""`kvtide doctor`: whether kvtide works on a device, and how fast; what to run there first.

Each line is printed as it becomes known, so that the last one tells where a driver crashed.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, NoReturn, final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtide.cli.bench import check_size
from kvtide.cli.display import counted, print_table
from kvtide.cli.findings import (
    count_failed,
    finding_to_json,
    print_finding,
    print_heading,
    print_value,
    print_verdict,
)
from kvtide.cli.serving import check_schedule
from kvtide.cli.simulated import simulate
from kvtide.errors import UsageError
from kvtide.sizes import format_size

if TYPE_CHECKING:
    from kvtide.cli.checkup.finding import Finding
    from kvtide.cli.checkup.here import Here, Opened
    from kvtide.cli.checkup.roundtrips import RoundTrip
    from kvtide.cli.checkup.speed import Speed
    from kvtide.layout import Geometry

_ROUNDS = 7
_SIZE_BYTES = 64 << 20
# A simulated device's speed means nothing: the path is to run, no more.
_SIMULATED_ROUNDS = 1
_SIMULATED_SIZE_BYTES = 4 << 20
_SIMULATED_DEVICE = "npu"


@final
@dataclass(slots=True)
class Report:
    """All that the doctor found, in the order in which it is printed."""

    opened: Opened
    here: Here
    schedule: str | None
    needs: list[Finding] = field(default_factory=list)
    round_trips: list[RoundTrip] = field(default_factory=list)
    speed: Speed | None = None

    @property
    def findings(self) -> list[Finding]:
        """One for each check."""
        trips = [trip.finding for trip in self.round_trips]
        return [*self.needs, *trips, *(self.speed.findings if self.speed else ())]

    @property
    def failed_count(self) -> int:
        """How many checks failed."""
        return count_failed(self.findings)


def doctor(
    device: Annotated[
        str | None,
        typer.Option(help="Such as npu or cuda:1.", show_default="the accelerator here, else cpu"),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="That device (npu unless named) is a simulated one.")
    ] = False,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="What it does when: lazy, eager, random:SEED, thread.", show_default="lazy"
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="How much is moved to measure speed.", show_default="64MiB; simulated 4MiB"
        ),
    ] = None,
    sglang: Annotated[
        bool,
        typer.Option(
            "--sglang", help="Instead: is kvtide active in this SGLang, and exact for its pools?"
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Try what kvtide needs of a device: exact copies of every layout, and their speed."""
    console = Console(quiet=as_json, file=sys.stdout)
    if sglang:
        given = {"--device": device, "--simulate": simulate, "--schedule": schedule, "--size": size}
        _examine_sglang([name for name, value in given.items() if value], console, as_json)
    schedule = check_schedule(schedule, simulate=simulate)
    size_bytes = None if size is None else check_size(size)
    report = examine(device, schedule, size_bytes, console)
    if as_json:
        typer.echo(json.dumps(to_json(report)))
    raise typer.Exit(1 if report.failed_count else 0)


def _examine_sglang(others: Sequence[str], console: Console, as_json: bool) -> NoReturn:
    from kvtide.cli import doctor_sglang

    if others:
        raise UsageError(
            f"--sglang looks at SGLang, not at a device; leave out {' and '.join(others)}"
        )
    report = doctor_sglang.examine_sglang(console)
    if as_json:
        typer.echo(json.dumps(doctor_sglang.to_json(report)))
    raise typer.Exit(1 if report.failed_count else 0)


def examine(
    name: str | None, schedule: str | None, size_bytes: int | None, console: Console
) -> Report:
    """Does all of it, and prints what is found to `console`.

    Raises UsageError for a device that torch doesn't have here, or that can't be simulated.
    """
    from kvtide.cli.checkup.here import default_device, look_around, open_for_checkup
    from kvtide.cli.checkup.needs import check_needs

    if schedule is not None:
        name = name or _SIMULATED_DEVICE
        simulate(name, schedule)
    opened = open_for_checkup(name or default_device())
    with _closing(opened), _said_already():
        report = Report(opened, look_around(opened), schedule)
        _print_here(console, report)
        print_heading(console, "What kvtide needs of it")
        for need in check_needs(opened, report.here):
            report.needs.append(need)
            print_finding(console, need)
        if opened.device is None:
            print_heading(console, "Neither copies nor speed were tried: no device to move on")
        else:
            _try_moves(console, report, size_bytes)
    print_verdict(console, f"device {opened.name}", report.findings)
    return report


def _try_moves(console: Console, report: Report, size_bytes: int | None) -> None:
    """Round trips, then speed. `size_bytes` None is as much as is sensible."""
    from kvtide.cli.checkup.roundtrips import make_round_trips
    from kvtide.cli.checkup.speed import choose_size, measure_speed

    print_heading(console, "Round trips: created and adopted pools, slots of every kind")
    for trip in make_round_trips(report.opened):
        report.round_trips.append(trip)
        print_finding(console, trip.finding, name=describe(trip.geometry), good="exact")
    simulated = report.schedule is not None
    rounds = _SIMULATED_ROUNDS if simulated else _ROUNDS
    if size_bytes is None:
        wanted_bytes = _SIMULATED_SIZE_BYTES if simulated else _SIZE_BYTES
        size_bytes = choose_size(wanted_bytes, report.here)
    note = " (of a simulated device: these figures mean nothing)" if simulated else ""
    what = f"{format_size(size_bytes)} each, median of {counted(rounds, 'round')}"
    print_heading(console, f"Speed, {what}{note}")
    report.speed = measure_speed(report.opened, report.here, size_bytes, rounds=rounds)
    _print_speed(console, report.speed)


def describe(geometry: Geometry) -> str:
    """A layout on one line: `gqa bfloat16: k 2x[4,64] v 2x[4,64], 2,048 B a token, pages of 128`.

    A plane is so many layers of a token's row; each has its dtype beside it where they differ.
    """
    dtypes = {plane.dtype for plane in geometry.planes}
    planes = []
    for plane in geometry.planes:
        row = ",".join(str(size) for size in plane.row_shape)
        own = f" {plane.dtype}" if len(dtypes) > 1 else ""
        planes.append(f"{plane.name}{own} {plane.layer_count}x[{row}]")
    common = f" {geometry.planes[0].dtype}" if len(dtypes) == 1 else ""
    sizes = f"{geometry.token_bytes:,} B a token, pages of {geometry.page_size}"
    return f"{geometry.layout.name}{common}: {' '.join(planes)}, {sizes}"


def to_json(report: Report) -> dict[str, object]:
    """The object that `--json` prints."""
    here, speed = report.here, report.speed
    return {
        "device": report.opened.name,
        "index": here.index,
        "title": here.title,
        "simulated": report.schedule is not None,
        "schedule": report.schedule,
        "torch": here.torch_version,
        "kvtide": here.kvtide_version,
        "free_bytes": here.free_bytes,
        "total_bytes": here.total_bytes,
        "host_memory": {"pinned": here.pinned, "reason": here.host_reason},
        "needs": [finding_to_json(need) for need in report.needs],
        "round_trips": [
            _geometry_to_json(trip.geometry)
            | {"exact": trip.finding.ok, "reason": trip.finding.reason}
            for trip in report.round_trips
        ],
        "speed": None if speed is None else _speed_to_json(speed),
        "checks": len(report.findings),
        "failed": report.failed_count,
        "ok": not report.failed_count,
    }


def _geometry_to_json(geometry: Geometry) -> dict[str, object]:
    return {
        "layout": geometry.layout.name,
        "planes": [
            {
                "name": plane.name,
                "dtype": plane.dtype,
                "layers": plane.layer_count,
                "row": list(plane.row_shape),
            }
            for plane in geometry.planes
        ],
        "page_size": geometry.page_size,
        "token_bytes": geometry.token_bytes,
    }


def _speed_to_json(speed: Speed) -> dict[str, object]:
    return {
        "size_bytes": speed.size_bytes,
        "rounds": speed.rounds,
        "gb_s": {name.replace(" ", "_"): round(value, 3) for name, value in speed.gb_s.items()},
        "yardstick": speed.yardstick,
        "ratios": {
            case: {move: round(value, 3) for move, value in ratios.items()}
            for case, ratios in speed.ratios.items()
        },
        "errors": [finding_to_json(finding) for finding in speed.findings if not finding.ok],
    }


# ---- what a person sees ----------------------------------------------------------------


def _print_here(console: Console, report: Report) -> None:
    here = report.here
    simulated = f"simulated, schedule {report.schedule}" if report.schedule else None
    title = [part for part in (here.title, simulated) if part]
    rows = [
        (
            "device",
            f"{report.opened.torch_device}: {', '.join(title) or 'torch has no name for it'}",
        )
    ]
    rows.append(("versions", f"torch {here.torch_version}, kvtide {here.kvtide_version}"))
    if here.free_bytes is not None and here.total_bytes is not None:
        free, total = format_size(here.free_bytes), format_size(here.total_bytes)
        rows.append(("device memory", f"{free} free of {total}"))
    elif not report.opened.is_cpu:
        rows.append(("device memory", "torch doesn't tell"))
    kind = "pinned" if here.pinned else "pageable"
    if here.host_reason is not None:
        kind = f"{kind}: {here.host_reason}"
    elif not here.pinned:
        kind = f"{kind}, as both ends are host memory"
    rows.append(("host memory", kind))
    print_table(console, rows)


def _print_speed(console: Console, speed: Speed) -> None:
    for name, value in speed.gb_s.items():
        print_value(console, name, Text(f"{value:.1f} GB/s"))
    for finding in speed.findings:
        if not finding.ok:
            print_finding(console, finding)
    if any(speed.ratios.values()):
        _print_ratios(console, speed)


def _print_ratios(console: Console, speed: Speed) -> None:
    from kvtide.cli.checkup.speed import MOVES

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("slots, rows of 2 KiB")
    for move in MOVES:
        table.add_column(move.replace("_", " "), justify="right", no_wrap=True)
    table.add_column("")
    for case, ratios in speed.ratios.items():
        cells = [f"{ratios[move]:.2f}" if move in ratios else "" for move in MOVES]
        table.add_row(case, *cells, f"of {speed.yardstick}")
    console.print(table)


@contextmanager
def _closing(opened: Opened) -> Iterator[None]:
    try:
        yield
    finally:
        # What a broken device says at its end was found before.
        with suppress(Exception):
            if opened.device is not None:
                opened.device.close()


@contextmanager
def _said_already() -> Iterator[None]:
    """Without the warning that host memory isn't pinned: the report says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
