"""GGUF files: each key and tensor is used or means nothing, or the error names it."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy
import pytest
import torch
import transformers as tf

from kvtide.errors import UsageError
from kvtide.serve.adapter_files import read_gguf_head
from kvtide.serve.gguf_keys import check_keys, complete
from kvtide.serve.models import OpenModel, open_model
from serve.gguf_files import arch_of, head_dim_of, keys_of, tensors_of, write_gguf

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
IDS = torch.arange(40)[None] * 5
TYPES = {
    bool: "add_bool",
    int: "add_uint32",
    float: "add_float32",
    str: "add_string",
    list: "add_array",
}


@functools.cache
def tiny() -> OpenModel:
    """Returns the tiny Llama in float32."""
    return open_model("tiny-random", dtype="float32")


def made(kind: str, **changes: Any) -> OpenModel:
    """Makes a small random model of another kind or with other settings, and the tiny tokenizer."""
    torch.manual_seed(5)
    sizes = {
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    }
    config = getattr(tf, f"{kind}Config")(**{**sizes, **changes})
    model = getattr(tf, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith((".bias", "norm.weight")):
                weight.add_(torch.randn_like(weight) * 0.3)
    return OpenModel(model, tiny().tokenizer, kind, frozenset())


def scaled(**rope: Any) -> OpenModel:
    """Returns the tiny Llama with another scaling of positions."""
    model = copy.deepcopy(tiny().model)
    config = copy.deepcopy(model.config)
    config.rope_parameters = {**config.rope_parameters, **rope}
    again = tf.LlamaForCausalLM(config).eval()
    again.load_state_dict(model.state_dict())
    return OpenModel(again, tiny().tokenizer, "scaled", frozenset())


def adding(keys: dict[str, Any]) -> Any:
    """A function that writes the keys, each by its value's type."""

    def write(writer: Any) -> None:
        for key, value in keys.items():
            getattr(writer, TYPES[type(value)])(key, value)

    return write


def logits(opened: OpenModel) -> torch.Tensor:
    """Returns the model's logits of a fixed prompt."""
    with torch.inference_mode():
        found: torch.Tensor = opened.model(IDS).logits
    return found


def opened_from(path: Path) -> OpenModel:
    """Opens the file's model in float32."""
    return open_model(str(path), dtype="float32")


def refusal(path: Path) -> str:
    """Returns the one line of the error with which a file is refused. It names the file."""
    with pytest.raises(UsageError) as caught:
        opened_from(path)
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line
    return line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sliding_window", 64),
        ("attention.scale", 0.5),
        ("attention.value_length", 32),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.causal", False),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.25),
        ("residual_scale", 0.22),
        ("embedding_scale", 12.0),
        ("expert_count", 8),
        ("expert_used_count", 2),
        ("rope.dimension_count_swa", 8),
        ("rope.dimension_sections", [8, 8, 0, 0]),
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.attn_factor", 1.2),
        ("something.new", 1),
        ("vocabulary", "other"),
        ("rope.scaling.factor", float("nan")),
        ("rope.scaling.factor", -2.0),
        ("rope.scaling.factor", "twice"),
    ],
)
def test_a_key_that_would_be_dropped_is_named(tmp_path: Path, key: str, value: Any) -> None:
    """The error has the key and its value; without the key the model would answer otherwise."""
    path = write_gguf(tiny(), tmp_path / "tiny.gguf", adding({f"llama.{key}": value}))
    line = refusal(path)
    assert f"llama.{key}" in line
    assert "Hugging Face folder" in line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("context_length", 4096),
        ("rope.dimension_count", 8),
        ("rope.freq_base", 5000.0),
        ("attention.layer_norm_rms_epsilon", 1e-4),
    ],
)
def test_a_key_that_differs_from_the_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any
) -> None:
    """Something between the file and the configuration changed the value."""
    path = write_gguf(tiny(), tmp_path / "tiny.gguf")

    def read(link: Path) -> Any:
        keys, *rest = read_gguf_head(link)
        return {**keys, f"llama.{key}": value}, *rest

    monkeypatch.setattr("kvtide.serve.checkpoint.read_gguf_head", read)
    assert f"llama.{key} = {value}, and the model would run with" in refusal(path)


