"""`vllm serve` with kvtide, as processes: killed, and started again on the same disk."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any, final

from openai import OpenAI
from vllm_engine import BLOCK_TOKENS, DTYPE, SMOLLM2

from kvtide.plugin.vllm.settings import transfer_config
from kvtide.tier import DiskTier

BLOCKS = 3
PROMPT = Random(11).choices(range(1000, 40_000), k=BLOCKS * BLOCK_TOKENS + 20)
DISK_BYTES = 128 << 20
VLLM = str(Path(sys.executable).with_name("vllm"))
_PATIENCE_S = 240
"""A server starts in half a minute, on a machine that does nothing else."""


@final
class Server:
    """A server's processes, in a group of their own."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self._port = port
        self.process = process

    def ask(self) -> tuple[str, int]:
        """The answer to the prompt, and how many of its tokens weren't computed."""
        client = OpenAI(base_url=f"http://127.0.0.1:{self._port}/v1", api_key="none")
        with client:
            found = client.completions.create(
                model="smollm2", prompt=PROMPT, max_tokens=8, temperature=0
            )
        assert found.usage is not None
        details = found.usage.prompt_tokens_details
        return found.choices[0].text, (details and details.cached_tokens) or 0

    def counts(self) -> dict[str, int]:
        """kvtide's counters, by the middle parts of their names."""
        found = re.findall(r"^vllm:kvtide_(\w+)_total\{.*\} (\S+)$", self.get("/metrics"), re.M)
        return {name: int(float(value)) for name, value in found}

    def get(self, path: str) -> str:
        """What the server says there."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as said:
            return str(said.read(), "utf-8")

    def bench(self, folder: Path) -> dict[str, Any]:
        """What vLLM's own load generator says of four beginnings, two prompts with each."""
        options = {
            "host": "127.0.0.1",
            "port": self._port,
            "model": "smollm2",
            "tokenizer": SMOLLM2,
            "dataset-name": "prefix_repetition",
            "prefix-repetition-num-prefixes": 4,
            "prefix-repetition-prefix-len": BLOCKS * BLOCK_TOKENS,
            "num-prompts": 8,
            "prefix-repetition-suffix-len": 16,
            "prefix-repetition-output-len": 4,
            "max-concurrency": 2,
            "temperature": 0,
            "seed": 1,
            "result-dir": folder,
            "result-filename": "bench.json",
        }
        command = [VLLM, "bench", "serve", "--ignore-eos", "--save-result", *_options(options)]
        subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE_S)
        said: dict[str, Any] = json.loads((folder / "bench.json").read_text())
        return said

    def wait_until_ready(self) -> None:
        """Blocks until it answers."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            assert self.process.poll() is None, "the server ended"
            assert time.monotonic() < until, "the server takes too long"
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.2)

    def kill_all(self) -> None:
        """Kills all of its processes at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _options(values: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


@contextmanager
def served(folder: Path, log: Path) -> Iterator[Server]:
    """A server with kvtide, which has ended afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {
        "host_memory": "128MiB",
        "disk_dir": str(folder),
        "disk_memory": str(DISK_BYTES),
    }
    options = {
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": "smollm2",
        "dtype": DTYPE,
        "max-model-len": 1024,
        "num-gpu-blocks-override": 12,
        "kv-transfer-config": json.dumps(transfer_config(settings)),
    }
    command = [VLLM, "serve", SMOLLM2, "--enforce-eager", "--enable-prompt-tokens-details"]
    command += _options(options)
    # vLLM's processes are in a group of their own, so that all of them can be ended.
    alone = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, env=alone, start_new_session=True
        )
    server = Server(port, process)
    try:
        yield server
    except BaseException:
        sys.stdout.write(log.read_text()[-8000:])
        raise
    finally:
        try:
            server.kill_all()
        except ProcessLookupError:
            process.wait()


def when_free(folder: Path) -> DiskTier:
    """Opens a rank's folder as soon as no process uses it."""
    until = time.monotonic() + 60
    while True:
        try:
            return DiskTier(folder, limit_bytes=DISK_BYTES)
        except Exception:
            assert time.monotonic() < until
            time.sleep(0.1)


class TestServer:
    def test_that_is_killed_and_started_again_finds_its_blocks(self, tmp_path: Path) -> None:
        disk = tmp_path / "kv"
        with served(disk, tmp_path / "first.log") as first:
            first.wait_until_ready()
            text, cached = first.ask()
            assert cached == 0
            while first.counts().get("written_blocks", 0) < BLOCKS:
                first.ask()
            first.kill_all()

        with served(disk, tmp_path / "second.log") as second:
            second.wait_until_ready()
            assert (text, BLOCKS * BLOCK_TOKENS) == second.ask()
            assert second.counts()["fetched_blocks"] == BLOCKS

            # The beginnings have 12 blocks, and the device has 11.
            said = second.bench(tmp_path)
            assert (8, 0) == (said["completed"], said["failed"])
            counts = second.counts()
            assert counts["loaded_blocks"] > BLOCKS
            assert not {"failed_loads", "damaged_blocks", "failed_writes"} & {*counts}

            # Its other processes outlive it, and end when they notice.
            second.process.kill()
            with closing(when_free(disk / "vllm" / "0-of-1-0")) as tier:
                assert tier.stats.snapshots >= BLOCKS
            assert ["0-of-1-0"] == [path.name for path in (disk / "vllm").iterdir()]
