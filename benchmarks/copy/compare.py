"""Is a move as fast as before? Compares this source tree with another one, call by call.

  python benchmarks/copy/compare.py OTHER/src [--size 32] [--rounds 11] [--pairs 5] [--json]

A process for each tree makes the same pools and arenas. The two processes take turns, one call
each, and alternate who begins, so that both meet the same machine at the same moments. The place of
a process's memory makes some percent of difference as long as the process lives, so several pairs
of processes are compared one after the other. The output has medians over the pairs: milliseconds
of wall time, and the ratios of wall and CPU time, new to old. Only kvtide's public names are used.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Call = Callable[[], None]
NEW = Path(__file__).parent.parent.parent / "src"


def make_calls(size_bytes: int) -> dict[str, Call]:
    """Makes each case's offload and restore of `size_bytes`, by name; an offload comes first."""
    import numpy as np
    import torch

    from kvtide import GQA, HostArena, Pool, Tide, open_device

    device, random = open_device("cpu"), np.random.default_rng(0)
    calls: dict[str, Call] = {}

    def add_case(name: str, pool: Any, slots: Any, block_bytes: int) -> None:
        arena = HostArena(device, limit_bytes=2 * size_bytes, block_bytes=block_bytes)
        tide, held = Tide(pool, arena), list[Any]()

        def restore() -> None:
            snapshot = held.pop()
            tide.restore(snapshot, slots)
            tide.discard(snapshot)

        calls[f"{name}, offload"] = lambda: held.append(tide.offload(slots))
        calls[f"{name}, restore"] = restore

    def pages_of(slot_count: int, token_count: int) -> Any:
        pages = random.permutation(slot_count // 64)[: token_count // 64]
        return (pages[:, None] * 64 + np.arange(64)).reshape(-1)

    for name, layers, width in (("4 layers", 4, 128), ("32 layers", 32, 128), ("narrow", 8, 16)):
        geometry = GQA.bind(
            dtype="bfloat16", layer=layers, token=64, head=8, head_dim=width, v_head_dim=width
        )
        page_count = 4 * size_bytes // (64 * geometry.token_bytes)
        shape = (page_count * 64, 8, width)
        tensors = {
            plane: [torch.randint(0, 99, shape).to(torch.bfloat16) for _ in range(layers)]
            for plane in ("k", "v")
        }
        created = Pool.create(geometry, device, page_count=page_count)
        for buffer in created.buffers:
            buffer.copy_(torch.randint(0, 256, (buffer.numel(),), dtype=torch.uint8))
        adopted = Pool.adopt(geometry, device, tensors)
        tokens = size_bytes // geometry.token_bytes // 64 * 64
        for kind, pool, block_bytes in (
            ("created", created, 1 << 20),
            ("adopted", adopted, 16 << 20),
        ):
            slots = created.slot_count
            add_case(f"{name}, {kind}, pages", pool, pages_of(slots, tokens), block_bytes)
            add_case(
                f"{name}, {kind}, random", pool, random.permutation(slots)[:tokens], block_bytes
            )
        add_case(f"{name}, created, 64 tokens", created, pages_of(created.slot_count, 64), 1 << 20)
    return calls


def serve(size_bytes: int) -> None:
    """Runs in a tree's process: does the requested calls, and prints how long each took."""
    calls = make_calls(size_bytes)
    print(json.dumps([*calls]), flush=True)
    for line in sys.stdin:
        call = calls[line.strip()]
        cpu_start, start = time.process_time(), time.perf_counter()
        call()
        end, cpu_end = time.perf_counter(), time.process_time()
        print(json.dumps([end - start, cpu_end - cpu_start]), flush=True)


class Tree:
    """The process of a source tree."""

    def __init__(self, source: Path, size_mib: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(source), "--serve", "--size", str(size_mib)],
            env=os.environ | {"PYTHONPATH": str(source)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.names: list[str] = self._answer()
        self.seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in self.names}

    def call(self, name: str, *, is_counted: bool) -> None:
        """Makes a call in the process, and keeps its wall and CPU seconds."""
        assert self.process.stdin is not None
        print(name, file=self.process.stdin, flush=True)
        wall, cpu = self._answer()
        if is_counted:
            self.seconds[name].append((wall, cpu))

    def medians(self, name: str) -> tuple[float, float]:
        """Returns median wall and CPU seconds of a call."""
        walls, cpus = zip(*self.seconds[name], strict=True)
        return statistics.median(walls), statistics.median(cpus)

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


def compare(old: Tree, new: Tree, rounds: int) -> dict[str, dict[str, float]]:
    """Returns medians of each call in both trees, after two rounds to warm up."""
    for number in range(rounds + 2):
        for name in old.names:
            for tree in (old, new) if number % 2 else (new, old):
                tree.call(name, is_counted=number >= 2)
    found = {}
    for name in old.names:
        (old_wall, old_cpu), (new_wall, new_cpu) = old.medians(name), new.medians(name)
        found[name] = {
            "old_ms": old_wall * 1e3,
            "new_ms": new_wall * 1e3,
            "wall_ratio": new_wall / old_wall,
            "cpu_ratio": new_cpu / old_cpu,
        }
    return found


def compare_pairs(
    source: Path, size_mib: int, rounds: int, pairs: int
) -> dict[str, dict[str, float]]:
    """Returns medians over some pairs of processes."""
    runs = []
    for _ in range(pairs):
        trees = Tree(source, size_mib), Tree(NEW, size_mib)
        runs.append(compare(*trees, rounds))
        for tree in trees:
            tree.close()
    return {
        name: {
            figure: round(statistics.median(run[name][figure] for run in runs), 3)
            for figure in runs[0][name]
        }
        for name in runs[0]
    }


def main() -> None:
    """Reads the options, compares, and prints."""
    parser = argparse.ArgumentParser(description="compares the speed of moves of two source trees")
    parser.add_argument("old", type=Path, help="the other tree's src")
    parser.add_argument("--size", type=int, default=32, help="MiB that a call moves")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--pairs", type=int, default=5, help="of processes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.size << 20)
        return
    found = compare_pairs(arguments.old, arguments.size, arguments.rounds, arguments.pairs)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{'call':36} {'old ms':>9} {'new ms':>9} {'wall':>6} {'CPU':>6}")
    for name, case in found.items():
        print(
            f"{name:36} {case['old_ms']:9.3f} {case['new_ms']:9.3f} "
            f"{case['wall_ratio']:6.3f} {case['cpu_ratio']:6.3f}"
        )
    wall, cpu = (
        statistics.median(case[ratio] for case in found.values())
        for ratio in ("wall_ratio", "cpu_ratio")
    )
    print(f"{'median of all':36} {'':19} {wall:6.3f} {cpu:6.3f}")


if __name__ == "__main__":
    main()
