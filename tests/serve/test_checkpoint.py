"""Models from files: every tensor is used, or the error names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from kvtide.serve.models import open_model
from serve.folders import Tensors, change_config, change_tensors, make_folder, refusal

LAYER = "model.layers.2."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Saves the tiny model as a Hugging Face folder in float32."""
    return make_folder(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("name", "width"),
    [
        (LAYER + "self_attn.q_proj.bias", 64),
        (LAYER + "self_attn.q_norm.weight", 16),
        (LAYER + "self_attn.q_proj.lora_A.weight", 64),
        (LAYER + "self_attn.sinks", 4),
        ("model.layers.4.input_layernorm.weight", 64),
        ("lm_head.bias", 260),
    ],
)
def test_a_tensor_without_a_place_is_named(folder: Path, name: str, width: int) -> None:
    """The model has no place for this bias, norm, adapter or fifth layer."""
    change_tensors(folder, lambda held: held.update({name: torch.full((width,), 0.5)}))
    assert f"would lose 1 of its tensors, {name} first" in refusal(folder)


@pytest.mark.parametrize("prefix", ["", "model.model."])
@pytest.mark.parametrize("name", ["norm.weight", "layers.2.mlp.up_proj.weight"])
def test_a_weight_that_is_there_by_two_names_is_refused(
    folder: Path, prefix: str, name: str
) -> None:
    """transformers completes such names, uses one of the two weights, and says nothing."""
    second = prefix + name
    change_tensors(folder, lambda held: held.update({second: held[f"model.{name}"] / 2}))
    line = refusal(folder)
    assert f"model.{name}" in line
    assert second in line
    assert "one weight of the model" in line


def test_weights_without_the_model_prefix_are_the_model(folder: Path) -> None:
    """The file has the names of the model without its head. Tied weights are found by them too."""

    def shorten(held: Tensors) -> None:
        for name in [name for name in held if name.startswith("model.")]:
            held[name.removeprefix("model.")] = held.pop(name)

    expected = open_model(str(folder), dtype="float32").model.state_dict()
    change_tensors(folder, shorten)
    found = open_model(str(folder), dtype="float32").model.state_dict()
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
    change_config(folder, tie_word_embeddings=True)
    assert "of different numbers" in refusal(folder)


def test_weights_in_8_bits_are_not_taken_for_numbers(folder: Path) -> None:
    """Without their scales such numbers are wrong by orders of magnitude."""

    def quantize(held: Tensors) -> None:
        name = LAYER + "mlp.up_proj.weight"
        scale = held[name].abs().max() / 448
        held[name] = (held[name] / scale).to(torch.float8_e4m3fn)
        held[LAYER + "mlp.up_proj.weight_scale"] = scale

    change_tensors(folder, quantize)
    line = refusal(folder)
    assert LAYER + "mlp.up_proj.weight_scale" in line
    assert "quantized" in line


def test_a_shape_that_does_not_fit_is_named_with_both(folder: Path) -> None:
    """The error names the tensor's shape and the model's; transformers names neither."""
    change_config(folder, intermediate_size=112)
    line = refusal(folder)
    assert "model.layers.0.mlp.down_proj.weight is [64, 128]" in line
    assert "makes it [64, 112]" in line


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("hidden_size", "abc", "hidden_size in its configuration is 'abc', which is of the wrong"),
        ("head_dim", "a", "head_dim in its configuration is 'a', which is of the wrong type"),
        ("rms_norm_eps", [], "rms_norm_eps in its configuration is [], which is of the wrong type"),
        ("num_attention_heads", 3, "The hidden size (64) is not a multiple of the number of"),
    ],
)
def test_a_wrong_configuration_is_an_error_in_kvtide_s_words(
    folder: Path, field: str, value: object, reason: str
) -> None:
    """The error names the field and its value, and not how they were checked."""
    change_config(folder, **{field: value})
    line = refusal(folder)
    assert reason in line
    for word in ("alidat", "TypeError", "ValueError", "<class", "expected"):
        assert word not in line


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [LAYER + "mlp.up_proj.weight", "model.norm.weight"])
def test_nan_and_infinity_are_found_by_their_tensor(folder: Path, name: str, number: float) -> None:
    """One such number spoils every answer, and no later check could say where it is."""
    change_tensors(folder, lambda held: held[name].view(-1)[17:18].fill_(number))
    line = refusal(folder)
    assert f"has numbers in {name} that are NaN or infinite" in line


