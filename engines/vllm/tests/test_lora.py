"""KV of a LoRA adapter, in fp8: found by its weights, and not once nobody can tell these."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from small_models import PLAIN, folder_of
from vllm_engine import BLOCK_TOKENS, Engine, opened_with_kvtide
from watched_moves import WatchedMoves

PROMPT = Random(11).choices(range(3, 512), k=2 * BLOCK_TOKENS + 30)
RANK, WIDTH = 8, 64
# vLLM keeps fp8 only on CPUs that have AVX-512.
HAS_FP8 = torch.backends.cpu.get_cpu_capability() == "AVX512"


def write_adapter(folder: Path, seed: int) -> None:
    """Writes an adapter of the plain model in the form of PEFT."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 64, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    make = torch.Generator().manual_seed(seed)
    layer = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    weights = {}
    for number in range(2):
        for part, shape in (("A", (RANK, WIDTH)), ("B", (128, RANK))):
            weights[layer.format(number, part)] = torch.randn(shape, generator=make)
    save_file(weights, folder / "adapter_model.safetensors")


def cached(engine: Engine, adapter: Any = None) -> int:
    """How many tokens of the prompt weren't computed, when vLLM itself had forgotten all."""
    from vllm import SamplingParams, TokensPrompt

    engine.forget_local()
    (found,) = engine.llm.generate(
        [TokensPrompt(prompt_token_ids=PROMPT)],
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
        lora_request=adapter,
        use_tqdm=False,
    )
    return int(found.num_cached_tokens or 0)


class TestAdapters:
    def test_are_told_apart_by_their_weights(self, tmp_path: Path) -> None:
        from vllm.lora.request import LoRARequest

        for number, name in enumerate(("first", "second")):
            write_adapter(tmp_path / name, number)
        first, second = (
            LoRARequest(name, number, str(tmp_path / name))
            for number, name in ((1, "first"), (2, "second"))
        )
        with opened_with_kvtide(
            folder_of(PLAIN, tmp_path),
            settings={"host_memory": "64MiB"},
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_lora=True,
            max_lora_rank=RANK,
            max_loras=2,
            kv_cache_dtype="fp8" if HAS_FP8 else "auto",
        ) as engine:
            moves = WatchedMoves(engine.store)
            assert [0, 0, 0] == [cached(engine, adapter) for adapter in (first, second, None)]
            everything = 2 * BLOCK_TOKENS
            assert [everything] * 3 == [cached(engine, each) for each in (first, second, None)]

            assert 3 * 2 == moves.compared

            write_adapter(tmp_path / "first", 7)
            assert [0, 0] == [cached(engine, first) for _ in range(2)]
            assert everything == cached(engine, second)
