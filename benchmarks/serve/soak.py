"""Does a server keep its memory, and its answers, through twenty minutes of pressure?

64 streams at once over a pool for 6 and a disk below a small host memory; one in five is cancelled
at a random moment. Each answer that ends must be the one that its request got alone, at the start.
Every few seconds the server's memory, files and threads are noted: their medians in the second
quarter of the time and in the last one must be the same, but for a few MiB. Exits with 1 if not,
or if an answer fails or differs, something is held at the end, or the disk was never used.

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
from typing import Any

from load import drive_alone, make_load, problems_of
from servers import Answer, Ask, Server, client_of, complete, kvtide_server, tell

from kvtide.machine import machine_facts

STREAMS, ASKS, ANSWERS = 64, 120, 6
GROWTH_BYTES = 24 << 20
"""How much more memory the last quarter may take: the allocator's, not the server's."""
SAMPLE_S = 5.0
DISK = ("tier_down_bytes_total", "tier_up_bytes_total", "tier_hits_total", "disk_bytes")
"""What the disk took and gave back, and what is on it at the end."""
TOKEN_BYTES = 1 << 9
"""What a token of the small random model takes in bfloat16."""


class Soak:
    """The streams, and what was seen."""

    def __init__(self, server: Server, asks: list[Ask], expected: list[Answer], seed: int) -> None:
        self.problems: list[str] = []
        self.finished = self.cancelled = 0
        self.samples: list[tuple[float, int, int]] = []
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
        began = time.monotonic()
        while time.monotonic() < until and self._server.process.poll() is None:
            now = time.monotonic() - began
            self.samples.append((now, self._server.rss_bytes, self._server.open_files))
            await asyncio.sleep(SAMPLE_S)

    def quarters(self, field: int) -> tuple[float, float]:
        """The medians of what was noted, in the second quarter of the time and in the last."""
        quarter = max(1, len(self.samples) // 4)
        parts = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        second, last = (statistics.median(sample[field] for sample in part) for part in parts)
        return second, last


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
    rss, files = soak.quarters(1), soak.quarters(2)
    if rss[1] > rss[0] + GROWTH_BYTES:
        problems.append(f"memory grew from {rss[0] / 2**20:.0f} to {rss[1] / 2**20:.0f} MiB")
    problems += [f"{name} is 0" for name in DISK[:3] if not used[name]]
    names = ("retractions", "resumes", "recomputed_tokens", "offloaded_bytes")
    result = {
        "machine": machine_facts(),
        "minutes": options.minutes,
        "finished_answers": soak.finished,
        "cancelled": soak.cancelled,
        **{name: state[name] for name in names},
        **used,
        "rss_mib_second_and_last_quarter": [round(part / 2**20, 1) for part in rss],
        "open_files_second_and_last_quarter": files,
        "problems": problems,
    }
    tell(result, options.json)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