def test_numbers_too_large_for_the_dtype_are_found(folder: Path) -> None:
    """A large float32 becomes infinite in bfloat16."""
    largest = torch.finfo(torch.float32).max
    change_tensors(folder, lambda held: held["model.norm.weight"][:1].fill_(largest))
    assert "model.norm.weight" in refusal(folder, "bfloat16")
    open_model(str(folder), dtype="float32")


@pytest.fixture
def tied(folder: Path) -> Path:
    """Makes a folder in which embedding and head share a matrix that is stored twice."""
    change_config(folder, tie_word_embeddings=True)
    embedding = "model.embed_tokens.weight"
    change_tensors(folder, lambda held: held.update({"lm_head.weight": held[embedding].clone()}))
    return folder


def test_a_tied_head_that_is_stored_twice_is_no_reason_to_refuse(tied: Path) -> None:
    """Older converters wrote both copies."""
    weights = open_model(str(tied), dtype="float32").model.state_dict()
    assert torch.equal(weights["model.embed_tokens.weight"], weights["lm_head.weight"])


def test_a_tied_head_with_other_numbers_is_refused(tied: Path) -> None:
    """The model would keep only one of the two."""
    change_tensors(tied, lambda held: held["lm_head.weight"][7:8].mul_(1.5))
    line = refusal(tied)
    assert "lm_head.weight and model.embed_tokens.weight" in line
    assert "tie_word_embeddings" in line


@pytest.mark.parametrize("prefix", ["model.layers.1.self_attn.", "model."])
def test_stored_frequencies_must_equal_the_computed_ones(folder: Path, prefix: str) -> None:
    """Older versions stored frequencies. Equal ones are accepted, and others are refused."""
    name = prefix + "rotary_emb.inv_freq"
    plain = 1 / 10000 ** (torch.arange(0, 16, 2) / 16)
    change_tensors(folder, lambda held: held.update({name: plain.bfloat16()}))
    open_model(str(folder))
    change_tensors(folder, lambda held: held.update({name: plain / 4}))
    assert name in refusal(folder)


def test_single_experts_and_gpt_2s_masks_are_accepted(folder: Path, tmp_path: Path) -> None:
    """transformers joins the experts under other names, and computes the masks."""
    sizes: dict[str, Any] = {"vocab_size": 260, "bos_token_id": None, "eos_token_id": None}
    experts = tf.MixtralConfig(
        **sizes,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        sliding_window=None,
    )
    gpt = tf.GPT2Config(**sizes, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
    for model in (tf.MixtralForCausalLM(experts), tf.GPT2LMHeadModel(gpt)):
        path = tmp_path / type(model).__name__
        model.save_pretrained(path)
        for file in folder.glob("tokenizer*"):
            (path / file.name).write_bytes(file.read_bytes())
        if "GPT2" in path.name:
            change_tensors(path, lambda held: held.update({"transformer.h.0.attn.bias": mask}))
        opened = open_model(str(path), dtype="float32").model.state_dict()
        assert all(torch.equal(weight, opened[name]) for name, weight in model.state_dict().items())


def test_a_configuration_of_a_huge_model_costs_no_memory(folder: Path, tmp_path: Path) -> None:
    """transformers would allocate missing weights and tables of positions of any size."""
    change_config(folder, intermediate_size=1 << 40)
    assert "is incomplete: its configuration asks for" in refusal(folder)
    config = tf.GPTJConfig(
        vocab_size=260, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=8
    )
    tf.GPTJForCausalLM(config).save_pretrained(tmp_path / "gptj")
    change_config(tmp_path / "gptj", n_positions=1 << 40)
    assert "is incomplete: its configuration asks for" in refusal(tmp_path / "gptj")
