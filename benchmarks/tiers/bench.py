"""Measures a disk tier beside a plain program, and sealing beside a plain copy.

    python benchmarks/tiers/bench.py FOLDER [--size 256MiB] [--rounds 9] [--keys 1000000] [--json]

FOLDER is on the disk to measure; a folder is made in it and removed. The plain program writes one
file of the same size from aligned memory by direct I/O and syncs it, and reads it so; where the
file system has no direct I/O, both go through the cache. All take turns, so compare ratios alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import shutil
import sys
import time
from contextlib import closing
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvtide.measure.copies import measure_copy
from kvtide.measure.machine import machine_facts
from kvtide.measure.timing import time_in_turns, timed
from kvtide.seal import Seal, Span
from kvtide.sizes import parse_size
from kvtide.tier import DiskTier
from kvtide.tier.file_form import padded
from kvtide.tier.file_io import aligned_memory, takes_direct_io
from kvtide.tier.names import name_of

CHUNK_BYTES = 8 << 20
SPAN_BYTES = 1 << 20
CALL_BYTES = 16 << 20


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


def measure_disk(folder: Path, chunks: list[memoryview], rounds: int) -> dict[str, Any]:
    """Put and get beside the plain program's write and read: its time divided by the tier's."""
    seal, rooms = sealed(chunks), [aligned_memory(CHUNK_BYTES) for _ in chunks]
    size_bytes = sum(chunk.nbytes for chunk in chunks)
    plain = PlainProgram(folder, chunks)
    with closing(DiskTier(folder / "tier", limit_bytes=4 * size_bytes)) as tier:
        tier.put("a", seal, chunks)
        plain.write()
        found = time_in_turns(
            {
                "plain write": plain.write,
                "put": partial(tier.put, "a", seal, chunks),
                "plain read": partial(plain.read, rooms),
                "get": partial(tier.get, "a", lambda _: rooms),
            },
            rounds,
        )
    return {
        "direct_io": bool(plain.direct),
        "plain_write_bytes_per_s": round(size_bytes / found["plain write"].seconds),
        "plain_read_bytes_per_s": round(size_bytes / found["plain read"].seconds),
        **found["put"].speed(found["plain write"].seconds).to_json("put_to_plain_write"),
        **found["get"].speed(found["plain read"].seconds).to_json("get_to_plain_read"),
    }


def measure_seal(chunks: list[memoryview], rounds: int) -> dict[str, Any]:
    """The library's sealed copy of pages as a multiple of its plain one; and how long it takes to
    verify as many bytes, as a multiple of a plain copy of them.
    """
    seal = sealed(chunks)
    rooms = [aligned_memory(CHUNK_BYTES) for _ in chunks]
    sources, targets = (
        [np.frombuffer(memory, np.uint8) for memory in some] for some in (chunks, rooms)
    )

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            np.copyto(target, source)

    found = time_in_turns({"copy": copy, "verify": partial(seal.check_bytes, chunks)}, rounds)
    cases = measure_copy(64 << 20, rounds).cases
    ratios = {
        name: case["sealed_gather"].relative_to(case["gather"].seconds)
        for name, case in cases.items()
    }
    report: dict[str, Any] = {}
    for name, ratio in ratios.items():
        report |= ratio.to_json(f"sealed_copy_to_copy_{name}")
    return report | found["verify"].relative_to(found["copy"].seconds).to_json("verify_to_copy")


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
    parser.add_argument("--json", action="store_true")
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
            **measure_seal(chunks, given.rounds),
            **measure_disk(folder, chunks, given.rounds),
            **measure_keys(folder, given.keys),
        }
    finally:
        shutil.rmtree(folder)
    if given.json:
        json.dump(report, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    for name, value in report.items():
        sys.stdout.write(f"{name}: {value}\n")


if __name__ == "__main__":
    main()
