"""A real engine on a CPU with a tiny random model, and what it leaves for the tests."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from select import select
from typing import Any, final

HERE = Path(__file__).parent
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""These fields are equal in all models of the tests."""
MODEL = {
    **SIZES,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
SERVER = {
    "load_format": "dummy",
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.2,
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "context_length": 256,
    "log_level": "info",
}
DECODE_SERVER = {
    **SERVER,
    "disable_radix_cache": True,
    "disaggregation_mode": "decode",
    "disaggregation_transfer_backend": "fake",
}
"""There is no prefill server: requests begin with whatever is in their slots."""

IMPORTED = {
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8",
    "TORCHDYNAMO_DISABLE": "1",
}
"""SGLang reads these while it is imported. They make it retract a request every third step, let
requests in as if they would get only eight more tokens, and compile nothing."""


@final
@dataclass(frozen=True)
class EngineRun:
    """An engine that has ended: each step's result, the plugins' events, its log, its exit code."""

    results: Sequence[Any]
    events: Sequence[Mapping[str, Any]]
    log: str
    exit_code: int

    def events_of(self, event: str, prefix: str = "") -> list[Mapping[str, Any]]:
        """Returns the events of a kind, for requests whose id begins with `prefix`."""
        named = [event_line for event_line in self.events if event_line["event"] == event]
        return [event_line for event_line in named if event_line.get("rid", "").startswith(prefix)]

    def log_lines(self, *words: str) -> list[str]:
        """Returns the log's lines that contain all these words."""
        return [line for line in self.log.splitlines() if all(word in line for word in words)]


def run_engine(
    folder: Path,
    server: Mapping[str, Any],
    steps: Sequence[tuple[str, Any]],
    *,
    model: Path | Mapping[str, Any] = MODEL,
    plugins: Sequence[str] = ("watcher", "meddler"),
    is_spawned: bool = False,
    timeout_s: float = 240,
    **environment: str,
) -> EngineRun:
    """Runs an engine through the steps of engine_run.py, in its own process group.

    `model` is a folder with a model, or a config.json for which SGLang makes random weights. The
    engine's processes are forked from a process that all engines share. If `is_spawned`, they are
    started anew, as SGLang does it, and only then the variables of IMPORTED can be set.
    Raises TimeoutError after `timeout_s`, and has killed the group by then.
    """
    assert is_spawned or not IMPORTED.keys() & environment.keys(), "SGLang has read these by then"
    if not isinstance(model, Path):
        config, model = model, folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
    events, log, results = (folder / name for name in ("events", "log", "results.json"))
    events.touch()
    scenario = folder / "scenario.json"
    scenario.write_text(
        json.dumps({"server": {"model_path": str(model), **server}, "steps": steps})
    )
    wanted = {
        "run": [str(scenario), str(results)],
        "log": str(log),
        "environment": {"KVTIDE_WATCH": str(events), **environment},
        "plugins": [str(HERE / plugin) for plugin in plugins],
        "is_spawned": is_spawned,
    }
    exit_code = _host().run(wanted, timeout_s)
    return EngineRun(
        json.loads(results.read_text()) if results.exists() else [],
        [json.loads(line) for line in events.read_text().splitlines()],
        log.read_text(errors="replace"),
        exit_code,
    )


@final
class _Host:
    """The process of engine_host.py, from which engines are forked."""

    def __init__(self) -> None:
        paths = [str(HERE.parent / "stand_ins"), os.environ.get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": os.pathsep.join(paths), "SGLANG_USE_CPU_ENGINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "engine_host.py")],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **variables, **IMPORTED},
            start_new_session=True,
        )

    def run(self, wanted: Mapping[str, Any], timeout_s: float) -> int:
        """Runs an engine and returns its exit code. A late or interrupted engine is killed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
        group = self._answer(200)  # the answer comes after the process has imported SGLang
        try:
            return self._answer(timeout_s)
        except BaseException:
            os.killpg(group, signal.SIGKILL)
            self._answer(10)
            raise

    def _answer(self, timeout_s: float) -> int:
        output = self._process.stdout
        assert output is not None
        if not select([output], [], [], timeout_s)[0]:
            raise TimeoutError(f"no answer from an engine's host in {timeout_s} s")
        line = output.readline()
        if not line:
            raise RuntimeError("the engines' host has ended; why is in what it wrote to stderr")
        return int(line)

    def close(self) -> None:
        """Closes the process's input, which ends it."""
        self._process.communicate()


@cache
def _host() -> _Host:
    host = _Host()
    atexit.register(host.close)
    return host
