"""`kvtide bench copy`: how fast KV moves off and back, compared with a plain copy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvtide.cli.display import printable
from kvtide.sizes import counted, format_size

if TYPE_CHECKING:
    from kvtide.measure.copies import CopyFigures
    from kvtide.measure.layouts import LayoutFigures

_FILE_WIDTH = 120

bench = typer.Typer(help="Measure this machine.")


@bench.command("copy")
def copy_command(
    size: Annotated[str, typer.Option(help="How much each operation moves.")] = "64MiB",
    rounds: Annotated[int, typer.Option(min=1, max=10_000, help="Figures are medians.")] = 15,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Copying threads.", show_default="torch's"),
    ] = None,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="A case for each layout, with its row sizes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare gather and scatter with memcpy of as many bytes, and with an engine's copies."""
    from kvtide.measure.workload import check_size

    size_bytes = check_size(size)
    import torch

    from kvtide.measure.copies import measure_copy
    from kvtide.measure.layouts import measure_layouts

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        if layouts and as_json:
            entries = [figures.to_json() for figures in measure_layouts(size_bytes, rounds)]
            _print_json({"size_bytes": size_bytes, "layouts": entries}, rounds)
        elif layouts:
            _show_layouts([*measure_layouts(size_bytes, rounds)], size_bytes, rounds)
        elif as_json:
            _print_json(measure_copy(size_bytes, rounds).to_json(), rounds)
        else:
            _show_copy(measure_copy(size_bytes, rounds), rounds)
    finally:
        torch.set_num_threads(before)


@bench.callback(invoke_without_command=True)
def _group(ctx: typer.Context) -> None:
    """Measure this machine."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def _print_json(figures: dict[str, object], rounds: int) -> None:
    import torch

    from kvtide.machine import machine_facts

    threads = torch.get_num_threads()
    machine = {**machine_facts(), "threads": threads, "torch": torch.__version__}
    typer.echo(json.dumps({"machine": machine, "rounds": rounds, **figures}))


def _show_copy(figures: CopyFigures, rounds: int) -> None:
    memcpy = figures.memcpy
    speed = memcpy.speed(figures.size_bytes / 1e9)
    console = _console()
    _print_circumstances(console, rounds)
    _print_line(
        console,
        f"{format_size(figures.size_bytes)} each, rows of 2 KiB; memcpy {speed} GB/s, "
        f"{memcpy.seconds * 1e3:.1f} ms ({memcpy.cpu_seconds * 1e3:.1f} ms CPU)",
    )
    table = _make_table(("slots", "operation"), ("of memcpy", "ms", "CPU ms"))
    for name, case in figures.cases.items():
        for operation, timing in case.items():
            table.add_row(
                name,
                operation.replace("_", " "),
                str(timing.speed(memcpy.seconds)),
                f"{timing.seconds * 1e3:.1f}",
                f"{timing.cpu_seconds * 1e3:.1f}",
            )
        table.add_section()
    console.print(table)


def _show_layouts(found: Sequence[LayoutFigures], size_bytes: int, rounds: int) -> None:
    from kvtide.measure.workload import PAGE_SIZE

    console = _console()
    _print_circumstances(console, rounds)
    console.print(f"about {format_size(size_bytes)} each, pages of {PAGE_SIZE} tokens, scattered")
    table = _make_table(("layout",), ("bytes a row", "gather", "scatter", "seal"))
    for figures in found:
        widths = dict.fromkeys(f"{width:,}" for width in figures.row_bytes)
        memcpy, gather = figures.memcpy.seconds, figures.moves["gather"]
        ratios = (
            gather.speed(memcpy),
            figures.moves["scatter"].speed(memcpy),
            figures.moves["sealed_gather"].relative_to(gather.seconds),
        )
        table.add_row(figures.name, " … ".join(widths), *map(str, ratios))
    console.print(table)


def _console() -> Console:
    """A file has room for the widest table."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)


def _print_circumstances(console: Console, rounds: int) -> None:
    import torch

    from kvtide.machine import machine_name

    threads = counted(torch.get_num_threads(), "thread")
    medians = f"median (and quartiles) of {counted(rounds, 'round')}"
    _print_line(console, f"{printable(machine_name())}, {threads}, {medians}")


def _print_line(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _make_table(names: Sequence[str], figures: Sequence[str]) -> Table:
    """Columns of names, then columns of figures."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in names:
        table.add_column(heading, no_wrap=len(names) == 1)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
