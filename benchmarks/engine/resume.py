"""How much time does bringing a request's KV back save, beside computing it again?

For each prompt length a request is prefilled alone, retracted to host memory, and resumed. With
`--disk FOLDER` it is then retracted again and written to a disk tier in that folder, leaves host
memory, and comes back from the disk, past the system's cache where the disk allows it. The lengths
take turns over the rounds, and the output has medians. Prefill is in fast mode, which computes a
prompt in the largest passes, so the comparison favours computing.

  python benchmarks/engine/resume.py [--model smollm2] [--tokens 100 300 900] [--rounds 7]
      [--disk FOLDER]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from kvtide.machine import machine_facts
from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.models import open_model
from kvtide.serve.request import Request, SamplingParams
from kvtide.tier import DiskTier

DISK_BYTES = 1 << 30


def measure(engine: Engine, prompt: list[int], name: str, disk: DiskTier | None) -> list[float]:
    """Seconds of a prefill, a retraction and a resumption; of a write to the disk, and of the way
    back from there into the pool."""
    request = Request(name, prompt, SamplingParams(max_new_tokens=2))
    engine.add(request)
    start = time.perf_counter()
    while not request.output_ids:
        engine.step()
    prefilled = time.perf_counter()
    tide, pages = engine.tide, request.pages
    snapshot = tide.retract(pages, len(prompt))
    retracted = time.perf_counter()
    restored = tide.resume(snapshot, len(pages))
    resumed = time.perf_counter()
    assert restored is not None, "nobody else has pages"
    seconds = [prefilled - start, retracted - prefilled, resumed - retracted]
    if disk is not None:
        snapshot = tide.retract(restored, len(prompt))
        start = time.perf_counter()
        disk.save(name, snapshot)
        saved = time.perf_counter()
        tide.discard(snapshot)
        begun = time.perf_counter()
        restored = tide.resume(disk.load(name, engine.tide.arena), len(pages))
        seconds += [saved - start, time.perf_counter() - begun]
        assert restored is not None, "nobody else has pages"
        disk.remove(name)
    pages[:] = restored
    while engine.has_work:
        engine.step()
    return seconds


def main() -> None:
    """Reads the options, measures, and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[100, 300, 900])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--disk", type=Path, help="a folder on the disk to measure")
    options = parser.parse_args()
    source = open_model(options.model, dtype="bfloat16")
    generator = torch.Generator().manual_seed(7)
    prompts = {
        count: torch.randint(100, 40_000, (count,), generator=generator).tolist()
        for count in options.tokens
    }
    probe = [Request("probe", prompts[max(prompts)], SamplingParams(max_new_tokens=2))]
    # Each round computes its prompts again, and takes their pages away by itself.
    engine = Engine.build(source, EngineOptions(exact=False, share_prefixes=False), probe)
    print(machine_facts(), f"{os.cpu_count()} CPUs, {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        disk = DiskTier(Path(folder), limit_bytes=DISK_BYTES) if options.disk else None
        found: dict[int, list[list[float]]] = {count: [] for count in prompts}
        for number in range(options.rounds + 1):
            for count, prompt in prompts.items():
                seconds = measure(engine, prompt, f"{number}-{count}", disk)
                if number:
                    found[count].append(seconds)
        if disk is not None:
            disk.close()
    names = ("prefill", "retract", "resume", "write", "from disk")
    for count, rounds in found.items():
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        times = ", ".join(
            f"{name} {seconds * 1e3:.2f}" for name, seconds in zip(names, medians, strict=False)
        )
        ratios = " and ".join(f"{medians[0] / back:.0f}" for back in medians[2::2])
        print(f"{count} tokens, in ms: {times}; computing again takes {ratios} times as long")
    engine.close()


if __name__ == "__main__":
    main()
