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
    how = f"{counted(threads or before, 'thread')}, median of {counted(rounds, 'round')}"
    try:
        if layouts:
            _show_layouts([*measure_layouts(size_bytes, rounds)], size_bytes, how, as_json)
        else:
            _show_copy(measure_copy(size_bytes, rounds), how, as_json)
    finally:
        torch.set_num_threads(before)


@bench.callback()
def _group() -> None:
    """Measure this machine."""


def _show_copy(figures: CopyFigures, how: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(figures.to_json()))
        return
    memcpy = figures.memcpy
    speed = figures.size_bytes / memcpy.seconds / 1e9
    console = Console()
    _print_line(console, f"{_machine()}, {how}")
    _print_line(
        console,
        f"{format_size(figures.size_bytes)} each, rows of 2 KiB; memcpy {speed:.1f} GB/s, "
        f"{memcpy.seconds * 1e3:.1f} ms ({memcpy.cpu_seconds * 1e3:.1f} ms CPU)",
    )
    table = _make_table(("slots", "operation"), ("of memcpy", "ms", "CPU ms"))
    for name, case in figures.cases.items():
        for operation, timing in case.items():
            table.add_row(
                name,
                operation.replace("_", " "),
                f"{memcpy.seconds / timing.seconds:.2f}",
                f"{timing.seconds * 1e3:.1f}",
                f"{timing.cpu_seconds * 1e3:.1f}",
            )
        table.add_section()
    console.print(table)


def _show_layouts(found: Sequence[LayoutFigures], size_bytes: int, how: str, as_json: bool) -> None:
    from kvtide.measure.workload import PAGE_SIZE

    entries = [figures.to_json() for figures in found]
    if as_json:
        typer.echo(json.dumps({"layouts": entries}))
        return
    console = Console()
    _print_line(console, f"{_machine()}, {how}")
    console.print(f"about {format_size(size_bytes)} each, pages of {PAGE_SIZE} tokens, scattered")
    table = _make_table(("layout",), ("bytes a row", "gather", "scatter", "seal"))
    for entry in entries:
        widths = dict.fromkeys(f"{width:,}" for width in entry["row_bytes"])
        ratios = [f"{entry[key]:.2f}" for key in ("gather_ratio", "scatter_ratio", "seal_ratio")]
        table.add_row(entry["layout"], " … ".join(widths), *ratios)
    console.print(table)


def _machine() -> str:
    from kvtide.measure.machine import machine_name

    return printable(machine_name())


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
