"""Small random models of many families, their pools, and their own answers."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers as tf

from kvtide.device import open_device
from kvtide.pool import Pool
from kvtide.serve.supported import geometry_of

SMALL: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
NEW_TOKENS = 6


@functools.cache
def model_of(family: str = "Llama", dtype: torch.dtype = torch.float32) -> Any:
    """Returns a small random model, which tests share: each must leave it as it was."""
    torch.manual_seed(3)
    sizes = {**SMALL, **(EXPERTS if "Moe" in family else {})}
    if family in ("Mistral", "Qwen2"):
        sizes["sliding_window"] = None
    if family == "GPTNeo":
        sizes["attention_types"] = [[["global"], 2]]
    # GPT-2 and its like have as many heads of keys as of queries, and no setting for it.
    if family in ("GPT2", "GPTJ", "GPTNeo", "GPTNeoX", "OPT", "StableLm"):
        sizes |= {"hidden_size": 64, "num_key_value_heads": 4}
    if family == "GPTJ":
        sizes["rotary_dim"] = 8
    if family == "OPT":
        sizes |= {"ffn_dim": 96, "word_embed_proj_dim": 64}
    config = getattr(tf, f"{family}Config")(**sizes)
    return tf.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def pool_of(model: Any, page_count: int = 200) -> Pool:
    """Makes a pool with NaN in every slot, so that a read of a slot that nobody wrote shows."""
    geometry = geometry_of(model.config, model.dtype, 16)
    pool = Pool.create(geometry, open_device("cpu"), page_count=page_count)
    for plane in geometry.planes:
        for layer in range(plane.layer_count):
            pool.plane(plane.name, layer).fill_(float("nan"))
    return pool


def generated(model: Any, prompt: list[int]) -> list[int]:
    """Returns the answer that the model gives without kvtide."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    tokens: list[int] = found[0].tolist()
    return tokens
