"""Real engines on a CPU with SGLang's HiCache and a storage, and what they are asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from engine_case import SERVER, EngineRun, run_engine
from hicache_steps import PAGE

PAGES = 7
TOKENS = PAGES * PAGE
"""SGLang asks a storage for whole pages, and computes at least the last token."""

HICACHE = {
    **SERVER,
    "load_format": "auto",
    "random_seed": 1,
    "page_size": PAGE,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_write_policy": "write_through",
    "hicache_mem_layout": "layer_first",
    "hicache_io_backend": "direct",
    "hicache_storage_prefetch_policy": "wait_complete",
    "served_model_name": "served",
}
DYNAMIC = {
    "hicache_storage_backend": "dynamic",
    "backend_name": "kvtide",
    "module_path": "kvtide.plugin.sglang.hicache",
    "class_name": "KvtideStorage",
    "interface_v1": 1,
}
PLUGINS = ("on_cpu", "hicache_on_cpu", "hicache_faults")


def prompts(count: int, new_tokens: int = 6, seed: int = 5) -> list[dict[str, Any]]:
    """Makes requests whose prompts have `PAGES` pages that a storage is asked for."""
    random = Random(seed)
    return [
        {
            "rid": f"{seed}-{number}",
            "input_ids": [random.randrange(3, 250) for _ in range(TOKENS + 8)],
            "sampling_params": {
                "temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True,
            },
        }
        for number in range(count)
    ]  # fmt: skip


def step(function: str, **arguments: Any) -> tuple[str, Any]:
    """Returns a step that calls a function of hicache_steps."""
    return "call", {"function": f"hicache_steps:{function}", **arguments}


def run_hicache(
    folder: Path,
    model: Path,
    kv: Path,
    steps: Sequence[tuple[str, Any]],
    *,
    server: Mapping[str, Any] | None = None,
    storage: Mapping[str, Any] | None = None,
) -> EngineRun:
    """Runs a server with a storage in the folder `kv` through steps, in a new folder.

    `storage` are values of the storage's configuration beside or in place of kvtide's; None takes
    a value out.
    """
    folder.mkdir()
    ours = {**DYNAMIC, "disk_dir": str(kv), "disk_memory": "64MiB", "prefetch_threshold": PAGE}
    given = {**ours, **(storage or {})}
    extra = {name: value for name, value in given.items() if value is not None}
    backend = extra.pop("hicache_storage_backend")
    return run_engine(
        folder,
        {
            **HICACHE,
            "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config": json.dumps(extra),
            **(server or {}),
        },
        steps,
        model=model,
        plugins=PLUGINS,
        KVTIDE_FAULT=str(folder / "fault"),
        # Otherwise a convolution's answer depends on where a prefill ended.
        SGLANG_MAMBA_CONV_DTYPE="float32",
    )


def other_weights(model: Path, folder: Path) -> Path:
    """Makes a model like another one, with other numbers in files of the same names and sizes."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    random = torch.Generator().manual_seed(9)
    changed = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=random)
        for name, tensor in weights.items()
    }
    save_file(changed, path, metadata={"format": "pt"})
    return folder


def outputs(answers: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Returns the answers' tokens."""
    return [answer["output_ids"] for answer in answers]


def cached(answers: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns for each answer how many pages of its prompt weren't computed."""
    return [answer["meta_info"]["cached_tokens"] // PAGE for answer in answers]
