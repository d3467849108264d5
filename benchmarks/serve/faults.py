"""Does a server go on whatever its clients do?

While a few clients talk as they should, and compare each answer with the one it was before, others
read nothing of megabytes, stop in the middle of a request or of an answer, come a thousand at once,
and send what is neither HTTP nor JSON nor what the API takes. The server must end each connection
that doesn't move any more, which takes it a minute, and answer each of the thousand. Exits with 1
if it doesn't, if it crashed, answered with 500, held a file or a page afterwards, gave those few
another answer, or none.

  python benchmarks/serve/faults.py [--only NAME] [--fuzz 100000] [--seed 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
from fuzz import Fuzzer
from load import held_pages
from servers import Ask, Server, client_of, complete, kvtide_server, tell

from kvtide.machine import machine_facts

CROWD, FUZZERS, SLOW_READERS = 1000, 32, 2
PATIENCE_S = 100.0
"""How long a connection may stand still: the server's minute, and some more."""
SILENCE_S = 0.3
"""How long an answer may take before the server is taken to wait for more."""
MEMORY = ("--kv-memory", "3MiB", "--host-memory", "16MiB", "--dtype", "float32")
"""The pool has room for about 400 tokens of the small random model."""
Fault = Callable[[Server, random.Random], Coroutine[Any, Any, Counter[str]]]
GOOD = {
    "slow readers": ("ended",),
    "half-open": ("ended", "went away"),
    "a thousand at once": ("200", "429"),
    "fuzz": (
        "200",
        "400",
        "2xx stream",
        "403",
        "404",
        "405",
        "413",
        "415",
        "429",
        "closed",
        "silent",
    ),
}
"""What may become of each connection or request of a fault; of the first kind there must be one."""


def address_of(server: Server) -> tuple[str, int]:
    """The server's host and port."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return host, int(port)


def post(body: bytes, *, path: str = "/v1/completions") -> bytes:
    """A request with that body."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def body_of(**more: object) -> bytes:
    """The body of a stream of 64 tokens."""
    fields = {"prompt": "ab" * 8, "max_tokens": 64, "stream": True, "temperature": 0, **more}
    return json.dumps(fields).encode()


async def slow_readers(server: Server, _: random.Random) -> Counter[str]:
    """Ask for 8 MB each, and read nothing: the server gives up before it sent all.

    The system takes about 3 MB of that, whatever the client reads.
    """
    body = body_of(max_tokens=400, n=64, logprobs=20, temperature=1, seed=3)

    async def come() -> str:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        await asyncio.get_running_loop().sock_connect(slow, address_of(server))
        reader, writer = await asyncio.open_connection(sock=slow, limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined] # it is a socket's
        writer.write(post(body))
        await asyncio.sleep(PATIENCE_S)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        end = await _read_to_end(reader)
        writer.close()
        if end is None:
            return "held"
        return "answered whole" if b"[DONE]" in end else "ended"

    return Counter(await asyncio.gather(*(come() for _number in range(SLOW_READERS))))


async def half_open(server: Server, dice: random.Random) -> Counter[str]:
    """Stop in the middle of a head or a body, and wait; or go away, also within an answer."""
    whole = post(body_of())

    async def come(number: int) -> str:
        reader, writer = await asyncio.open_connection(*address_of(server))
        if number % 3 == 0:
            writer.write(whole)
            with suppress(OSError):
                await asyncio.wait_for(reader.read(64), 60)
        else:
            writer.write(whole[: dice.randrange(1, len(whole))])
        if number % 2:
            plug: socket.socket = writer.get_extra_info("socket")
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return "went away"
        end = await _read_to_end(reader)
        writer.close()
        return "held" if end is None else "ended"

    return Counter(await asyncio.gather(*map(come, range(60))))


async def _read_to_end(reader: asyncio.StreamReader) -> bytes | None:
    """Reads until the server ends the connection, and gives the last bytes; None if it doesn't."""
    end = b""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while part := await reader.read(1 << 16):
                end = (end + part)[-64:]
    except TimeoutError:
        return None
    except OSError:
        pass  # a reset is an end, too
    return end


async def crowd(server: Server, _: random.Random) -> Counter[str]:
    """A thousand connections at once, each with a request: what each is answered."""

    async def come() -> str:
        try:
            reader, writer = await asyncio.open_connection(*address_of(server))
            writer.write(post(body_of(max_tokens=2)))
            line = await asyncio.wait_for(reader.readline(), 300)
            rest = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 300)
            writer.close()
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
            return type(error).__name__
        status = line.split()[1].decode() if line else "nothing"
        if status == "429" and b"retry-after" not in rest.lower():
            return "429 without Retry-After"
        return status

    return Counter(await asyncio.gather(*(come() for _number in range(CROWD))))


