"""Measures a disk tier beside a plain program, and sealing and verifying beside a plain copy.

    python benchmarks/tiers/bench.py FOLDER [--size 256MiB] [--rounds 9] [--keys 1000000]
        [--out FILE]

FOLDER is on the disk to measure; a folder is made in it and removed. The plain program writes one
file of the same size from aligned memory by direct I/O and syncs it, and reads it so; where the
file system has no direct I/O, both go through the cache. The plain copy is the library's own
without a seal, by the same threads. What is compared takes turns, a call each, and a ratio is the
median of the rounds' own. On a busy machine trust the ratios of processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from kvtide.arena import HostArena
from kvtide.device import open_device
from kvtide.form import SPAN_BYTES
from kvtide.machine import machine_facts
from kvtide.measure.copies import make_pool
from kvtide.measure.timing import Spread, timed
from kvtide.measure.workload import PAGE_BYTES, TOKEN_BYTES, make_slots
from kvtide.seal import Seal, Span
from kvtide.sizes import parse_size
from kvtide.tier import DiskTier
from kvtide.tier.file_form import padded
from kvtide.tier.file_io import aligned_memory, takes_direct_io
from kvtide.tier.names import name_of
from kvtide.transfer import Mover

CHUNK_BYTES = 8 << 20
CALL_BYTES = 16 << 20
COPIED_BYTES = 64 << 20
COPIES = 5
"""Copies are short, so there are more rounds of them."""

Call = Callable[[], object]


def chunks_of(size_bytes: int) -> list[memoryview]:
    """Chunks of random bytes, in memory that direct I/O takes."""
    chunks = []
    for _ in range(size_bytes // CHUNK_BYTES):
        chunk = aligned_memory(CHUNK_BYTES)
        chunk[:] = np.random.default_rng().bytes(CHUNK_BYTES)
        chunks.append(chunk)
    return chunks


def sealed(chunks: list[memoryview]) -> Seal:
    """The seal of the chunks."""
    hashed = xxhash.xxh3_64_intdigest
    spans = tuple(
        Span(number, first, first + SPAN_BYTES, hashed(chunk[first : first + SPAN_BYTES]))
        for number, chunk in enumerate(chunks)
        for first in range(0, CHUNK_BYTES, SPAN_BYTES)
    )
    return Seal('{"groups":[]}', "bench", 1, (), (), CHUNK_BYTES, spans)


class PlainProgram:
    """Writes and reads one file, without names to exchange, checksums or books."""

    def __init__(self, folder: Path, chunks: list[memoryview]) -> None:
        self.path = folder / "plain"
        self.chunks = chunks
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self.direct = os.O_DIRECT if takes_direct_io(root, "probe") else 0
        os.close(root)

    def write(self) -> None:
        """A new file, as a tier's are."""
        self.path.unlink(missing_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | self.direct, 0o600)
        for number in range(0, len(self.chunks), CALL_BYTES // CHUNK_BYTES):
            some = self.chunks[number : number + CALL_BYTES // CHUNK_BYTES]
            moved = os.pwritev(file, some, number * CHUNK_BYTES)
            assert moved == sum(chunk.nbytes for chunk in some)
        os.fdatasync(file)
        os.close(file)

    def read(self, rooms: list[memoryview]) -> None:
        """All of it, past the cache where the file system has that."""
        file = os.open(self.path, os.O_RDONLY | self.direct)
        for number in range(0, len(rooms), CALL_BYTES // CHUNK_BYTES):
            some = rooms[number : number + CALL_BYTES // CHUNK_BYTES]
            moved = os.preadv(file, some, number * CHUNK_BYTES)
            assert moved == sum(room.nbytes for room in some)
        os.close(file)


def compare(name: str, plain: Call, ours: Call, rounds: int, *, speed: bool) -> dict[str, Any]:
    """The ratio of two calls' times under a name, plain to ours for a `speed`, otherwise ours to
    plain: median and quartiles of the rounds' ratios, and the ratio of processor times.
    """
    walls, processors, seconds = [], [], []
    for _ in range(rounds):
        (_, first), (_, second) = timed(plain), timed(ours)
        wall = second.seconds / first.seconds
        walls.append(1 / wall if speed else wall)
        processors.append(second.cpu_seconds / max(first.cpu_seconds, 1e-9))
        seconds.append(first.seconds)
    low, middle, high = statistics.quantiles(walls, method="inclusive")
    return {
        **Spread(middle, low, high).to_json(name),
        f"{name}_processor_time": round(statistics.median(processors), 3),
        f"{name}_plain_s": round(statistics.median(seconds), 5),
    }


def measure_disk(folder: Path, chunks: list[memoryview], rounds: int) -> dict[str, Any]:
    """Put and get beside the plain program's write and read."""
    seal, rooms = sealed(chunks), [aligned_memory(CHUNK_BYTES) for _ in chunks]
    size_bytes = sum(chunk.nbytes for chunk in chunks)
    plain = PlainProgram(folder, chunks)
    with closing(DiskTier(folder / "tier", limit_bytes=4 * size_bytes)) as tier:
        put = partial(tier.put, "a", seal, chunks)
        get, read = partial(tier.get, "a", lambda _: rooms), partial(plain.read, rooms)
        for call in (put, plain.write):
            call()
        return {
            "direct_io": bool(plain.direct),
            **compare("put_to_plain_write", plain.write, put, rounds, speed=True),
            **compare("get_to_plain_read", read, get, rounds, speed=True),
        }


def measure_seal(rounds: int) -> dict[str, Any]:
    """A gather that seals, and a scatter that verifies first, beside the plain ones.

    Rows are 2 KiB; slots are in order, in scattered pages of 64, or each somewhere.
    """
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    with closing(open_device("cpu")) as device:
        pool = make_pool(device, COPIED_BYTES)
        arena = HostArena(device, limit_bytes=2 * COPIED_BYTES, block_bytes=PAGE_BYTES)
        lease = arena.lease(COPIED_BYTES // PAGE_BYTES)
        mover, blocks = Mover(pool), lease.blocks
        for case, slots in make_slots(COPIED_BYTES // TOKEN_BYTES, pool.slot_count).items():

            def gather(*, seal: bool, rows: Any = (slots,)) -> list[list[Span]]:
                return mover.gather(
                    rows, blocks, chunk_bytes=PAGE_BYTES, seal=seal, at_once=True
                ).wait()

            def scatter(spans: list[Span], rows: Any = (slots,)) -> object:
                return mover.scatter(
                    blocks, rows, chunk_bytes=PAGE_BYTES, spans=spans, at_once=True
                ).wait()

            spans = [span for part in gather(seal=True) for span in part]
            found |= compare(
                f"sealed_gather_to_gather_{case}",
                partial(gather, seal=False),
                partial(gather, seal=True),
                COPIES * rounds,
                speed=False,
            )
            found |= compare(
                f"verified_scatter_to_scatter_{case}",
                partial(scatter, []),
                partial(scatter, spans),
                COPIES * rounds,
                speed=False,
            )
        lease.release()
    return found


def measure_keys(folder: Path, count: int) -> dict[str, Any]:
    """The start of a tier with `count` files of no bytes, and lookups in it."""
    DiskTier(folder / "keys", limit_bytes=0).close()
    keys = [f"{secrets.token_hex(16)}/{number}" for number in range(count)]
    for number in range(256):
        (folder / "keys" / f"{number:02x}").mkdir()
    for key in keys:
        name = name_of(key)
        os.close(os.open(folder / "keys" / name[:2] / f"{name}.safetensors", os.O_CREAT, 0o600))
    tier, start = timed(lambda: DiskTier(folder / "keys", limit_bytes=padded(1)))
    some = [*keys[:: max(1, count // 50_000)], *map(str, range(50_000))]
    started = time.perf_counter()
    hits = sum(tier.contains(key) for key in some)
    lookup_s = (time.perf_counter() - started) / len(some)
    assert hits == len(some) - 50_000
    tier.close()
    return {
        "keys": count,
        "start_s": round(start.seconds, 2),
        "start_processor_s": round(start.cpu_seconds, 2),
        "lookup_us": round(lookup_s * 1e6, 2),
    }


def file_system_of(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    lines = Path("/proc/mounts").read_text("utf-8").splitlines()
    mounts = {fields[1]: fields[2] for fields in map(str.split, lines)}
    places = map(str, (folder.resolve(), *folder.resolve().parents))
    return next(mounts[place] for place in places if place in mounts)


def main() -> None:
    """Measures all of it, and prints a line for each figure, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", default="256MiB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    given = parser.parse_args()
    size_bytes = parse_size(given.size, name="--size")
    chunks = chunks_of(size_bytes)
    folder = given.folder / f"kvtide-bench-{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        report = {
            "date": date.today().isoformat(),
            "machine": machine_facts(),
            "system": platform.release(),
            "file_system": file_system_of(folder),
            "size_bytes": size_bytes,
            "rounds": given.rounds,
            "load_of_others": os.getloadavg()[0],
            **measure_seal(given.rounds),
            **measure_disk(folder, chunks, given.rounds),
            **measure_keys(folder, given.keys),
        }
    finally:
        shutil.rmtree(folder)
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    for name, value in report.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
