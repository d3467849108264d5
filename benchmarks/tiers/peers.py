"""How fast do the file tiers of kvtide, SGLang, vLLM and LMCache write KV, and read it again?

    python benchmarks/tiers/peers.py FOLDER [--page 1MiB] [--rounds 7] [--out FILE]
        [--sglang PYTHON] [--vllm PYTHON] [--lmcache PYTHON]

FOLDER is on the disk to measure. The load is the same for all: 8 requests of 32 MiB in pages of
`--page`. Each tier is the code of its engine's wheel, in a process and an environment of its own
(benchmarks/README.md says how to make them); peer.py has the calls. In a round the tiers take
turns:

    write      until the tier says that it is done
    durable    until it would also outlive a power cut: where the tier doesn't sync, a sync of each
               file and folder by 16 threads follows. kvtide syncs before it says that it is done
    cached     read while the system's cache may still have the files
    read       read after the files have left the cache

What the tiers do isn't equal. kvtide hashes every byte before it writes it, and verifies every byte
that it reads; the others have no checksum. kvtide keeps to a limit of bytes and knows its files
again after a restart; LMCache forgets them. kvtide and vLLM read and write past the cache, and so
does LMCache with `use_odirect`; the cache that the others use is memory that no limit counts.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any, final

from kvtide.machine import machine_facts
from kvtide.sizes import parse_size

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = 8
REQUEST_BYTES = 32 << 20
FIGURES = ("write", "durable", "cached", "read")


@final
class Tier:
    """A tier's process."""

    def __init__(self, name: str, python: Path, folder: Path, page_bytes: int) -> None:
        self.name = name
        self.is_durable = name.startswith("kvtide")
        self.times: dict[str, list[tuple[float, float]]] = {figure: [] for figure in FIGURES}
        (folder / name).mkdir()
        sizes = map(str, (REQUEST_BYTES // page_bytes, page_bytes, REQUESTS))
        self.log = (folder / f"{name}.log").open("w")
        self.process = subprocess.Popen(
            [python, ROOT / "benchmarks/tiers/peer.py", name, folder / name, *sizes],
            env=os.environ
            | {"PYTHONPATH": f"{ROOT}/src:{ROOT}/engines/sglang/stand_ins"}
            | {"SGLANG_USE_CPU_ENGINE": "1", "VLLM_NO_USAGE_STATS": "1"}
            | {"LMCACHE_TRACK_USAGE": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def answer(self) -> dict[str, float]:
        """What the process says next. Ends this program with its log if it says nothing."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} has ended: {Path(self.log.name).read_text('utf-8')[-2000:]}")
        found: dict[str, float] = json.loads(line)
        return found

    def ask(self, verb: str, number: int) -> tuple[float, float]:
        """Wall and processor seconds of what it does."""
        assert self.process.stdin is not None
        print(verb, number, file=self.process.stdin, flush=True)
        found = self.answer()
        return found["s"], found["cpu_s"]

    def take_turn(self, number: int, *, is_counted: bool) -> None:
        """Writes and reads once, and checks what came back."""
        write, sync = self.ask("put", number), self.ask("sync", number)
        cached, _ = self.ask("get", number), self.ask("check", number)
        self.ask("drop", number)
        read, _, _ = (self.ask(verb, number) for verb in ("get", "check", "remove"))
        both = (write[0] + sync[0], write[1] + sync[1])
        durable = write if self.is_durable else both
        for figure, times in zip(FIGURES, (write, durable, cached, read), strict=True):
            if is_counted:
                self.times[figure].append(times)

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.log.close()

    def report(self, figure: str, best: list[float]) -> dict[str, Any]:
        """Medians: bytes a second, processor seconds, and the time as a multiple of kvtide's.

        The multiple is the median of the rounds' own, so that a round in which the disk was slow
        counts like any other.
        """
        walls, cpus = zip(*self.times[figure], strict=True)
        rate = REQUESTS * REQUEST_BYTES / statistics.median(walls)
        ratios = [wall / other for wall, other in zip(walls, best, strict=True)]
        return {
            f"{figure}_bytes_per_s": round(rate),
            f"{figure}_processor_s": round(statistics.median(cpus), 4),
            f"{figure}_to_kvtide": round(statistics.median(ratios), 2),
        }


def measure(pythons: dict[str, Path], folder: Path, page_bytes: int, rounds: int) -> list[Any]:
    """An entry for each tier."""
    tiers = [Tier(name, python, folder, page_bytes) for name, python in pythons.items()]
    for tier in tiers:
        tier.answer()
    for number in range(rounds + 1):
        for tier in tiers:
            tier.take_turn(number, is_counted=number > 0)
    for tier in tiers:
        tier.close()
    entries = []
    for tier in tiers:
        entry: dict[str, Any] = {"name": tier.name}
        for figure in FIGURES:
            entry |= tier.report(figure, [wall for wall, _ in tiers[0].times[figure]])
        entries.append(entry)
    return entries


def show(entries: list[Any]) -> None:
    """A table: 1e6 bytes a second, and in parentheses the time as a multiple of kvtide's."""
    print(f"{'tier':16}" + "".join(f"{figure:>16}" for figure in FIGURES) + f"{'CPU s (w, r)':>16}")
    for entry in entries:
        cells = [
            f"{entry[f'{figure}_bytes_per_s'] / 1e6:.0f} ({entry[f'{figure}_to_kvtide']:.2f})"
            for figure in FIGURES
        ]
        cells.append(f"{entry['durable_processor_s']:.2f} {entry['read_processor_s']:.2f}")
        print(f"{entry['name']:16}" + "".join(f"{cell:>16}" for cell in cells))


def main() -> None:
    """Measures the tiers whose environments are there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", default="1MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    for engine in ("sglang", "vllm", "lmcache"):
        parser.add_argument(f"--{engine}", type=Path, default=ROOT / f".venv-{engine}/bin/python")
    given = parser.parse_args()
    pythons: dict[str, Path] = dict.fromkeys(("kvtide", "kvtide-pages"), Path(sys.executable))
    for engine, names in (
        ("sglang", ["sglang"]),
        ("vllm", ["vllm"]),
        ("lmcache", ["lmcache", "lmcache-direct"]),
    ):
        python = getattr(given, engine)
        if python.exists():
            pythons |= dict.fromkeys(names, python)
        else:
            print(f"not measured: {engine}, since there is no {python}", file=sys.stderr)
    folder = given.folder / f"kvtide-bench-{secrets.token_hex(4)}"
    folder.mkdir()
    load = os.getloadavg()[0]
    try:
        entries = measure(pythons, folder, parse_size(given.page, name="--page"), given.rounds)
    finally:
        shutil.rmtree(folder)
    if given.out:
        about = {"date": date.today().isoformat(), "machine": machine_facts()}
        about |= {"page": given.page, "rounds": given.rounds, "load_of_others": load}
        text = json.dumps(about | {"tiers": entries}, indent=1)
        given.out.write_text(text + "\n", "utf-8")
    print(f"pages of {given.page}; the load of others was {load:.1f}")
    show(entries)


if __name__ == "__main__":
    main()
