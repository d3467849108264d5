"""KV of a LoRA adapter: found by its weights, and not once nobody can tell these."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_models import HAS_FP8, PLAIN, folder_of
from vllm_engine import BLOCK_TOKENS, Engine, opened_with_kvtide
from watched_moves import WatchedMoves

PROMPT = Random(11).choices(range(3, 512), k=2 * BLOCK_TOKENS + 30)
RANK, WIDTH = 8, 64


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


def announce(engine: Engine, adapter: Any) -> None:
    """Gives the engine a request with an adapter, which vLLM reads when the request runs."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    given: Any = {"prompt_token_ids": PROMPT}
    engine.llm.llm_engine.add_request("-1", given, params, lora_request=adapter)


@pytest.mark.parametrize("dtype", ["fp8" if HAS_FP8 else "auto"])
class TestAdapters:
    def test_are_told_apart_by_their_weights(self, dtype: str, tmp_path: Path) -> None:
        from vllm.lora.request import LoRARequest

        for number, name in enumerate(("first", "second", "third")):
            write_adapter(tmp_path / name, number)
        first, second, third = (
            LoRARequest(name, number, str(tmp_path / name))
            for number, name in ((1, "first"), (2, "second"), (3, "third"))
        )
        with opened_with_kvtide(
            folder_of(PLAIN, tmp_path),
            settings={"host_memory": "64MiB"},
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_lora=True,
            max_lora_rank=RANK,
            max_loras=2,
            kv_cache_dtype=dtype,
        ) as engine:
            moves = WatchedMoves(engine.store)
            assert [0, 0, 0] == [cached(engine, adapter) for adapter in (first, second, None)]
            everything = 2 * BLOCK_TOKENS
            assert [everything] * 3 == [cached(engine, each) for each in (first, second, None)]

            assert 3 * 2 == moves.compared

            write_adapter(tmp_path / "first", 7)
            assert [0, 0] == [cached(engine, first) for _ in range(2)]
            assert everything == cached(engine, second)

            before = engine.counts["unsaved_blocks"]
            announce(engine, third)
            write_adapter(tmp_path / "third", 8)
            engine.end_all()
            assert 2 == engine.counts["unsaved_blocks"] - before
            assert 0 == cached(engine, third)
            engine.check_nothing_leaked()
