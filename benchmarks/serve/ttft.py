"""How much sooner does the first token come if the prompt's beginning is in host memory?

A prompt of 900 tokens is answered, other prompts take its place in the pool, and it is sent again
with another last word: its beginning comes back from the arena. Each round uses a prompt of its
own, and the time of the first answer is that of computing it, so that both are measured in turns.

`server` has the client's times, with HTTP and all, and the processor time of the server for the
whole call, which other programs disturb less. `engine` has both for the engine alone, in this
process. In exact mode and with --fast; figures are medians.

  python benchmarks/serve/ttft.py [--model smollm2] [--tokens 900] [--rounds 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers import Ask, Server, client_of, complete, kvtide_server, prompt_of, tell, threads

from kvtide.machine import machine_facts
from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.models import OpenModel, open_model
from kvtide.serve.request import Request, SamplingParams
from kvtide.serve.supported import geometry_of

_HOST_BYTES = 1 << 30
_OTHERS = 2
"""How many other prompts take a prompt's place."""


@dataclass(frozen=True)
class _Timed:
    """An answer of one token."""

    s: float
    processor_s: float
    cached_tokens: int


def prompt_with(source: OpenModel, dice: random.Random, token_count: int) -> str:
    """A prompt of about that many tokens."""
    prompt = prompt_of(dice, 2 * token_count)
    ids = source.tokenizer(prompt)["input_ids"][:token_count]
    text: str = source.tokenizer.decode(ids)
    return text


def summary(computed: Sequence[_Timed], restored: Sequence[_Timed]) -> dict[str, Any]:
    """Medians, and how many times shorter the first token's time is."""
    result: dict[str, Any] = {"cached_tokens": sorted({timed.cached_tokens for timed in restored})}
    for unit in ("s", "processor_s"):
        first, second = (
            statistics.median(getattr(timed, unit) for timed in part)
            for part in (computed, restored)
        )
        result |= {
            f"computed_{unit}": round(first, 4),
            f"restored_{unit}": round(second, 4),
            f"ratio_{unit}": round(first / max(second, 0.001), 1),
        }
    return result


async def through_server(
    server: Server, source: OpenModel, tokens: int, rounds: int
) -> dict[str, Any]:
    """The times of the first tokens that a client sees."""
    dice = random.Random(7)
    computed, restored = [], []
    async with client_of(server) as client:

        async def timed(prompt: str) -> _Timed:
            before = server.processor_s
            answer = await complete(client, server.model, Ask(prompt, 1))
            cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
            return _Timed(answer.first_s, server.processor_s - before, cached)

        await timed("warm up")
        for _ in range(rounds):
            prompt = prompt_with(source, dice, tokens)
            computed.append(await timed(prompt))
            for _ in range(_OTHERS):
                await timed(prompt_with(source, dice, tokens))
            restored.append(await timed(f"{prompt} end"))
    return summary(computed, restored)


def in_process(engine: Engine, source: OpenModel, tokens: int, rounds: int) -> dict[str, Any]:
    """The times of steps that give the first tokens."""
    dice = random.Random(7)
    computed, restored = [], []

    def timed(prompt: str) -> _Timed:
        ids = source.tokenizer(prompt)["input_ids"]
        request = Request("timed", ids, SamplingParams(max_new_tokens=1))
        began, processor_began = time.perf_counter(), time.process_time()
        engine.add(request)
        while engine.has_work:
            engine.step()
        processor_s = time.process_time() - processor_began
        return _Timed(time.perf_counter() - began, processor_s, request.cached_tokens)

    timed("warm up")
    for _ in range(rounds):
        prompt = prompt_with(source, dice, tokens)
        computed.append(timed(prompt))
        for _ in range(_OTHERS):
            timed(prompt_with(source, dice, tokens))
        restored.append(timed(f"{prompt} end"))
    return summary(computed, restored)


def measure(source: OpenModel, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """The server's figures and the engine's, in one mode."""
    pool_bytes = (options.tokens + 100) * geometry_of(
        source.model.config, source.model.dtype, 16
    ).token_bytes
    memory = ("--kv-memory", str(pool_bytes), "--host-memory", str(_HOST_BYTES))
    result: dict[str, Any] = {}
    with kvtide_server(options.model, *memory, f"--{mode}") as server:
        served = through_server(server, source, options.tokens, options.rounds)
        result["server"] = asyncio.run(served)
    engine = Engine.build(
        source,
        EngineOptions(
            kv_memory_bytes=pool_bytes,
            host_memory_bytes=_HOST_BYTES,
            exact=mode == "exact",
            threads=int(threads()),
        ),
    )
    result["engine"] = in_process(engine, source, options.tokens, options.rounds)
    engine.close()
    return result


def start_with_calm_threads() -> None:
    """Starts this program again if its threads would wait in another manner than a server's.

    OpenMP reads both variables when torch is loaded (docs/engine.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
        os.execv(sys.executable, [sys.executable, *sys.argv])


def main() -> None:
    """Reads the options, measures, and prints."""
    start_with_calm_threads()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    source = open_model(options.model, dtype="bfloat16")
    result: dict[str, Any] = {
        "machine": machine_facts(),
        "threads": int(threads()),
        "prompt_tokens": options.tokens,
    }
    for mode in ("exact", "fast"):
        result[mode] = measure(source, mode, options)
    tell(result, options.json)


if __name__ == "__main__":
    main()
