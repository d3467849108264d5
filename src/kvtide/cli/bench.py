"""`kvtide bench copy`: how fast KV moves off and back, as ratios to a plain copy of as many bytes.

All is measured in one run and in turns, so that a machine that slows down does so for all, and
each figure is the median of its rounds, of an operation that has just been run once. The
yardstick, `memcpy`, is torch's `Tensor.copy_` from one contiguous buffer to another with the same
number of threads. A ratio of 0.9 means nine tenths of its bandwidth.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvtide.cli.display import counted, printable
from kvtide.errors import UsageError
from kvtide.sizes import format_size, parse_size

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvtide.device import Block, Device
    from kvtide.pool import Pool

Operation = Callable[[], object]

# As in a few layers of an 8B model: a row, which is a token's k or v in one layer, is 2 KiB.
_LAYERS = 4
_HEADS = 8
_HEAD_DIM = 128
_PAGE_SIZE = 64
_TOKEN_BYTES = 2 * _LAYERS * _HEADS * _HEAD_DIM * 2
_PAGE_BYTES = _PAGE_SIZE * _TOKEN_BYTES
# The pool is larger than what moves, so that random slots are far apart.
_POOL_SHARE = 4
# Slots that SGLang's pools index at once: cpu_offloading_chunk_size.
_ENGINE_CHUNK = 8192

bench = typer.Typer(help="Measure this machine.")


@dataclass(frozen=True)
class Timing:
    """Medians of one operation; `cpu_seconds` is that of all threads together."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class CopyFigures:
    """What was measured: each operation moved `size_bytes`.

    `cases` maps a way for slots to lie to its operations: gather, sealed_gather, scatter,
    engine_gather, engine_scatter.
    """

    size_bytes: int
    memcpy: Timing
    cases: Mapping[str, Mapping[str, Timing]]


@bench.command("copy")
def copy_command(
    size: Annotated[str, typer.Option(help="What each operation moves.")] = "64MiB",
    rounds: Annotated[int, typer.Option(min=1, max=10_000, help="Figures are medians.")] = 15,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Copying threads.", show_default="torch's"),
    ] = None,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="A case for each layout, at its own row sizes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare gather and scatter with memcpy of as many bytes, and with what engines do."""
    size_bytes = check_size(size)
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    how = f"{counted(threads or before, 'thread')}, median of {counted(rounds, 'round')}"
    try:
        if layouts:
            _bench_layouts(size_bytes, rounds, how, as_json=as_json)
            return
        figures = measure_copy(size_bytes, rounds)
    finally:
        torch.set_num_threads(before)
    if as_json:
        typer.echo(json.dumps(to_json(figures)))
    else:
        _print_figures(figures, how)


