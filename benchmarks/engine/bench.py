"""How fast is the reference engine, beside what transformers itself offers?

Four contenders answer the same random prompts of equal length with equally many new tokens,
greedily and without an end: the engine in exact mode and in fast mode, `generate` on the whole
batch at once, and `generate_batch` (continuous batching). They take turns within each round, so
that other work of the machine slows all alike. The output has medians over the rounds, wall time
and CPU time, and the ratios of tokens a second. Loading, the engine's self-check and one unmeasured
round come first. With --busy other processes need the same cores. Then it matters how threads wait
for each other, which OMP_WAIT_POLICY and GOMP_SPINCOUNT set; kvtide's command sets them to passive
and 1000, and this script leaves them unchanged.

  python benchmarks/engine/bench.py --batch 16 --dtype bfloat16 --threads 2 [--busy 2] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from kvtide.machine import machine_facts
from kvtide.measure.timing import Timing, median_of, timed
from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.models import open_model
from kvtide.serve.request import Request, SamplingParams

Contender = Callable[[], list[list[int]]]


def main() -> None:
    """Reads the options, measures, and prints."""
    options = _options()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(
        100, 40_000, (options.batch, options.prompt_tokens), generator=generator
    )
    contenders = _contenders(prompts.tolist(), options)
    with _others_busy(options.busy):
        measured = _measure(contenders, options.rounds)
    report = _report(measured, options)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _print_table(report)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=0, help="other processes that compute")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _contenders(prompts: list[list[int]], options: argparse.Namespace) -> dict[str, Contender]:
    """Makes the contenders, each with its own model, ready to run."""
    return {
        "exact": _engine(prompts, options, exact=True),
        "fast": _engine(prompts, options, exact=False),
        "generate": _generate(prompts, options),
        "generate_batch": _generate_batch(prompts, options),
    }


def _engine(prompts: list[list[int]], options: argparse.Namespace, *, exact: bool) -> Contender:
    source = open_model(options.model, dtype=options.dtype)
    source = dataclasses.replace(source, eos_ids=frozenset())
    params = SamplingParams(max_new_tokens=options.new_tokens)

    def requests() -> list[Request]:
        return [Request(str(number), prompt, params) for number, prompt in enumerate(prompts)]

    # The others compute each prompt in each round, too.
    engine_options = EngineOptions(exact=exact, threads=options.threads, share_prefixes=False)
    engine = Engine.build(source, engine_options, requests())

    def run() -> list[list[int]]:
        asked = requests()
        for request in asked:
            engine.add(request)
        while engine.has_work:
            engine.step()
        return [request.output_ids for request in asked]

    return run


def _generate(prompts: list[list[int]], options: argparse.Namespace) -> Contender:
    model: Any = open_model(options.model, dtype=options.dtype).model
    token_ids = torch.tensor(prompts)

    def run() -> list[list[int]]:
        found = model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=options.new_tokens,
            min_new_tokens=options.new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        answers: list[list[int]] = found[:, token_ids.shape[1] :].tolist()
        return answers

    return run


def _generate_batch(prompts: list[list[int]], options: argparse.Namespace) -> Contender:
    model: Any = open_model(options.model, dtype=options.dtype).model
    generation = GenerationConfig(
        max_new_tokens=options.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=128, max_batch_tokens=1024)

    def run() -> list[list[int]]:
        found = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching
        )
        answers = {
            tuple(answer.prompt_ids): list(answer.generated_tokens) for answer in found.values()
        }
        return [answers[tuple(prompt)] for prompt in prompts]

    return run


@contextlib.contextmanager
def _others_busy(count: int) -> Iterator[None]:
    """Keeps `count` processes busy meanwhile, for an hour at most."""
    spin = "import time; end = time.time() + 3600\nwhile time.time() < end: sum(range(10000))"
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def _measure(contenders: dict[str, Contender], rounds: int) -> dict[str, list[tuple[Timing, int]]]:
    """Measures each contender in each round, and counts its new tokens."""
    found: dict[str, list[tuple[Timing, int]]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            answers, timing = timed(run)
            if number:
                found[name].append((timing, sum(map(len, answers))))
    return found


def _report(
    measured: dict[str, list[tuple[Timing, int]]], options: argparse.Namespace
) -> dict[str, Any]:
    contenders = {}
    for name, rounds in measured.items():
        median = median_of(timing for timing, _ in rounds)
        speeds = [count / timing.seconds for timing, count in rounds]
        contenders[name] = {
            "seconds": median.seconds,
            "cpu_seconds": median.cpu_seconds,
            "new_tokens": rounds[0][1],
            "tokens_per_second": statistics.median(speeds),
        }
    speed = {name: figures["tokens_per_second"] for name, figures in contenders.items()}
    return {
        "machine": _machine(),
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "contenders": contenders,
        "ratios": {
            f"{ours}/{theirs}": round(speed[ours] / speed[theirs], 3)
            for ours in ("exact", "fast")
            for theirs in ("generate", "generate_batch")
        },
    }


def _machine() -> dict[str, Any]:
    return {
        **machine_facts(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "gomp_spincount": os.environ.get("GOMP_SPINCOUNT"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _print_table(report: dict[str, Any]) -> None:
    for name, figures in report["contenders"].items():
        print(
            f"{name:15} {figures['tokens_per_second']:8.1f} tokens/s "
            f"{figures['seconds']:7.2f} s {figures['cpu_seconds']:7.2f} CPU s"
        )
    for name, ratio in report["ratios"].items():
        print(f"{name:22} {ratio:.2f}")


if __name__ == "__main__":
    main()
