"""How fast are kvtide's moves under vLLM, beside memcpy, computing, and vLLM's own offloading?

    cd engines/vllm && KVTIDE_SMOLLM2=FOLDER PYTHONPATH=tests OMP_NUM_THREADS=1 \\
        ../../.venv-vllm/bin/python ../../benchmarks/vllm/bench.py [--json FILE]

`make test-vllm` makes the environment and the model. It takes four minutes on an idle machine.

blocks   saved and loaded, beside a plain copy of the same bytes, in turns
prefix   seconds to the first token of a prompt with a prefix of 1,024 tokens: computed, with the
         prefix still on the device (vLLM's own share), from host memory, and from the disk after a
         restart (kvtide reads past the system's cache, and vLLM from it)
decode   what saving adds to the decoding of the same tokens, in turns in one engine

vLLM's own offloading doesn't run on CPUs. Its books, its shared memory and its file tier do, with a
plain copy in place of its kernels: that is `vLLM` here. It seals, checks and syncs nothing.

Each goal is printed beside its figure. The exit code is 1 if an answer or a byte differs, or a
known prefix wasn't found; never for a figure, which depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, final

import torch
from plain_copy import PlainCopyWorker, plain_config
from vllm_engine import BLOCK_TOKENS, Engine, opened, opened_with_kvtide

import conftest  # noqa: F401 - vLLM reads what this sets when it is imported
from kvtide.arena import HostArena
from kvtide.machine import machine_facts
from kvtide.measure.timing import Timing, median_of, time_in_turns, timed
from kvtide.plugin.vllm.block_store import BlockStore
from kvtide.plugin.vllm.open_store import adopt_groups, open_device_of
from kvtide.plugin.vllm.package import VLLM
from kvtide.plugin.vllm.spec import KeySpec, KvtideWorker
from kvtide.tier import Namespace

# As one would serve it there: without instructions for bfloat16 it takes eight times as long.
DTYPE = "bfloat16" if machine_facts()["bfloat16_instructions"] else "float32"
LAYERS = 30
BLOCK_BYTES = 192 * LAYERS * 2 * BLOCK_TOKENS * (2 if DTYPE == "bfloat16" else 4)
"""The KV of a block of SmolLM2, in all layers."""
BLOCKS = 8
SETS = 5
"""How many sets of blocks take turns: their bytes are a multiple of what the caches hold."""
PREFIX = BLOCKS * BLOCK_TOKENS
HOST_BYTES = 2 * BLOCKS * SETS * BLOCK_BYTES
Result = dict[str, Any]
Problems = list[str]
"""What must not be: other bytes, another answer, no hit."""

GOALS = (
    ("blocks saved", "of memcpy", ("blocks", "kvtide save", "memcpy"), 0.9),
    ("blocks loaded", "of memcpy", ("blocks", "kvtide load", "memcpy"), 0.9),
    ("first token from host memory", "times sooner", ("kvtide", "host_times_shorter"), 35.0),
    ("first token from the disk", "times sooner", ("kvtide", "disk_times_shorter"), 20.0),
    ("saving slows decoding", "%, at most", ("kvtide", "decode", "slower_percent"), 3.0),
)
"""What is measured, its unit, where its figure is in the result, and the goal."""


def prompt(seed: int, token_count: int = PREFIX + 1) -> list[int]:
    """A prompt that begins unlike any other."""
    return Random(seed).choices(range(1000, 40_000), k=token_count)


# ---- blocks ------------------------------------------------------------------------------


class PlainRegion:
    """vLLM's shared memory, as far as PlainCopyWorker uses it, without the file."""

    def __init__(self, count: int) -> None:
        self._count = count

    def create_next_worker_view(self, width: int) -> torch.Tensor:
        """A row for each block."""
        return torch.zeros(self._count, width, dtype=torch.int8)

    def cleanup(self) -> None:
        """There is nothing to give back."""