def fuzz(count: int) -> Fault:
    """A fault of that many malformed requests, on connections that are used while they last."""

    async def run(server: Server, dice: random.Random) -> Counter[str]:
        fuzzer = Fuzzer(dice.randrange(1 << 30))
        found: Counter[str] = Counter()
        left = iter(range(count))

        async def send() -> None:
            reader = writer = None
            for _ in left:
                if writer is None or reader is None or writer.is_closing():
                    reader, writer = await asyncio.open_connection(*address_of(server))
                answer = await exchange(reader, writer, fuzzer.request())
                found[answer] += 1
                if answer in ("closed", "silent"):
                    writer.close()
            if writer is not None:
                writer.close()

        await asyncio.gather(*(send() for _ in range(FUZZERS)))
        return found

    return run


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> str:
    """Sends bytes, and says how they are answered."""
    try:
        writer.write(request)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SILENCE_S)
        status = head.split()[1].decode()
        length = re.search(rb"content-length: *(\d+)", head.lower())
        if length is None or request.startswith(b"HEAD"):
            writer.close()
            return "2xx stream" if status.startswith("2") else status
        body = await asyncio.wait_for(reader.readexactly(int(length[1])), 60)
        is_json = b"application/json" in head.lower()
        if is_json and status.startswith(("4", "5")) and "error" not in json.loads(body):
            return f"{status} without an error"
        if b"connection: close" in head.lower():
            writer.close()
        return status
    except asyncio.TimeoutError:
        return "silent"
    except (OSError, asyncio.IncompleteReadError):
        return "closed"


class Others:
    """Clients who talk as they should all the time; their answers must stay the same."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._asks = [Ask(chr(97 + number) * 30, 24) for number in range(4)]
        self.answered = self.refused = 0
        self.wrong: list[str] = []

    async def talk(self, over: asyncio.Event) -> None:
        """Talks until it is over."""
        async with client_of(self._server) as client:
            first = [await complete(client, self._server.model, ask) for ask in self._asks]
            while not over.is_set():
                for ask, expected in zip(self._asks, first, strict=True):
                    try:
                        answer = await complete(client, self._server.model, ask)
                    except (RuntimeError, httpx.HTTPError) as error:
                        self.refused += "status 429" in str(error)
                        if "status 429" not in str(error):
                            self.wrong.append(str(error))
                        await asyncio.sleep(0.1)
                        continue
                    self.answered += 1
                    if answer.text != expected.text:
                        self.wrong.append(f"{answer.text!r} instead of {expected.text!r}")


async def run(server: Server, faults: dict[str, Fault], seed: int) -> dict[str, Any]:
    """Tries each fault while others talk, and looks at the server afterwards."""
    others, over, result = Others(server), asyncio.Event(), {}
    talking = asyncio.create_task(others.talk(over))
    await asyncio.sleep(2)
    for name, fault in faults.items():
        before, began = others.answered, time.perf_counter()
        counts = await fault(server, random.Random(seed))
        until = time.monotonic() + PATIENCE_S
        while others.answered < before + 4 and time.monotonic() < until:
            await asyncio.sleep(0.1)
        result[name] = {
            **dict(sorted(counts.items())),
            "seconds": round(time.perf_counter() - began, 1),
            "others_answered": others.answered - before,
        }
    over.set()
    await talking
    return result | {"others_wrong": others.wrong, "others_refused": others.refused}


def problems_of(server: Server, result: dict[str, Any], files_before: int) -> list[str]:
    """What is wrong with a server after all that."""
    found = [f"an answer of others: {wrong}" for wrong in result["others_wrong"]]
    if server.process.poll() is not None:
        return [*found, f"it ended with {server.process.returncode}"]
    for name in result.keys() & GOOD.keys():
        counts, good = result[name], GOOD[name]
        bad = counts.keys() - {*good, "seconds", "others_answered"}
        found += [f"{name}: {counts[key]} times {key}" for key in sorted(bad)]
        found += [] if counts.get(good[0]) else [f"{name}: not once {good[0]}"]
        found += [] if counts["others_answered"] else [f"{name}: others had no answer"]
    until = time.monotonic() + 90  # the patience of the server's protocol, and some more
    while server.open_files > files_before + 4 and time.monotonic() < until:
        time.sleep(1)
    state = server.state()
    held = held_pages(state)
    left = state["running_count"] + state["retracted_count"] + state["waiting"]
    if held or left:
        found.append(f"{held} pages and {left} requests are held")
    if server.open_files > files_before + 4:
        found.append(f"{server.open_files} files are open, {files_before} were")
    log = server.log.read_text(errors="replace")
    found += [f"its log has {word!r}" for word in ("Traceback", "mistake") if word in log]
    return found


def main() -> int:
    """Reads the options, tries, and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fuzz", type=int, default=100_000)
    parser.add_argument("--only", choices=[*GOOD], help="one of the faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    faults: dict[str, Fault] = {
        "slow readers": slow_readers,
        "half-open": half_open,
        "a thousand at once": crowd,
        "fuzz": fuzz(options.fuzz),
    }
    faults = {name: faults[name] for name in GOOD if options.only in (None, name)}
    with kvtide_server("tiny-random", *MEMORY) as server:
        asyncio.run(others_once(server))
        files, rss = server.open_files, server.rss_bytes
        result = asyncio.run(run(server, faults, options.seed))
        result["problems"] = problems_of(server, result, files)
        result["rss_mib"] = [rss >> 20, server.rss_bytes >> 20]
        if result["problems"]:
            print(server.log.read_text(errors="replace")[-4000:], file=sys.stderr)
    result = {"machine": machine_facts(), "seed": options.seed, **result}
    tell(result, options.json)
    return bool(result["problems"])


async def others_once(server: Server) -> None:
    """Sends one request, so that what is made once is there."""
    async with client_of(server) as client:
        await complete(client, server.model, Ask("warm up", 2))


if __name__ == "__main__":
    sys.exit(main())
