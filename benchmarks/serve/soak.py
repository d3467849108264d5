"""Does a server keep its memory, and its answers, through twenty minutes of pressure?

64 streams at once over a pool for 6 and a disk below a small host memory; one in five is cancelled
at a random moment. Each answer that ends must be the one that its request got alone, at the start.
Every few seconds the server's memory, open files and threads are noted: their medians in the last
quarter of the time may be little more than those in the second one. Exits with 1 if they are, or
if an answer fails or differs, something is held at the end, or the disk was never used.

  python benchmarks/serve/soak.py [--minutes 20] [--seed 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from load import drive_alone, make_load, problems_of
from servers import Answer, Ask, Server, client_of, complete, kvtide_server, tell

from kvtide.machine import machine_facts

STREAMS, ASKS, ANSWERS = 64, 120, 6
SAMPLE_S = 5.0
DISK = ("tier_down_bytes_total", "tier_up_bytes_total", "tier_hits_total", "disk_bytes")
"""What the disk took and gave back, and what is on it at the end."""
TOKEN_BYTES = 1 << 9
"""What a token of the small random model takes in bfloat16."""


class Held(NamedTuple):
    """What the server's process held at a moment, or may hold more in the last quarter."""

    memory_mib: float
    open_files: float
    threads: float


GROWTH = Held(memory_mib=24, open_files=16, threads=16)
"""The allocator keeps some memory, connections close late, and FastAPI's threads come and go."""


class Soak:
    """The streams, and what was seen."""

    def __init__(self, server: Server, asks: list[Ask], expected: list[Answer], seed: int) -> None:
        self.problems: list[str] = []
        self.finished = self.cancelled = 0
        self.samples: list[Held] = []
        self._server = server
        self._asks = asks
        self._expected = expected
        self._dice = random.Random(seed)

    async def run(self, seconds: float) -> None:
        """Streams until the time is over."""
        until = time.monotonic() + seconds
        sampling = asyncio.create_task(self._sample(until))
        async with client_of(self._server) as client:
            await asyncio.gather(*(self._stream(client, until) for _ in range(STREAMS)))
        await sampling

    async def _stream(self, client: Any, until: float) -> None:
        while time.monotonic() < until and not self.problems:
            number = self._dice.randrange(len(self._asks))
            ask = self._asks[number]
            if self._dice.random() < 0.2:
                ask = replace(ask, cancel_after=self._dice.randint(1, ask.max_tokens))
            try:
                answer = await complete(client, self._server.model, ask)
            except Exception as error:
                self.problems.append(f"a stream failed: {type(error).__name__}: {error}")
                return
            if answer.finish_reason is None:
                self.cancelled += 1
            elif answer.text != self._expected[number].text:
                self.problems.append(f"answer {number} is another one than alone: {answer.text!r}")
            else:
                self.finished += 1

    async def _sample(self, until: float) -> None:
        server = self._server
        while time.monotonic() < until and server.process.poll() is None:
            held = Held(server.rss_bytes / 2**20, server.open_files, server.thread_count)
            self.samples.append(held)
            await asyncio.sleep(SAMPLE_S)

    def quarters(self) -> tuple[Held, Held]:
        """The medians of what was noted, in the second quarter of the time and in the last."""
        quarter = max(1, len(self.samples) // 4)
        parts = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        second, last = (Held(*map(statistics.median, zip(*part, strict=True))) for part in parts)
        return second, last


def growth_of(second: Held, last: Held) -> list[str]:
    """What grew by more than it may from the second quarter of the time to the last."""
    return [
        f"{name} grew from {before:.0f} to {now:.0f}; it may by {most:g}"
        for name, before, now, most in zip(Held._fields, second, last, GROWTH, strict=True)
        if now > before + most
    ]


def main() -> int:
    """Reads the options, streams, and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    whole = [replace(ask, cancel_after=None) for ask in make_load(ASKS, options.seed, 64)]
    longest = max(len(ask.prompt) + ask.max_tokens for ask in whole)
    with tempfile.TemporaryDirectory() as folder:
        memory = ["--kv-memory", str(ANSWERS * longest * TOKEN_BYTES), "--host-memory", "2MiB"]
        memory += ["--disk-dir", f"{folder}/kv", "--disk-memory", "32MiB"]
        with kvtide_server("tiny-random", *memory) as server:
            expected = asyncio.run(drive_alone(server, whole))
            soak = Soak(server, whole, expected, options.seed)
            asyncio.run(soak.run(60 * options.minutes))
            problems = soak.problems + problems_of(server, whole, expected)
            state = server.state()
            used = {name: int(server.metric(name)) for name in DISK}
    second, last = soak.quarters()
    problems += growth_of(second, last)
    problems += [f"{name} is 0" for name in DISK[:3] if not used[name]]
    names = ("retractions", "resumes", "recomputed_tokens", "offloaded_bytes")
    result = {
        "machine": machine_facts(),
        "minutes": options.minutes,
        "finished_answers": soak.finished,
        "cancelled": soak.cancelled,
        **{name: state[name] for name in names},
        **used,
        **{
            f"{name}_second_and_last_quarter": [round(before, 1), round(now, 1)]
            for name, before, now in zip(Held._fields, second, last, strict=True)
        },
        "problems": problems,
    }
    tell(result, options.json)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
