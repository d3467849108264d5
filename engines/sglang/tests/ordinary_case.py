"""The requests and the setup of the engines in test_ordinary_server.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, final

from engine_case import SERVER, SIZES, EngineRun, run_engine

TIGHT_SERVER = {
    **SERVER,
    "load_format": "auto",
    "max_total_tokens": 172,
    "random_seed": 1,
    "log_level": "debug",
}
"""The pool has room for about three of the requests below, and SGLang lets in more of them."""

ENVIRONMENT = {
    "KVTIDE_SGLANG": "strict",
    "KVTIDE_SGLANG_COLOCATED": "1",
    "KVTIDE_HOST_MEMORY": "16MiB",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    # For recurrent state: otherwise an answer depends on where a prefill ended.
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "windows": {
        "model_type": "cohere2",
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        # With these SGLang gives an unknown model a pool for the window's layers.
        "is_hybrid_swa": True,
        "hybrid_layer_pattern": [1, 0],
    },
    "latents": {
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "first_k_dense_replace": 2,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
    },
    "states": {
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"],
    },
}
"""Models of two layers, by what is special about their KV."""

FOR_SGLANG: dict[str, dict[str, Any]] = {
    "latents": {
        "moe_layer_freq": 1,
        "rope_parameters": None,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "type": "deepseek_yarn",
            "factor": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 512,
            "rope_theta": 10000.0,
        },
    }
}
"""Fields that SGLang needs in a model's config.json, and transformers doesn't write."""

ADAPTERS = ("left", "right")
"""LoRA adapters of the model "llama"."""


def requests(
    count: int, new_tokens: int, prefix: str = "r", *, prompt_tokens: int = 20, **parameters: Any
) -> list[dict[str, Any]]:
    """Makes requests of slightly different lengths; they are greedy by default."""
    random = Random(5)
    return [
        {
            "rid": f"{prefix}{number}",
            "input_ids": [random.randrange(3, 250) for _ in range(prompt_tokens + number % 3)],
            "sampling_params": {
                "temperature": 0, "max_new_tokens": new_tokens + number, **parameters,
            },
            "return_logprob": True,
        }
        for number in range(count)
    ]  # fmt: skip


def make_model(folder: Path, name: str) -> None:
    """Makes a model of MODELS with random weights, which are always the same."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    whole = AutoConfig.for_model(**{**SIZES, "initializer_range": 0.15, **MODELS[name]})
    AutoModelForCausalLM.from_config(whole).float().eval().save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **FOR_SGLANG.get(name, {})}))


def make_adapter(folder: Path, seed: int) -> None:
    """Makes a random LoRA adapter for "llama" as peft saves it, large enough to change answers."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    wide = SIZES["hidden_size"]
    narrow = wide // SIZES["num_attention_heads"] * SIZES["num_key_value_heads"]
    widths, rank = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow, "o_proj": wide}, 4
    weights = {}
    for layer in range(SIZES["num_hidden_layers"]):
        for module, width in widths.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for half, shape in (("lora_A", (rank, wide)), ("lora_B", (width, rank))):
                weights[f"{name}.{half}.weight"] = 0.3 * torch.randn(shape, generator=random)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(widths)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def adapted(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gives the requests in turn no adapter, the left one, and the right one."""
    names = (None, *ADAPTERS)
    return [{**request, "lora_path": names[int(request["rid"][-1]) % 3]} for request in requests]


@final
@dataclass(frozen=True)
class Served:
    """A server that has ended, and its answers by the names of the steps."""

    run: EngineRun
    answers: Mapping[str, Any]


def run_ordinary(
    model: Path,
    folder: Path,
    steps: Mapping[str, tuple[str, Any]],
    server: Mapping[str, Any],
    more_plugins: Sequence[str] = (),
    **environment: str,
) -> Served:
    """Runs an ordinary server with kvtide and the watcher through named steps of engine_run.py."""
    run = run_engine(
        folder,
        {**TIGHT_SERVER, **server},
        list(steps.values()),
        model=model,
        plugins=["watcher", "on_cpu", *more_plugins],
        is_spawned=False,
        timeout_s=240,
        **{**ENVIRONMENT, **environment},
    )
    assert run.exit_code == 0, run.log[-8000:]
    return Served(run, dict(zip(steps, run.results, strict=True)))
