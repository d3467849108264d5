"""Engines of vLLM in this process: opened, asked and closed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SMOLLM2 = os.environ.get("KVTIDE_SMOLLM2", "")
"""The folder of the model's weights; `make test-vllm` sets it."""
BLOCK_TOKENS = 128
"""How many tokens of SmolLM2 vLLM keeps in a block on a CPU."""


@contextmanager
def opened(model: str = SMOLLM2, **options: Any) -> Iterator[Any]:
    """An engine (`vllm.LLM`) that exists within the block; the next one may have other options."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    assert model, "set KVTIDE_SMOLLM2 to the folder of the model, as `make test-vllm` does"
    llm = LLM(
        model,
        **{"enforce_eager": True, "max_model_len": 2048, "num_gpu_blocks_override": 40, **options},
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def answers(llm: Any, prompts: Sequence[Sequence[int]], token_count: int = 16) -> list[list[int]]:
    """The tokens that the model finds likeliest after each prompt, which is a list of tokens."""
    from vllm import SamplingParams, TokensPrompt

    wanted = SamplingParams(temperature=0, max_tokens=token_count, ignore_eos=True)
    given = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    return [
        list(found.outputs[0].token_ids) for found in llm.generate(given, wanted, use_tqdm=False)
    ]
