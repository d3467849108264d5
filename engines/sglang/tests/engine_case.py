"""A real engine on a CPU, with a tiny model of random weights, and what is left to look at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

HERE = Path(__file__).parent
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
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
"""Its prefill server is made up: requests begin with whatever lies in their slots."""


@final
@dataclass(frozen=True)
class EngineRun:
    """An engine that has ended: each step's result, what the plugins saw, its log, its exit."""

    results: Sequence[Any]
    events: Sequence[Mapping[str, Any]]
    log: str
    exit_code: int

    def events_of(self, event: str, prefix: str = "") -> list[Mapping[str, Any]]:
        """The events of a kind, for requests whose id begins so."""
        named = [one for one in self.events if one["event"] == event]
        return [one for one in named if one.get("rid", "").startswith(prefix)]

    def log_lines(self, *words: str) -> list[str]:
        """The log's lines with all these words in them."""
        return [line for line in self.log.splitlines() if all(word in line for word in words)]


def run_engine(
    folder: Path,
    server: Mapping[str, Any],
    steps: Sequence[tuple[str, Any]],
    *,
    plugins: Sequence[str] = ("watcher", "meddler"),
    timeout_s: float = 240,
    **environment: str,
) -> EngineRun:
    """Runs an engine through the steps of engine_run.py, in a process group of its own.

    Raises subprocess.TimeoutExpired after `timeout_s`, and has killed that group by then.
    """
    model, events = folder / "model", folder / "events"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    events.touch()
    scenario = {"server": {"model_path": str(model), **server}, "steps": steps}
    (folder / "scenario.json").write_text(json.dumps(scenario))
    paths = [HERE.parent / "stand_ins", *(HERE / one for one in plugins)]
    inherited = os.environ.get("PYTHONPATH", "")
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), inherited]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "KVTIDE_WATCH": str(events),
        **environment,
    }
    command = [sys.executable, "-W", "ignore", "engine_run.py", "scenario.json", "results.json"]
    command[3:] = [str(HERE / command[3]), *(str(folder / name) for name in command[4:])]
    exit_code = _run_group(command, folder / "log", variables, timeout_s)
    results = folder / "results.json"
    return EngineRun(
        json.loads(results.read_text()) if results.exists() else [],
        [json.loads(line) for line in events.read_text().splitlines()],
        (folder / "log").read_text(errors="replace"),
        exit_code,
    )


def _run_group(
    command: Sequence[str], log_path: Path, variables: Mapping[str, str], timeout_s: float
) -> int:
    """The exit code. What takes too long, or is interrupted, ends with all that it started."""
    with (
        log_path.open("wb") as log,
        subprocess.Popen(
            command, stdout=log, stderr=log, env=variables, start_new_session=True
        ) as leader,
    ):
        try:
            return leader.wait(timeout_s)
        except BaseException:
            os.killpg(leader.pid, signal.SIGKILL)
            raise