def test_a_missing_key_is_named_if_its_default_would_be_wrong(tmp_path: Path) -> None:
    """The defaults of llama.cpp and of transformers differ, so the file must give the value."""
    key = "attention.layer_norm_rms_epsilon"
    line = refusal(write_gguf(tiny(), tmp_path / "tiny.gguf", without=(key,)))
    assert f"doesn't say llama.{key}" in line
    line = refusal(
        write_gguf(tiny(), tmp_path / "tiny.gguf", without=("head_count", "dimension_count"))
    )
    assert "doesn't say llama.attention.head_count" in line
    keys = {"general.architecture": "llama"}
    check_keys(keys, SimpleNamespace(rope_parameters={"rope_theta": 1e4}, head_dim=16))
    with pytest.raises(UsageError, match=r"doesn't say llama.rope.freq_base, .* with 500000.0"):
        check_keys(keys, SimpleNamespace(rope_parameters={"rope_theta": 5e5}, head_dim=16))


def test_either_key_of_an_epsilon_is_enough() -> None:
    """The kind of model decides which key a file has; without both a default would be used."""
    nemotron = SimpleNamespace(norm_eps=1e-6, head_dim=16)
    keys = {"general.architecture": "nemotron"}
    for name in ("layer_norm_epsilon", "layer_norm_rms_epsilon"):
        check_keys({**keys, f"nemotron.attention.{name}": 1e-6}, nemotron)
    with pytest.raises(
        UsageError, match=r"doesn't say nemotron\.attention\.layer_norm_rms_epsilon"
    ):
        check_keys(keys, nemotron)


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("attn_logit_softcapping", 0.0, {"attn_logit_softcapping": 50.0}),
        ("attention.sliding_window", 0, {"sliding_window": 4096}),
        ("expert_weights_norm", False, {"norm_topk_prob": True}),
    ],
)
def test_a_key_that_turns_a_part_off_must_turn_it_off(
    key: str, value: Any, meant: dict[str, Any]
) -> None:
    """The file says that the model lacks a part which the configuration has by default."""
    keys = {"general.architecture": "gemma2", f"gemma2.{key}": value}
    check_keys(keys, SimpleNamespace(head_dim=16))
    with pytest.raises(UsageError, match=f"gemma2.{key} = {value}, .* would run with"):
        check_keys(keys, SimpleNamespace(head_dim=16, **meant))


def test_the_scale_of_scores_must_be_the_files() -> None:
    """The scale follows from a head's width unless the file has another; the model must agree."""
    keys = {"general.architecture": "gemma2"}
    config = SimpleNamespace(head_dim=16, query_pre_attn_scalar=64)
    check_keys({**keys, "gemma2.attention.scale": 64**-0.5}, config)
    check_keys({**keys, "gemma2.attention.scale": 0.0}, SimpleNamespace(head_dim=16))
    for told in ({}, {"gemma2.attention.scale": 0.0}):
        with pytest.raises(UsageError, match=r"doesn't say gemma2\.attention\.scale.* 0\.125"):
            check_keys({**keys, **told}, config)


NEUTRAL = {
    "attention.sliding_window": 8192,
    "attention.scale": 16**-0.5,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.causal": True,
    "attention.max_alibi_bias": 0.0,
    "attn_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_feed_forward_length": 0,
    "rope.scaling.type": "none",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 4096,
    "rope.scaling.finetuned": False,
}
OF_THE_FILE = {
    "general.type": "model",
    "general.name": "Tiny",
    "general.basename": "tiny",
    "general.finetune": "Instruct",
    "general.size_label": "135M",
    "general.license": "apache-2.0",
    "general.languages": ["en"],
    "general.base_model.count": 1,
    "general.base_model.0.repo_url": "https://example.org",
    "general.file_type": 0,
    "general.quantization_version": 2,
    "general.sampling.temp": 0.7,
    "quantize.imatrix.file": "imatrix.dat",
    "quantize.imatrix.entries_count": 224,
    "mradermacher.quantize_version": "2",
    "mradermacher.quantized_at": "2025-01-25T03:07:17+01:00",
    "split.count": 1,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.eot_token_id": 3,
    "tokenizer.chat_template": "{{ messages }}",
}