def measure_blocks(rounds: int, problems: Problems) -> Result:
    """Moves of 1,024 tokens of SmolLM2, beside a copy of the same bytes from a block to a block.

    Each move takes other blocks than the ones before it, so that no cache has their bytes.
    """
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
    )

    width, count = BLOCK_BYTES // LAYERS, BLOCKS * SETS
    whole = torch.randint(-128, 128, (LAYERS, 1 + count, width), dtype=torch.int8)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(layer, width) for layer in whole],
        [[CanonicalKVCacheRef(layer, width) for layer in range(LAYERS)]],
    )
    device = open_device_of(caches)
    arena = HostArena(device, limit_bytes=count * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    groups = adopt_groups(caches, device)
    store = BlockStore(groups, lambda _: 0, arena, Namespace(model="", weights="", layout=""))
    ours, theirs = KvtideWorker(store, store.close), PlainCopyWorker(caches, PlainRegion(count))
    order = torch.randperm(count).tolist()
    sets = [range(first, first + BLOCKS) for first in range(0, count, BLOCKS)]

    def spec(blocks: Iterable[int]) -> Any:
        return GPULoadStoreSpec([*blocks], group_sizes=[BLOCKS], block_indices=[0])

    inside = [spec(1 + order[number] for number in numbers) for numbers in sets]
    rows = [spec(numbers) for numbers in sets]
    keys = [KeySpec([bytes([number]) for number in numbers]) for numbers in sets]
    plain = torch.ones(2, SETS, BLOCKS * BLOCK_BYTES, dtype=torch.int8)

    def in_turns(call: Callable[..., Any], *arguments: Sequence[Any]) -> Callable[[], object]:
        given = cycle(zip(*arguments, strict=True))
        return lambda: call(*next(given))

    def move(worker: Any, begin: Callable[..., Any], *ends: Sequence[Any]) -> Callable[[], object]:
        def go(first: Any, second: Any) -> None:
            begin(1, first, second)
            worker.wait({1})
            worker.get_finished()

        return in_turns(go, *ends)

    moves = {
        "memcpy": in_turns(torch.Tensor.copy_, *plain.unbind()),
        "kvtide save": move(ours, ours.submit_store, inside, keys),
        "kvtide load": move(ours, ours.submit_load, keys, inside),
        "vLLM save": move(theirs, theirs.submit_store, inside, rows),
        "vLLM load": move(theirs, theirs.submit_load, rows, inside),
    }
    for _ in sets:  # every block is saved before it is loaded, and its memory is touched
        for name in ("memcpy", "kvtide save", "vLLM save"):
            moves[name]()
    times = time_in_turns(moves, rounds)
    wanted = whole.clone()
    for name in ("kvtide", "vLLM"):
        whole[:, 1:] = 0x5A
        for _ in sets:
            moves[f"{name} load"]()
        if not torch.equal(wanted, whole):
            problems.append(f"{name}: other bytes came back than were saved")
    ours.shutdown()
    device.close()
    memcpy = times["memcpy"].seconds
    return {
        "mib": round(BLOCKS * BLOCK_BYTES / 2**20, 1),
        "memcpy_ms": round(memcpy * 1e3, 2),
        **{
            name: {"ms": round(timing.seconds * 1e3, 2), **timing.speed(memcpy).to_json("memcpy")}
            for name, timing in times.items()
            if name != "memcpy"
        },
    }


# ---- engines -----------------------------------------------------------------------------


def with_kvtide(folder: Path) -> AbstractContextManager[Engine]:
    """An engine with kvtide, and a disk below it."""
    settings = {
        "host_memory": str(HOST_BYTES),
        "disk_dir": str(folder),
        "disk_memory": "4GiB",
    }
    return opened_with_kvtide(settings=settings, dtype=DTYPE)


@contextmanager
def with_vllm(folder: Path) -> Iterator[Engine]:
    """An engine with vLLM's host memory, and its file tier below it."""
    from vllm.config import KVTransferConfig

    folder.mkdir(exist_ok=True)
    transfer = plain_config(HOST_BYTES, {"type": "fs", "root_dir": str(folder)})
    with opened(kv_transfer_config=KVTransferConfig(**transfer), dtype=DTYPE) as engine:
        yield engine


ENGINES: Mapping[str, Callable[[Path], AbstractContextManager[Engine]]] = {
    "kvtide": with_kvtide,
    "vLLM": with_vllm,
}


@final
class Asked:
    """An engine that is asked for prompts whose answers must never differ."""

    def __init__(self, name: str, problems: Problems) -> None:
        self._name = name
        self._problems = problems
        self._right: dict[int, list[int]] = {}
        """The answers to prompts whose prefix the device itself had computed."""

    def first_token(self, engine: Engine, seed: int, place: str) -> Timing:
        """The time to the first token. `place` is where the prompt's prefix is, if anywhere."""
        found, timing = timed(lambda: engine.answer(prompt(seed), 1))
        expected = PREFIX if place else 0
        if expected != found.cached_tokens:
            self._problems.append(
                f"{self._name}: {found.cached_tokens} tokens of a prompt were found, not "
                f"{expected}{place and f' from {place}'}"
            )
        return timing

    def check(self, engine: Engine, seed: int) -> None:
        """Compares an answer with the first one; the device has the prefix."""
        tokens = engine.answer(prompt(seed)).tokens
        if tokens != self._right.setdefault(seed, tokens):
            self._problems.append(
                f"{self._name}: prompt {seed} has the answer {tokens}, and not {self._right[seed]}"
            )


def measure_prefix(name: str, folder: Path, count: int, problems: Problems) -> Result:
    """The first token of `count` prompts: computed, from host memory, and from disk.

    With the prefix still on the device nothing is loaded: the rest of the time is vLLM's own.
    """
    seeds, asked = range(count), Asked(name, problems)
    with ENGINES[name](folder) as engine:
        engine.answer(prompt(99), 2)
        engine.forget_local()
        asked.first_token(engine, 99, "host memory")
        computed, host, device, disk = [], [], [], []
        for seed in seeds:
            computed.append(asked.first_token(engine, seed, ""))
            asked.check(engine, seed)
        engine.answer(prompt(98, 200), 8)  # the last blocks are saved in later steps
        for seed in (*seeds, *seeds, *seeds):
            engine.forget_local()
            host.append(asked.first_token(engine, seed, "host memory"))
            device.append(asked.first_token(engine, seed, "the device"))
            asked.check(engine, seed)
        decode = measure_decoding(engine)
        wait_for_files(folder, count * BLOCKS)
    with ENGINES[name](folder) as engine:
        engine.answer(prompt(97), 2)
        for seed in seeds:
            disk.append(asked.first_token(engine, seed, "the disk"))
            asked.check(engine, seed)
    by_computing = median_of(computed)
    return {
        "computed_s": round(by_computing.seconds, 3),
        "device_s": round(median_of(device).seconds, 4),
        "host_s": round(median_of(host).seconds, 4),
        "disk_s": round(median_of(disk).seconds, 4),
        **median_of(device).speed(by_computing.seconds).to_json("device_times_shorter"),
        **median_of(host).speed(by_computing.seconds).to_json("host_times_shorter"),
        **median_of(disk).speed(by_computing.seconds).to_json("disk_times_shorter"),
        "decode": decode,
    }


def wait_for_files(folder: Path, count: int) -> None:
    """Waits until so many blocks are on the disk."""
    ends_at = time.monotonic() + 30
    while sum(path.suffix in (".bin", ".safetensors") for path in folder.rglob("*")) < count:
        assert time.monotonic() < ends_at, "the disk doesn't get the blocks"
        time.sleep(0.05)


def measure_decoding(engine: Engine, rounds: int = 3) -> Result:
    """Decodes the same tokens with and without saving, in turns: the processor's time of both."""
    scheduler = engine.core.scheduler.connector.connector_scheduler
    prepare = scheduler.manager.prepare_store

    def nothing(_: Any, context: Any) -> Any:
        return prepare([], context)

    times: dict[bool, list[Timing]] = {True: [], False: []}
    for number in range(rounds):
        for saves in (True, False) if number % 2 else (False, True):
            scheduler.manager.prepare_store = prepare if saves else nothing
            seeds = range(1000 + 10 * number, 1004 + 10 * number)
            prompts = [prompt(seed + 500 * saves, BLOCK_TOKENS - 8) for seed in seeds]
            _, timing = timed(lambda prompts=prompts: engine.answers(prompts, BLOCK_TOKENS + 16))
            times[saves].append(timing)
    scheduler.manager.prepare_store = prepare
    saving, alone = (min(timing.cpu_seconds for timing in times[saves]) for saves in (True, False))
    return {
        "cpu_s_without_saving": round(alone, 3),
        "cpu_s_with_saving": round(saving, 3),
        "slower_percent": round(100 * (saving / alone - 1), 1),
    }


def beside_goals(found: Result) -> Iterator[str]:
    """Yields a line for each goal: the figure, the goal, and whether it is met."""
    for what, unit, path, goal in GOALS:
        figure: Any = found
        for part in path:
            figure = figure[part]
        is_met = figure <= goal if unit.startswith("%") else figure >= goal
        yield f"{what}: {figure:.2f} {unit}; goal {goal:g}: {'met' if is_met else 'not met'}"
    for place in ("host", "disk"):
        ours, theirs = (found[name][f"{place}_s"] for name in ("kvtide", "vLLM"))
        verdict = "met" if ours <= theirs else "not met"
        yield f"first token from {place}: {ours} s; goal vLLM's {theirs} s: {verdict}"


def main() -> int:
    """Measures, and prints. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    problems: Problems = []
    found: Result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            **machine_facts(),
            "load": round(os.getloadavg()[0], 1),
            "threads": torch.get_num_threads(),
            "dtype": DTYPE,
            "torch": torch.__version__,
            "vllm": VLLM.version,
        },
        "blocks": measure_blocks(options.rounds, problems),
    }
    print(json.dumps(found["blocks"], indent=2), flush=True)
    with tempfile.TemporaryDirectory(dir=options.disk) as root:
        for name in ENGINES:
            found[name] = measure_prefix(name, Path(root) / name, options.prompts, problems)
            print(json.dumps({name: found[name]}, indent=2), flush=True)
    print(*beside_goals(found), *problems, sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
