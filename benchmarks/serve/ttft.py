"""How much sooner does the first token come if the prompt's beginning is in host memory?

A prompt of 900 tokens is answered, other prompts take its place in the pool, and it is sent again
with another last word: its beginning comes back from the arena. Each round uses a prompt of its
own, and the time of the first answer is that of computing it, so that both are measured in turns.

`server` has the client's times, with HTTP and all, and the processor time of the server for the
whole call, which other programs disturb less. `engine` has both for the engine alone, in this
process. In exact mode and with --fast; figures are medians. Exits with 1 if a beginning didn't come
from host memory, or if an answer of exact mode is another one than without it.

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
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
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
class Round:
    """A prompt, and those that take its place in the pool."""

    prompt: str
    others: tuple[str, ...]

    @property
    def again(self) -> str:
        """The prompt with another last word."""
        return f"{self.prompt} end"


@dataclass(frozen=True)
class _Timed:
    """An answer of one token."""

    s: float
    processor_s: float
    cached_tokens: int
    text: str


@dataclass
class _Measured:
    """The answers of all rounds, and how many tokens of prompts came from host memory."""

    computed: list[_Timed]
    restored: list[_Timed]
    host_tokens: int = 0


def make_rounds(source: OpenModel, token_count: int, count: int) -> list[Round]:
    """Rounds of random prompts of about that many tokens."""
    dice = random.Random(7)

    def prompt() -> str:
        ids = source.tokenizer(prompt_of(dice, 2 * token_count))["input_ids"][:token_count]
        return str(source.tokenizer.decode(ids))

    return [Round(prompt(), tuple(prompt() for _ in range(_OTHERS))) for _ in range(count)]


def summary(measured: _Measured) -> dict[str, Any]:
    """Medians, and how many times shorter the first token's time is."""
    cached = sorted({timed.cached_tokens for timed in measured.restored})
    result: dict[str, Any] = {"cached_tokens": cached}
    for unit in ("s", "processor_s"):
        first, second = (
            statistics.median(getattr(timed, unit) for timed in part)
            for part in (measured.computed, measured.restored)
        )
        result |= {
            f"computed_{unit}": round(first, 4),
            f"restored_{unit}": round(second, 4),
            f"ratio_{unit}": round(first / max(second, 0.001), 1),
        }
    return result


def problems_of(source: OpenModel, rounds: Sequence[Round], measured: _Measured) -> list[str]:
    """Which beginnings didn't come from host memory."""
    problems, total = [], 0
    for number, (one, timed) in enumerate(zip(rounds, measured.restored, strict=True)):
        first, again = (source.tokenizer(text)["input_ids"] for text in (one.prompt, one.again))
        pairs = zip(first, again, strict=False)  # the second one is longer
        least = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        total += least
        if timed.cached_tokens < least:
            problems.append(f"round {number}: {timed.cached_tokens} tokens of {least} were known")
    if measured.host_tokens < total:
        problems.append(f"{measured.host_tokens} tokens of {total} came from host memory")
    return problems


def differences(alone: Sequence[str], measured: _Measured) -> list[str]:
    """Which answers to restored prompts are others than those without what was restored."""
    return [
        f"round {number}: the answer is {timed.text!r}, and {text!r} alone"
        for number, (text, timed) in enumerate(zip(alone, measured.restored, strict=True))
        if timed.text != text
    ]


async def through_server(server: Server, rounds: Sequence[Round]) -> _Measured:
    """The first tokens that a client sees."""
    measured = _Measured([], [])
    async with client_of(server) as client:

        async def timed(prompt: str) -> _Timed:
            before = server.processor_s
            answer = await complete(client, server.model, Ask(prompt, 1))
            cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
            return _Timed(answer.first_s, server.processor_s - before, cached, answer.text)

        await timed("warm up")
        for one in rounds:
            measured.computed.append(await timed(one.prompt))
            for other in one.others:
                await timed(other)
            measured.restored.append(await timed(one.again))
    measured.host_tokens = int(server.metric('cached_tokens_total{place="host"}'))
    return measured


class InProcess:
    """The engine in this process."""

    def __init__(self, engine: Engine, source: OpenModel) -> None:
        self._engine = engine
        self._source = source

    def timed(self, prompt: str, salt: bytes = b"") -> _Timed:
        """An answer of one token. Nothing is shared between prompts of unequal `salt`."""
        ids = self._source.tokenizer(prompt)["input_ids"]
        request = Request("timed", ids, SamplingParams(max_new_tokens=1), salt=salt)
        began, processor_began = time.perf_counter(), time.process_time()
        self._engine.add(request)
        while self._engine.has_work:
            self._engine.step()
        processor_s = time.process_time() - processor_began
        seconds = time.perf_counter() - began
        return _Timed(seconds, processor_s, request.cached_tokens, request.text)

    def measured(self, rounds: Sequence[Round]) -> _Measured:
        """The steps that give the first tokens."""
        measured = _Measured([], [])
        self.timed("warm up")
        for one in rounds:
            measured.computed.append(self.timed(one.prompt))
            for other in one.others:
                self.timed(other)
            measured.restored.append(self.timed(one.again))
        measured.host_tokens = self._engine.stats.cached_tokens.get("host", 0)
        return measured

    def alone(self, rounds: Sequence[Round]) -> list[str]:
        """The answers to the rounds' last prompts, for each of which all is computed."""
        timed = [self.timed(one.again, f"{n}".encode()) for n, one in enumerate(rounds)]
        assert not any(answer.cached_tokens for answer in timed), "each has a salt of its own"
        return [answer.text for answer in timed]


def measure(
    source: OpenModel, mode: str, rounds: Sequence[Round], options: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    """The server's figures and the engine's, in one mode, and what is wrong."""
    pool_bytes = (options.tokens + 100) * geometry_of(
        source.model.config, source.model.dtype, 16
    ).token_bytes
    memory = ("--kv-memory", str(pool_bytes), "--host-memory", str(_HOST_BYTES))
    with kvtide_server(options.model, *memory, f"--{mode}") as server:
        served = asyncio.run(through_server(server, rounds))
    engine_options = EngineOptions(
        kv_memory_bytes=pool_bytes,
        host_memory_bytes=_HOST_BYTES,
        exact=mode == "exact",
        threads=int(threads()),
    )
    with closing(Engine.build(source, engine_options)) as engine:
        process = InProcess(engine, source)
        found = {"server": served, "engine": process.measured(rounds)}
        alone = process.alone(rounds) if mode == "exact" else None
    problems = []
    for name, measured in found.items():
        wrong = problems_of(source, rounds, measured)
        wrong += [] if alone is None else differences(alone, measured)
        problems += [f"{mode}, {name}: {problem}" for problem in wrong]
    return {name: summary(measured) for name, measured in found.items()}, problems


def start_with_calm_threads() -> None:
    """Starts this program again if its threads would wait in another manner than a server's.

    OpenMP reads both variables when torch is loaded (docs/engine.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
        os.execv(sys.executable, [sys.executable, *sys.argv])


def main() -> int:
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
    rounds = make_rounds(source, options.tokens, options.rounds)
    result["problems"] = []
    for mode in ("exact", "fast"):
        result[mode], problems = measure(source, mode, rounds, options)
        result["problems"] += problems
    tell(result, options.json)
    return bool(result["problems"])


if __name__ == "__main__":
    sys.exit(main())