def test_keys_that_do_not_change_the_model_are_accepted(tmp_path: Path) -> None:
    """Converters write notes beside the numbers, and keys with values that change nothing."""
    keys = {**{f"llama.{key}": value for key, value in NEUTRAL.items()}, **OF_THE_FILE}
    factors = {"rope_freqs.weight": numpy.ones(8, dtype=numpy.float32)}
    path = write_gguf(tiny(), tmp_path / "tiny.gguf", adding(keys), tensors=factors)
    assert torch.equal(logits(tiny()), logits(opened_from(path)))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("general.type", "mmproj", "general.type is 'mmproj'"),
        ("split.count", 3, "one of 3 parts"),
        ("adapter.type", "lora", "it has adapter.type"),
        ("clip.has_vision_encoder", True, "it has clip.has_vision_encoder"),
        ("attention.head_count", 4, "it has attention.head_count"),
    ],
)
def test_another_kind_of_file_is_refused(tmp_path: Path, key: str, value: Any, reason: str) -> None:
    """It is refused even if it holds a whole model besides."""
    assert reason in refusal(write_gguf(tiny(), tmp_path / "x.gguf", adding({key: value})))


@pytest.mark.parametrize(
    "name",
    [
        "blk.1.attn_q.bias",
        "blk.0.attn_output.bias",
        "blk.3.ffn_down.bias",
        "blk.2.attn_q_norm.weight",
        "blk.4.attn_norm.weight",
        "rope_factors_long.weight",
        "output.scale",
        "anything",
    ],
)
def test_a_tensor_that_would_be_dropped_is_named(tmp_path: Path, name: str) -> None:
    """The model has no place for this bias, norm or layer."""
    extra = {name: numpy.full(64, 0.5, dtype=numpy.float32)}
    line = refusal(write_gguf(tiny(), tmp_path / "tiny.gguf", tensors=extra))
    assert f"1 of its tensors, {name} first" in line


def test_a_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    """transformers would fill the weight with random numbers."""
    other = {"blk.1.ffn_norm.weight": numpy.ones(32, dtype=numpy.float32)}
    line = refusal(write_gguf(tiny(), tmp_path / "tiny.gguf", tensors=other))
    assert "model.layers.1.post_attention_layernorm.weight is [32]" in line
    assert "makes it [64]" in line


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        (
            {"rope_type": "linear", "factor": 2.5},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5},
        ),
        ({"rope_type": "linear", "factor": 4.0}, {"rope.scale_linear": 4.0}),
        ({"rope_type": "linear", "factor": 4.0}, {"rope.scaling.factor": 4.0}),
        (
            YARN,
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 2048,
                "rope.scaling.yarn_log_multiplier": 0.0,
            },
        ),
        (
            {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 2048,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
            },
        ),
    ],
)
def test_scaled_positions_equal_those_of_the_folder(
    tmp_path: Path, rope: dict[str, Any], keys: dict[str, Any]
) -> None:
    """The logits equal the folder's to the bit, and differ from those without scaling."""
    more = adding({f"llama.{key}": value for key, value in keys.items()})
    opened = opened_from(write_gguf(tiny(), tmp_path / "tiny.gguf", more))
    assert torch.equal(logits(scaled(**rope)), logits(opened))
    assert not torch.equal(logits(tiny()), logits(opened))


def test_a_scaling_that_the_model_cannot_have_is_refused(tmp_path: Path) -> None:
    """GPT-2 learns its positions, and nothing says how two scalings would be combined."""
    gpt = {"general.architecture": "gpt2", "gpt2.rope.scaling.factor": 2.0}
    with pytest.raises(UsageError, match=r"gpt2\.rope\.scaling"):
        complete(SimpleNamespace(n_positions=64), gpt, None)
    factors = {"rope_freqs.weight": numpy.full(8, 2, dtype=numpy.float32)}
    more = adding({"llama.rope.scaling.factor": 2.0})
    path = write_gguf(tiny(), tmp_path / "tiny.gguf", more, tensors=factors)
    assert "scales its positions besides" in refusal(path)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_llama_3_equal_those_of_the_folder(tmp_path: Path, factor: float) -> None:
    """The file has only the factors that divide the frequencies, not the scaling's numbers."""
    folder = scaled(**{**LLAMA3, "factor": factor})
    plain, divided = (opened.model.model.rotary_emb.inv_freq for opened in (tiny(), folder))
    factors = {"rope_freqs.weight": (plain / divided).numpy()}
    opened = opened_from(write_gguf(tiny(), tmp_path / "tiny.gguf", tensors=factors))
    assert torch.equal(logits(folder), logits(opened))
    assert not torch.equal(logits(tiny()), logits(opened))


