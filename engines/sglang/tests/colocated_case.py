"""What the engines of test_colocated_server are asked, and how they are set up."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from engine_case import SERVER, EngineRun, run_engine

TIGHT_SERVER = {
    **SERVER,
    "load_format": "auto",
    "max_total_tokens": 172,
    "random_seed": 1,
    "log_level": "debug",
}
"""Its pool has room for about three of the requests below, and SGLang lets in more than that."""

ENVIRONMENT = {
    "KVTIDE_SGLANG": "strict",
    "KVTIDE_SGLANG_COLOCATED": "1",
    "KVTIDE_HOST_MEMORY": "16MiB",
    "SGLANG_TEST_RETRACT": "1",  # one request every third step, whether it is needed or not
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}


def requests(
    count: int, new_tokens: int, prefix: str = "r", *, prompt_tokens: int = 20, **parameters: Any
) -> list[dict[str, Any]]:
    """Requests of slightly different lengths, greedy if nothing else is asked for."""
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


def make_model(folder: Path) -> None:
    """A Llama of two layers with random weights, always the same ones."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=256,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).float().eval().save_pretrained(folder)


def run_colocated(
    model: Path,
    folder: Path,
    steps: list[tuple[str, Any]],
    server: dict[str, Any],
    **environment: str,
) -> EngineRun:
    """Runs an ordinary server with kvtide, watched, through the steps of engine_run.py."""
    arguments = {**TIGHT_SERVER, "model_path": str(model), **server}
    variables = {**ENVIRONMENT, **environment}
    run = run_engine(folder, arguments, steps, plugins=["watcher"], timeout_s=500, **variables)
    assert run.exit_code == 0, run.log[-8000:]
    return run
