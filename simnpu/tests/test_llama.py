"""A small model of the transformers library generates text on the device."""

from __future__ import annotations

import simnpu
import torch

from conftest import NPU, Plan


def test_a_small_llama_generates_the_cpu_s_tokens(schedule: Plan) -> None:
    """The model generates greedily, with a cache."""
    # The import takes as long as all these tests, so only the process that runs this test pays.
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 64, (2, 7))

    def generate(device: str) -> list[list[int]]:
        tokens = model.to(device).generate(
            prompt.to(device),
            attention_mask=torch.ones_like(prompt, device=device),
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
        )
        rows: list[list[int]] = tokens.tolist()
        return rows

    assert generate("cpu") == generate("npu")
    assert simnpu.stats().queued_kernels > 0
    NPU.synchronize()