@pytest.mark.parametrize("factors", [[1, 2, 3, 4, 5, 6, 7, 8], [8.0] * 8, [1.0, 8.0], [0.5] * 8])
def test_factors_of_an_unknown_scaling_are_refused(tmp_path: Path, factors: list[float]) -> None:
    """No known configuration gives such factors."""
    held = {"rope_freqs.weight": numpy.array(factors, dtype=numpy.float32)}
    line = refusal(write_gguf(tiny(), tmp_path / "tiny.gguf", tensors=held))
    assert "rope_freqs.weight" in line


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 16}),
        ("Llama", {"head_dim": 32}),
        ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 48}),
        ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    ],
)
def test_files_of_these_kinds_answer_as_their_folders(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    """Biases, norms and the keys that converters write all take effect."""
    model = made(kind, **changes)
    arch, width = arch_of(model), head_dim_of(model)
    keys = {f"{arch}.attention.key_length": width, f"{arch}.attention.value_length": width}
    opened = opened_from(write_gguf(model, tmp_path / "x.gguf", adding({**OF_THE_FILE, **keys})))
    assert torch.equal(logits(model), logits(opened))


def words(opened: OpenModel, text: str) -> list[str]:
    """Returns the words into which a text is cut before it becomes tokens."""
    cut = opened.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [word for word, _ in cut]


@pytest.mark.parametrize("split", ["smollm", "starcoder"])
def test_digits_are_words_where_the_file_says_so(tmp_path: Path, split: str) -> None:
    """The spaces before a number become a word, as in the tokenizer that the model learned with.

    A folder that is saved from the model cuts texts in the same way.
    """
    opened = opened_from(write_gguf(tiny(), tmp_path / "tiny.gguf", split=split))
    opened.model.save_pretrained(tmp_path / "folder")
    opened.tokenizer.save_pretrained(tmp_path / "folder")
    for source in (opened, opened_from(tmp_path / "folder")):
        assert ["x", "Ġ=", "ĠĠ", "1", "2", "Ġ", "3", "Ġy"] == words(source, "x =  12 3 y")


@pytest.mark.parametrize(
    ("split", "expected"),
    [("gpt-2", ["Ġ", "Ġ1234", "'s", "Ġ!"]), ("llama-bpe", ["Ġ", "Ġ", "123", "4", "'s", "Ġ!"])],
)
def test_texts_are_cut_as_the_file_says(tmp_path: Path, split: str, expected: list[str]) -> None:
    """Texts are cut as for GPT-2, or as transformers cuts them by that name."""
    opened = opened_from(write_gguf(tiny(), tmp_path / "tiny.gguf", split=split))
    assert expected == words(opened, "  1234's !")


@pytest.mark.parametrize("split", ["deepseek-llm", "falcon", "of-tomorrow"])
def test_an_unknown_way_to_cut_texts_is_refused(tmp_path: Path, split: str) -> None:
    """The model would read other tokens than those that it learned."""
    line = refusal(write_gguf(tiny(), tmp_path / "tiny.gguf", split=split))
    assert f"tokenizer.ggml.pre = '{split}'" in line


def test_all_end_tokens_of_the_file_end_an_answer(tmp_path: Path) -> None:
    """The file names the ends of a text, a turn and a message; a saved folder keeps them."""
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 8}
    opened = opened_from(write_gguf(tiny(), tmp_path / "tiny.gguf", adding(ends)))
    opened.model.save_pretrained(tmp_path / "folder")
    opened.tokenizer.save_pretrained(tmp_path / "folder")
    eos = tiny().tokenizer.eos_token_id
    assert {eos, 7, 8} == opened.eos_ids == opened_from(tmp_path / "folder").eos_ids


