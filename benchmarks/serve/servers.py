"""Servers as processes of their own, and clients that speak OpenAI's protocol to them.

Everything stays on the loopback interface, and each process that was started is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2 as httpx

from kvtide.server.events import merged

START_S = 300.0
ANSWER_S = 600.0
WORDS = (
    *("river", "stone", "seven", "light", "music", "winter", "paper", "garden", "engine", "north"),
    *("silver", "market", "bread", "window", "forest", "letter", "number", "morning", "island"),
)


@dataclass
class Server:
    """A server that listens at `url`; `state` asks a kvtide server alone."""

    process: subprocess.Popen[bytes]
    url: str
    model: str
    log: Path

    def state(self) -> dict[str, Any]:
        """What the page of a kvtide server shows at this moment: its counts, and `pages`.

        Takes a second: it is what has come when nothing more comes.
        """
        state: dict[str, Any] = {}
        with (
            contextlib.suppress(TimeoutError),
            urllib.request.urlopen(f"{self.url}/events", timeout=1) as events,
        ):
            for line in events:
                if line.startswith(b"data: "):
                    state = merged(state, json.loads(line.removeprefix(b"data: ")))
        return state

    def metric(self, name: str) -> float:
        """The sum of a metric of a kvtide server over its labels, if `name` has none.

        `name` is without `kvtide:`.
        """
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        found = [line for line in lines if re.match(rf"kvtide:{re.escape(name)}[ {{]", line)]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    @property
    def rss_bytes(self) -> int:
        """The process's memory that is resident."""
        return self._status("VmRSS") << 10

    @property
    def thread_count(self) -> int:
        """How many threads the process has."""
        return self._status("Threads")

    def _status(self, name: str) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        found = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
        assert found is not None, "each process has some"
        return int(found[1])

    @property
    def processor_s(self) -> float:
        """Seconds that the process has computed, in all its threads."""
        # The clock that clock_getcpuclockid(3) names. /proc has hundredths of a second.
        return time.clock_gettime(~self.process.pid << 3 | 2)

    @property
    def open_files(self) -> int:
        """How many files and connections the process has open."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


@contextlib.contextmanager
def kvtide_server(model: str, *options: str) -> Iterator[Server]:
    """Runs `kvtide serve MODEL` on a free port within this context."""
    command = ["-m", "kvtide", "serve", model, "--port", "0", "--threads", threads(), *options]
    with _process(command) as (process, log):
        line = _wait_for(process, log, r"is served at (http://\S+)/v1")
        yield Server(process, line, Path(model).name, log)


@contextlib.contextmanager
def transformers_server(folder: str, *options: str) -> Iterator[Server]:
    """Runs `transformers serve` with continuous batching on a free port within this context."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = "from transformers.cli.transformers import main; main()"
    command = ["-c", program, "serve", folder, "--continuous-batching", "--device", "cpu"]
    command += ["--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port), *options]
    with _process(command) as (process, log):
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + START_S
        while not _is_well(url):
            _require_alive(process, log, until)
        yield Server(process, url, folder, log)


@contextlib.contextmanager
def _process(words: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads(),
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *words], stdout=file, stderr=file, env=environment
            )
        try:
            yield process, log
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def threads() -> str:
    """How many threads a server and an engine compute with: BENCH_THREADS, or all processors."""
    return os.environ.get("BENCH_THREADS", str(os.cpu_count()))


def _wait_for(process: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
    until = time.monotonic() + START_S
    while True:
        found = re.search(pattern, log.read_text(errors="replace"))
        if found is not None:
            return found[1]
        _require_alive(process, log, until)


def _require_alive(process: subprocess.Popen[bytes], log: Path, until: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.2)
        raise SystemExit(f"a server ended at its start: {log.read_text(errors='replace')}")
    if time.monotonic() > until:
        raise SystemExit(f"a server isn't ready after {START_S:g} s: {log.read_text()}")


def _is_well(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


# ---- clients -----------------------------------------------------------------------------


@dataclass
class Answer:
    """What a stream gave, and when. A stream that its client ended has no `finish_reason`."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    first_s: float = 0.0
    """Seconds until the first text."""
    seconds: float = 0.0
    chunk_count: int = 0


@dataclass(frozen=True)
class Ask:
    """A completion that is asked for; its client ends it after `cancel_after` chunks, if any."""

    prompt: str
    max_tokens: int
    cancel_after: int | None = None
    wait_s: float = 0.0
    more: tuple[str, ...] = ()
    """What the client says after each answer; `converse` sends all that was said before with it."""


def client_of(server: Server) -> httpx.AsyncClient:
    """A client with as many connections as anybody wants."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=server.url, limits=limits, timeout=ANSWER_S)


async def complete(client: httpx.AsyncClient, model: str, ask: Ask) -> Answer:
    """Streams a greedy completion."""
    body = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    await asyncio.sleep(ask.wait_s)
    return await stream(client, "/v1/completions", body, cancel_after=ask.cancel_after)


async def converse(client: httpx.AsyncClient, model: str, ask: Ask) -> Answer:
    """Streams completions that go on from each other; `cancel_after` ends the last one.

    The answer has the texts and the tokens of all, and the times of the last one.
    """
    text, tokens, prompt = "", 0, ask.prompt
    for number, words in enumerate((*ask.more, "")):
        is_last = number == len(ask.more)
        cancel_after = ask.cancel_after if is_last else None
        answer = await complete(
            client, model, replace(ask, prompt=prompt, cancel_after=cancel_after)
        )
        text += answer.text
        tokens += answer.usage.get("completion_tokens", 0)
        prompt += f"{answer.text} {words}"
    return replace(answer, text=text, usage={"completion_tokens": tokens})


async def stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], *, cancel_after: int | None = None
) -> Answer:
    """Reads a stream of either kind to its end, or up to `cancel_after` chunks."""
    answer, began = Answer(), time.perf_counter()
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise RuntimeError(f"status {response.status_code}: {text}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            _take(answer, json.loads(line[6:]), time.perf_counter() - began)
            if cancel_after is not None and answer.chunk_count >= cancel_after:
                answer.finish_reason = None
                return answer
    answer.seconds = time.perf_counter() - began
    return answer


def _take(answer: Answer, chunk: dict[str, Any], now_s: float) -> None:
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk.get("choices", ()):
        part = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        if part and not answer.text:
            answer.first_s = now_s
        answer.text += part
        answer.chunk_count += bool(part)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def prompt_of(dice: random.Random, word_count: int) -> str:
    """A prompt of random words; its first words are hardly ever those of another."""
    return " ".join(dice.choice(WORDS) for _ in range(word_count))


def tell(result: dict[str, Any], path: Path | None) -> None:
    """Prints a result as JSON, and writes it to a file if one is named."""
    text = json.dumps(result, indent=2)
    print(text)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")
