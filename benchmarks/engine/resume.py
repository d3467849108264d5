"""How much time does bringing a request's KV back save, beside computing it again?

For each prompt length a request is prefilled alone, retracted to host memory, and resumed. The
lengths take turns over the rounds, and the output has medians. Prefill is in fast mode, which
computes a prompt in the largest passes, so the comparison favours computing.

  python benchmarks/engine/resume.py [--model smollm2] [--tokens 100 300 900] [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

from kvtide.measure.machine import machine_facts
from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.models import open_model
from kvtide.serve.request import Request, SamplingParams


def measure(engine: Engine, prompt: list[int], name: str) -> tuple[float, float, float]:
    """Returns the seconds of a prefill, a retraction and a resumption of the prompt."""
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
    pages[:] = restored
    while engine.has_work:
        engine.step()
    return prefilled - start, retracted - prefilled, resumed - retracted


def main() -> None:
    """Reads the options, measures, and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[100, 300, 900])
    parser.add_argument("--rounds", type=int, default=7)
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
    found: dict[int, list[tuple[float, float, float]]] = {count: [] for count in prompts}
    for number in range(options.rounds + 1):
        for count, prompt in prompts.items():
            seconds = measure(engine, prompt, f"{number}-{count}")
            if number:
                found[count].append(seconds)
    for count, rounds in found.items():
        prefill, retract, resume = (
            statistics.median(column) for column in zip(*rounds, strict=True)
        )
        times = (
            f"prefill {prefill * 1e3:.1f}, retract {retract * 1e3:.2f}, resume {resume * 1e3:.2f}"
        )
        ratio = f"computing again takes {prefill / resume:.0f} times as long"
        print(f"{count} tokens, in ms: {times}; {ratio}")
    engine.close()


if __name__ == "__main__":
    main()