@pytest.mark.parametrize(
    ("keys", "expected", "text"),
    [
        ({}, ["▁ab"], "ab"),
        ({"tokenizer.ggml.add_space_prefix": True}, ["▁ab"], "ab"),
        ({"tokenizer.ggml.add_space_prefix": False}, ["ab"], " ab"),
    ],
)
def test_the_file_decides_on_a_space_before_a_text(
    tmp_path: Path, keys: dict[str, Any], expected: list[str], text: str
) -> None:
    """SentencePiece adds a space and removes it from an answer, unless the file forbids it."""
    path = write_gguf(tiny(), tmp_path / "tiny.gguf", adding(keys), is_sentencepiece=True)
    opened = opened_from(path)
    opened.model.save_pretrained(tmp_path / "folder")
    opened.tokenizer.save_pretrained(tmp_path / "folder")
    for source in (opened, opened_from(tmp_path / "folder")):
        ids = source.tokenizer.encode("ab", add_special_tokens=False)
        assert expected == source.tokenizer.convert_ids_to_tokens(ids)
        space = source.tokenizer.convert_tokens_to_ids("▁ab")
        assert text == source.tokenizer.decode([space])


def test_other_files_in_the_folder_change_nothing(tmp_path: Path) -> None:
    """transformers looks in a file's folder for an adapter and a tokenizer's settings."""
    path = write_gguf(tiny(), tmp_path / "tiny.gguf")
    for name in ("adapter_config.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_text("{")
    assert torch.equal(logits(tiny()), logits(opened_from(path)))


def test_the_header_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing a large vocabulary takes seconds. Afterwards the library's reader is as before."""
    real, read = gguf.GGUFReader, list[str]()

    def count(path: str) -> Any:
        read.append(path)
        return real(path)

    monkeypatch.setattr(gguf, "GGUFReader", count)
    opened_from(write_gguf(tiny(), tmp_path / "tiny.gguf"))
    assert 1 == len(read)
    assert gguf.GGUFReader is count


@pytest.mark.parametrize("size", [20, 500, 400_000, -1])
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, size: int) -> None:
    """A download that was broken off ends in the header or in the numbers."""
    path = write_gguf(tiny(), tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:size])
    assert f"{path} is cut off" in refusal(path)


def test_a_key_that_appears_twice_is_refused(tmp_path: Path) -> None:
    """transformers uses the first value, and kvtide would check the last."""
    more = adding({"llama.logit_scale": 0.25, "llama.logit_twice": 1.0})
    path = write_gguf(tiny(), tmp_path / "tiny.gguf", more)
    path.write_bytes(path.read_bytes().replace(b"llama.logit_twice", b"llama.logit_scale"))
    assert "some of them twice" in refusal(path)


def test_a_tensor_of_an_unknown_type_is_named(tmp_path: Path) -> None:
    """New formats of quantization appear now and then."""
    path, name = write_gguf(tiny(), tmp_path / "tiny.gguf"), b"token_embd.weight"
    data = bytearray(path.read_bytes())
    place = data.index(name) + len(name) + 4 + 2 * 8  # after the number of axes and the axes
    data[place : place + 4] = (99).to_bytes(4, "little")
    path.write_bytes(data)
    assert "token_embd.weight is of type 99" in refusal(path)


@pytest.mark.parametrize("claim", ["layers", "texts", "numbers", "tensor", "tensors"])
def test_sizes_that_a_file_claims_cost_no_memory(tmp_path: Path, claim: str) -> None:
    """The file's sizes come from a stranger, so each is compared with the bytes that exist."""
    path = write_gguf(tiny(), tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())

    def put(after: bytes, skip: int, value: int) -> None:
        place = data.index(after) + len(after) + skip
        data[place : place + 8] = value.to_bytes(8, "little")

    if claim == "layers":
        place = data.index(b"llama.block_count") + len(b"llama.block_count") + 4
        data[place : place + 4] = (1 << 30).to_bytes(4, "little")
    elif claim == "texts":  # after the types of the array and of its elements
        put(b"tokenizer.ggml.tokens", 8, 1 << 50)
    elif claim == "numbers":
        put(b"tokenizer.ggml.scores", 8, 1 << 50)
    elif claim == "tensor":  # after the number of axes
        put(b"\x11\0\0\0\0\0\0\0token_embd.weight", 4, 1 << 50)
    else:
        data[8:16] = (1 << 50).to_bytes(8, "little")
    path.write_bytes(data)
    refusal(path)


def test_keys_and_tensors_of_the_helper_are_complete() -> None:
    """The tests above add to a file that lacks nothing."""
    assert 10 == len(keys_of(tiny()))
    assert 9 * 4 + 3 == len(tensors_of(tiny()))
