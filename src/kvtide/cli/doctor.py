"""`kvtide doctor`: tries whether kvtide works on a device or in SGLang. Run it there first."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvtide.cli.serving import check_schedule
from kvtide.cli.simulated import simulate as simulate_device
from kvtide.errors import UsageError

if TYPE_CHECKING:
    from kvtide.doctor.report import Report

_SIMULATED_DEVICE = "npu"


def doctor(
    device: Annotated[
        str | None,
        typer.Option(help="Such as npu or cuda:1.", show_default="the accelerator here, else cpu"),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate that device (npu unless named).")
    ] = False,
    schedule: Annotated[
        str | None,
        typer.Option(help="When it works: lazy, eager, random:SEED, thread.", show_default="lazy"),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="How much is copied to measure speed.", show_default="64MiB; simulated 4MiB"
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
    """Test a device: what kvtide needs of it, an exact copy of every layout, and its speed."""
    from kvtide.cli.page import ConsolePage
    from kvtide.doctor.finding import count_failed

    page = ConsolePage(Console(quiet=as_json, file=sys.stdout))
    if sglang:
        given = {"--device": device, "--simulate": simulate, "--schedule": schedule, "--size": size}
        report = _sglang_report([option for option, value in given.items() if value])
    else:
        report = _device_report(device, check_schedule(schedule, simulate=simulate), size)
    report.examine(page)
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    raise typer.Exit(1 if count_failed(report.findings) else 0)


def _device_report(name: str | None, schedule: str | None, size: str | None) -> Report:
    """Raises UsageError for a device that isn't here or can't be simulated."""
    from kvtide.measure.workload import check_size

    size_bytes = None if size is None else check_size(size)
    if schedule is not None:
        name = name or _SIMULATED_DEVICE
        simulate_device(name, schedule)
    from kvtide.doctor.device import DeviceReport

    return DeviceReport(name, schedule=schedule, size_bytes=size_bytes)


def _sglang_report(device_options: list[str]) -> Report:
    """Raises UsageError if SGLang isn't installed, and for options that concern a device."""
    if device_options:
        raise UsageError(
            f"--sglang looks at SGLang, not at a device; leave out {' and '.join(device_options)}"
        )
    from kvtide.doctor.sglang import SGLangReport

    return SGLangReport()
