"""`kvtide doctor`: tries whether kvtide works on a device, in SGLang or in vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
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
    vllm: Annotated[
        bool,
        typer.Option(
            "--vllm", help="Instead: does this vLLM find kvtide, and is it exact for its blocks?"
        ),
    ] = False,
    transfer: Annotated[
        str | None,
        typer.Option(
            "--kv-transfer-config",
            help="With --vllm: what the server is to get; `kvtide vllm` prints it.",
            show_default="kvtide's defaults",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="With --vllm: also say how many tokens of this model fit."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Test a device: what kvtide needs of it, an exact copy of every layout, and its speed."""
    from kvtide.cli.page import ConsolePage
    from kvtide.doctor.finding import count_failed

    page = ConsolePage(Console(quiet=as_json, file=sys.stdout))
    of_device = {"--device": device, "--simulate": simulate, "--schedule": schedule, "--size": size}
    of_vllm = {"--kv-transfer-config": transfer, "--model": model}
    if sglang:
        _refuse("--sglang looks at SGLang, not at a device", of_device)
        _refuse("--sglang looks at SGLang, not at vLLM", {"--vllm": vllm, **of_vllm})
        from kvtide.doctor.sglang import SGLangReport

        report: Report = SGLangReport()
    elif vllm:
        _refuse("--vllm looks at vLLM, not at a device", of_device)
        report = _vllm_report(transfer, model)
    else:
        _refuse("the doctor looks at a device unless you give --vllm", of_vllm)
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


def _vllm_report(transfer: str | None, model: str | None) -> Report:
    """Raises UsageError if vLLM isn't installed, and for settings or a model that it can't read."""
    from kvtide.cli.plan import read_config
    from kvtide.doctor.vllm import VllmReport
    from kvtide.models.cache import cache_of

    return VllmReport(transfer, None if model is None else cache_of(read_config(model)))


def _refuse(why: str, options: Mapping[str, object]) -> None:
    """Raises UsageError for options that concern something else."""
    given = [option for option, value in options.items() if value]
    if given:
        raise UsageError(f"{why}; leave out {' and '.join(given)}")