def _bench_layouts(size_bytes: int, rounds: int, how: str, *, as_json: bool) -> None:
    from kvtide.cli.bench_layouts import layout_json, measure_layouts

    entries = [layout_json(one) for one in measure_layouts(size_bytes, rounds)]
    if as_json:
        typer.echo(json.dumps({"layouts": entries}))
        return
    console = Console()
    console.print(f"{machine_name()}, {how}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"about {format_size(size_bytes)} each, pages of {_PAGE_SIZE} tokens, scattered")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("layout", "bytes a row", "gather", "scatter", "seal"):
        table.add_column(heading, justify="left" if heading == "layout" else "right", no_wrap=True)
    for entry in entries:
        widths = dict.fromkeys(f"{width:,}" for width in entry["row_bytes"])
        ratios = [f"{entry[key]:.2f}" for key in ("gather_ratio", "scatter_ratio", "seal_ratio")]
        table.add_row(entry["layout"], " … ".join(widths), *ratios)
    console.print(table)


@bench.callback()
def _group() -> None:
    """Measure this machine."""


def measure_copy(size_bytes: int, rounds: int) -> CopyFigures:
    """Times each operation once a round, after a round to warm up, with torch's thread count.

    `size_bytes` is a multiple of a page's 1 MiB. Takes about ten times as much memory.
    """
    import torch

    from kvtide.arena import HostArena
    from kvtide.device import open_device

    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    with ExitStack() as stack:
        device = stack.enter_context(closing(open_device("cpu")))
        pool = make_pool(device, size_bytes)
        arena = HostArena(device, limit_bytes=size_bytes, block_bytes=_PAGE_BYTES)
        lease = arena.lease(size_bytes // _PAGE_BYTES)
        stack.callback(lease.release)
        plans = {
            name: make_operations(pool, slots, lease.blocks)
            for name, slots in make_slots(size_bytes // _TOKEN_BYTES, pool.slot_count).items()
        }
        timings = time_in_turns(
            {("", "memcpy"): lambda: target.copy_(source)}
            | {(case, name): call for case in plans for name, call in plans[case].items()},
            rounds,
        )
    cases = {case: {name: timings[case, name] for name in plans[case]} for case in plans}
    return CopyFigures(size_bytes, timings["", "memcpy"], cases)


def make_slots(token_count: int, slot_count: int) -> dict[str, NDArray[np.int64]]:
    """The slots of each case, int64 [token_count], always the same ones."""
    import numpy as np

    random = np.random.default_rng(0)
    pages = random.permutation(slot_count // _PAGE_SIZE)[: token_count // _PAGE_SIZE]
    return {
        "contiguous": np.arange(_PAGE_SIZE, _PAGE_SIZE + token_count),
        "pages": (pages[:, None] * _PAGE_SIZE + np.arange(_PAGE_SIZE)).reshape(-1),
        "random": random.permutation(slot_count)[:token_count],
    }


def make_operations(
    pool: Pool, slots: NDArray[np.int64], blocks: Sequence[Block]
) -> dict[str, Operation]:
    """What is timed for one case, by name; each call moves all `slots` of all layers.

    `blocks` hold a page each, and all slots together. The engine's gather is
    `tensor[index].to("cpu")` for each plane, layer and chunk, into memory that is fresh each time,
    its scatter `tensor[index] = chunk`. On a CPU `.to("cpu")` gives back what it was given, so the
    engine is charged with one copy only.
    """
    import torch

    index = [
        torch.from_numpy(slots[first : first + _ENGINE_CHUNK])
        for first in range(0, slots.size, _ENGINE_CHUNK)
    ]
    layers = [pool.plane(name, layer) for layer in range(_LAYERS) for name in ("k", "v")]

    def engine_gather() -> list[list[torch.Tensor]]:
        return [[tensor[part].to("cpu") for part in index] for tensor in layers]

    saved = engine_gather()

    def engine_scatter() -> None:
        for tensor, chunks in zip(layers, saved, strict=True):
            for part, chunk in zip(index, chunks, strict=True):
                tensor[part] = chunk

    moves = make_moves(pool, [slots], blocks, chunk_bytes=_PAGE_BYTES)
    return {**moves, "engine_gather": engine_gather, "engine_scatter": engine_scatter}


def make_moves(
    pool: Pool, rows: Sequence[NDArray[np.int64]], blocks: Sequence[Block], *, chunk_bytes: int
) -> dict[str, Operation]:
    """kvtide's own part of a case: gather, sealed_gather, scatter of these rows of each group of
    planes; a block holds a chunk."""
    from kvtide.transfer import Mover

    mover = Mover(pool)

    def gather(*, seal: bool) -> list[int]:
        return mover.gather(rows, blocks, chunk_bytes=chunk_bytes, seal=seal, at_once=True).wait()

    return {
        "gather": lambda: gather(seal=False),
        "sealed_gather": lambda: gather(seal=True),
        "scatter": lambda: mover.scatter(
            blocks, rows, chunk_bytes=chunk_bytes, checksums=None, at_once=True
        ).wait(),
    }


def time_in_turns(
    operations: Mapping[tuple[str, str], Operation], rounds: int
) -> dict[tuple[str, str], Timing]:
    """Each operation twice in its turn, the second time measured; medians over the rounds.

    What is measured is the steady state: threads awake, and nothing to pay for the operation
    before, whose OpenMP threads go on spinning for milliseconds on a core that the next one needs.
    """
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in operations}
    cpu_seconds: dict[tuple[str, str], list[float]] = {key: [] for key in operations}
    for _ in range(rounds):
        for key, call in operations.items():
            call()
            cpu_start, start = time.process_time(), time.perf_counter()
            result = call()
            end, cpu_end = time.perf_counter(), time.process_time()
            # What the engine's copy allocated is freed outside of what is timed.
            del result
            seconds[key].append(end - start)
            cpu_seconds[key].append(cpu_end - cpu_start)
    return {
        key: Timing(statistics.median(seconds[key]), statistics.median(cpu_seconds[key]))
        for key in operations
    }


def to_json(figures: CopyFigures) -> dict[str, object]:
    """The object that `--json` prints: ratios of bandwidth, all to memcpy.

    `seal_ratio` is the time of a sealed gather to that of one without.
    """
    memcpy = figures.memcpy.seconds
    return {
        "memcpy_gb_s": round(figures.size_bytes / memcpy / 1e9, 3),
        "cases": [
            {
                "name": name,
                "gather_ratio": round(memcpy / case["gather"].seconds, 3),
                "scatter_ratio": round(memcpy / case["scatter"].seconds, 3),
                "engine_gather_ratio": round(memcpy / case["engine_gather"].seconds, 3),
                "engine_scatter_ratio": round(memcpy / case["engine_scatter"].seconds, 3),
                "seal_ratio": round(case["sealed_gather"].seconds / case["gather"].seconds, 3),
            }
            for name, case in figures.cases.items()
        ],
    }


def make_pool(device: Device, moved_bytes: int) -> Pool:
    """A pool on `device` of four times as much as is moved (whole pages of 1 MiB), filled:
    untouched memory would all be one page of zeros."""
    import torch

    from kvtide.layout import GQA
    from kvtide.pool import Pool

    geometry = GQA.bind(
        dtype="bfloat16",
        layer=_LAYERS,
        token=_PAGE_SIZE,
        head=_HEADS,
        head_dim=_HEAD_DIM,
        v_head_dim=_HEAD_DIM,
    )
    assert geometry.token_bytes == _TOKEN_BYTES, "the sizes above disagree"
    pool = Pool.create(geometry, device, page_count=_POOL_SHARE * moved_bytes // _PAGE_BYTES)
    for buffer in pool.buffers:
        # On the host: not every accelerator has random integers.
        buffer.copy_(
            torch.empty(buffer.numel() // 8, dtype=torch.int64).random_().view(torch.uint8)
        )
    return pool


def check_size(text: str) -> int:
    """`--size` in bytes, cut to whole pages of 1 MiB; UsageError below one, or for too much."""
    size_bytes = parse_size(text, name="--size") // _PAGE_BYTES * _PAGE_BYTES
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    largest = memory_bytes // (2 * _POOL_SHARE + 2)
    if not _PAGE_BYTES <= size_bytes <= largest:
        raise UsageError(
            f"--size: {text} isn't from {format_size(_PAGE_BYTES)}, a page, to "
            f"{format_size(largest)}, a tenth of this machine's memory"
        )
    return size_bytes


def _print_figures(figures: CopyFigures, how: str) -> None:
    console = Console()
    memcpy = figures.memcpy
    speed = figures.size_bytes / memcpy.seconds / 1e9
    console.print(
        f"{machine_name()}, {how}\n"
        f"{format_size(figures.size_bytes)} each, rows of 2 KiB; memcpy {speed:.1f} GB/s, "
        f"{memcpy.seconds * 1e3:.1f} ms ({memcpy.cpu_seconds * 1e3:.1f} ms CPU)",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("slots")
    table.add_column("operation")
    for heading in ("of memcpy", "ms", "CPU ms"):
        table.add_column(heading, justify="right", no_wrap=True)
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


def machine_name() -> str:
    """The processor's name where the system tells it (Linux), else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return printable(f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs")
