"""The caches of published models have the sizes of their papers and reviews, or of arithmetic.

The files in configs/ have the fields that matter of each model's published config.json. "Gallery"
is the LLM Architecture Gallery, which gives the KV cache of a token in bf16 for many models.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from kvtide.errors import UsageError
from kvtide.models import sizes as model_sizes
from kvtide.models import types as model_types
from kvtide.models.cache import cache_of
from kvtide.models.sizes import DEFAULT_SIZES

CONFIGS = Path(__file__).parent / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
KIB = 1024


def load(name: str, **changes: Any) -> dict[str, Any]:
    """Loads a published configuration with changes; a field whose value is `...` is left out."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_bytes())
    text = config.get("text_config", config)
    text.update(changes)
    for field in [field for field, value in text.items() if value is ...]:
        del text[field]
    return config


def plane_rows(name: str, **options: Any) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    """Returns dtype, layers and row shape of each plane of a published model."""
    planes = cache_of(load(name), **options).geometry.planes
    return {plane.name: (plane.dtype, plane.layer_count, plane.row_shape) for plane in planes}


def test_llama_3_1() -> None:
    """8B takes 128 KiB a token (gallery); 70B takes 320 KiB (80 * 2 * 8 * 128 * 2).

    405B takes 516.096 KB, by table 1 of "Insights into DeepSeek-V3" (arXiv 2505.09343).
    """
    sizes = [
        cache_of(load(f"llama-3.1-{size}")).geometry.token_bytes for size in ("8b", "70b", "405b")
    ]
    assert [128 * KIB, 320 * KIB, 516_096] == sizes


def test_qwen2_5_72b() -> None:
    """A token takes 327.680 KB (table 1 of arXiv 2505.09343). Its window is switched off."""
    cache = cache_of(load("qwen2.5-72b"))
    assert (327_680, None) == (cache.geometry.token_bytes, cache.window_tokens)


def test_qwen3() -> None:
    """The model cards say that 8B has 36 layers and 32B has 64, with 8 KV heads of 128.

    So 36 * 2 * 8 * 128 * 2 bytes are 144 KiB, and 64 layers are 256 KiB.
    """
    sizes = [cache_of(load(f"qwen3-{size}")).geometry.token_bytes for size in ("8b", "32b")]
    assert [144 * KIB, 256 * KIB] == sizes


def test_gpt2_xl() -> None:
    """A token takes 300 KiB (gallery): 48 layers of 25 heads of 64. Its fields have other names."""
    assert 300 * KIB == cache_of(load("gpt2-xl")).geometry.token_bytes


def test_deepseek_v3() -> None:
    """A token takes 70.272 KB (table 1 of arXiv 2505.09343): 512 + 64 elements in 61 layers."""
    geometry = cache_of(load("deepseek-v3")).geometry
    assert ("mla", 70_272) == (geometry.layout.name, geometry.token_bytes)


def test_deepseek_v3_2_has_index_keys_beside_the_latents() -> None:
    """A page's keys take 64 * (128 + 4) bytes in each layer, as SGLang's DSA pool says."""
    assert {
        "kv": ("bfloat16", 61, (1, 576)),
        "index_k": ("uint8", 61, (64 * 132,)),
    } == plane_rows("deepseek-v3.2", page_size=64)
    assert 70_272 + 61 * 132 == cache_of(load("deepseek-v3.2")).geometry.token_bytes


@pytest.mark.parametrize("kind", ["indexed_attention", "deepseek_sparse_attention"])
def test_deepseek_v3_2_may_name_its_attention_in_layer_types(kind: str) -> None:
    """The new name of transformers and the old one give the same cache."""
    config = load("deepseek-v3.2", layer_types=[kind] * 61)
    assert cache_of(load("deepseek-v3.2")) == cache_of(config)


def test_deepseek_v3_2_packs_an_fp8_latent() -> None:
    """A token takes 656 bytes: 512 of fp8, 4 scales, 64 of bfloat16 (FlashMLA's README)."""
    assert ("uint8", 61, (1, 656)) == plane_rows("deepseek-v3.2", dtype="float8_e4m3fn")["kv"]


def test_gemma_3_27b() -> None:
    """Five layers with a window of 1,024 follow each layer without one (arXiv 2503.19786).

    So 10 of 62 layers keep all tokens, at 2 * 16 * 128 * 2 bytes a layer.
    """
    cache = cache_of(load("gemma-3-27b"))
    assert ("window_and_full", 1024) == (cache.geometry.layout.name, cache.window_tokens)
    assert (62 * 8192, 10 * 8192) == (cache.geometry.token_bytes, cache.lasting.token_bytes)
    assert (5, 11, 17) == dict(cache.geometry.sizes)["full_layer"][:3]  # type: ignore[index]


def test_gemma_3_4b_leaves_out_the_defaults_of_its_type() -> None:
    """Its config.json names no heads: it has 4 KV heads of 256; 5 of 34 layers keep all tokens."""
    cache = cache_of(load("gemma-3-4b"))
    assert (34 * 4096, 5 * 4096) == (cache.geometry.token_bytes, cache.lasting.token_bytes)


@pytest.mark.parametrize(("size", "layers"), [("20b", 24), ("120b", 36)])
@pytest.mark.parametrize("changes", [{}, {"layer_types": ...}], ids=["declared", "by default"])
def test_gpt_oss(size: str, layers: int, changes: dict[str, Any]) -> None:
    """Every other layer has a window of 128 tokens (model card, arXiv 2508.10925).

    A layer's token takes 2 * 8 * 64 * 2 bytes: 48 KiB in 24 layers, 72 KiB in 36. Half of it stays.
    """
    cache = cache_of(load(f"gpt-oss-{size}", **changes))
    assert (layers * 2 * KIB, layers * KIB) == (
        cache.geometry.token_bytes,
        cache.lasting.token_bytes,
    )
    assert (128, tuple(range(1, layers, 2))) == (
        cache.window_tokens,
        dict(cache.geometry.sizes)["full_layer"],
    )


def test_qwen3_next_80b() -> None:
    """12 layers of attention have 2 KV heads of 256, and 36 are gated delta nets (model card).

    SGLang gives a state the shape (32, 128, 128) in float32. The convolution over query, key and
    value has 2 * 16 * 128 + 32 * 128 channels; its width is 4, so it keeps 3 inputs.
    """
    assert {
        "full.k": ("bfloat16", 12, (2, 256)),
        "full.v": ("bfloat16", 12, (2, 256)),
        "state.conv": ("bfloat16", 36, (8192, 3)),
        "state.ssm": ("float32", 36, (32, 128, 128)),
    } == plane_rows("qwen3-next-80b-a3b")
    geometry = cache_of(load("qwen3-next-80b-a3b")).geometry
    assert ("recurrent_and_full", 24 * KIB) == (geometry.layout.name, geometry.token_bytes)
    assert 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4) == geometry.request_bytes
    sizes = dict(geometry.sizes)
    assert tuple(range(3, 48, 4)) == sizes["full_layer"]


def test_state_has_its_own_dtypes() -> None:
    """The convolution has the model's dtype and the state a field's; neither has the cache's."""
    config = load(
        "qwen3-next-80b-a3b", torch_dtype=..., dtype="float16", mamba_ssm_dtype="bfloat16"
    )
    planes = cache_of(config, dtype="float8_e4m3fn").geometry.planes
    assert ["float8_e4m3fn", "float8_e4m3fn", "float16", "bfloat16"] == [p.dtype for p in planes]


def test_state_is_a_matrix_of_value_by_key() -> None:
    """SGLang's shape is: for each value head, its head_dim, then the key's."""
    config = load("qwen3-next-80b-a3b", linear_value_head_dim=64)
    ssm = cache_of(config).geometry.planes[-1]
    assert (32, 64, 128) == ssm.row_shape


def test_mistral_7b_has_a_window_in_all_layers() -> None:
    """The window has 4,096 tokens (table 1 of arXiv 2310.06825). Later tokens cost nothing more."""
    cache = cache_of(load("mistral-7b-v0.1"))
    assert ("window", 4096) == (cache.geometry.layout.name, cache.window_tokens)
    assert (128 * KIB, 0) == (cache.geometry.token_bytes, cache.lasting.token_bytes)
    assert cache.bytes_of(4096) == cache.bytes_of(40_960) == 4096 * 128 * KIB


@pytest.mark.parametrize("changes", [{"sliding_window": None}, {"sliding_window": 32_768}])
def test_window_as_long_as_the_context_is_no_window(changes: dict[str, Any]) -> None:
    """The window has no width, or one as large as the longest context."""
    cache = cache_of(load("mistral-7b-v0.1", **changes))
    assert ("gqa", None) == (cache.geometry.layout.name, cache.window_tokens)


@pytest.mark.parametrize("used", [False, None, ...])
def test_window_that_qwen_does_not_use_is_no_window(used: object) -> None:
    """Configurations name its width all the same."""
    changes = {"use_sliding_window": used, "sliding_window": 512, "max_window_layers": 0}
    assert "gqa" == cache_of(load("qwen2.5-72b", **changes)).geometry.layout.name


def test_late_layers_have_the_window_that_qwen_uses() -> None:
    """transformers' configuration of Qwen2 gives it to layers from `max_window_layers` on."""
    changes = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 60}
    cache = cache_of(load("qwen2.5-72b", **changes))
    assert tuple(range(60, 80)) == dict(cache.geometry.sizes)["window_layer"]


def test_ranks_divide_heads_or_repeat_them() -> None:
    """Each of 4 ranks has 2 of Llama's 8 KV heads; of 16 ranks each two have the same head."""
    heads = [
        cache_of(load("llama-3.1-8b"), tensor_ranks=ranks).geometry.planes[0].row_shape[0]
        for ranks in (1, 4, 8, 16)
    ]
    assert [8, 2, 1, 1] == heads


def test_ranks_divide_the_heads_of_a_state() -> None:
    """4 ranks share 32 value heads and 16 key heads; the 2 KV heads are repeated."""
    planes = plane_rows("qwen3-next-80b-a3b", tensor_ranks=4)
    assert (1, 256) == planes["full.k"][2]
    assert (2 * 4 * 128 + 8 * 128, 3) == planes["state.conv"][2]
    assert (8, 128, 128) == planes["state.ssm"][2]


def test_all_ranks_have_the_latents() -> None:
    """All heads share a latent."""
    assert 70_272 == cache_of(load("deepseek-v3"), tensor_ranks=8).geometry.token_bytes


def test_last_stages_take_the_remaining_layers() -> None:
    """SGLang divides 61 layers into stages of 15, 15, 15 and 16; the fullest one is planned."""
    cache = cache_of(load("deepseek-v3"), stages=4)
    assert (range(45, 61), 61) == (cache.layers, cache.layer_count)
    assert 16 * 1152 == cache.geometry.token_bytes


def test_of_equally_long_stages_the_larger_cache_is_planned() -> None:
    """Three of 5 stages of Qwen3-Next have 10 layers; from 18 three attend, from 28 two."""
    cache = cache_of(load("qwen3-next-80b-a3b"), stages=5)
    assert (range(18, 28), 18) == (cache.layers, cache.geometry.first_layer)
    assert (19, 23, 27) == dict(cache.geometry.sizes)["full_layer"]


OLMO_3_32B = {
    "model_type": "olmo3",
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "hidden_size": 5120,
    "sliding_window": 4096,
    "max_position_embeddings": 65_536,
}


def test_fullest_stage_of_olmo_3_32b_is_the_last_of_three() -> None:
    """Six of its 22 layers keep all tokens, at 4 KiB each; of the first 22 only five would."""
    cache = cache_of(OLMO_3_32B, stages=3)
    assert (range(42, 64), 24_576) == (cache.layers, cache.lasting.token_bytes)


def test_stage_without_a_window_has_none() -> None:
    """If each layer of gpt-oss is a stage, the fullest stage keeps all its tokens."""
    cache = cache_of(load("gpt-oss-20b"), stages=24)
    assert ("gqa", range(1, 2), None) == (
        cache.geometry.layout.name,
        cache.layers,
        cache.window_tokens,
    )


def test_stage_with_one_kind_of_layers_has_its_layout() -> None:
    """If each layer is a stage, the fullest one attends and has no state."""
    cache = cache_of(load("qwen3-next-80b-a3b"), stages=48)
    assert ("gqa", range(3, 4), 0) == (
        cache.geometry.layout.name,
        cache.layers,
        cache.geometry.request_bytes,
    )
    only_states = load("qwen3-next-80b-a3b", layer_types=["linear_attention"] * 48)
    geometry = cache_of(only_states).geometry
    assert ("recurrent", 0) == (geometry.layout.name, geometry.token_bytes)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, 6),
        ({"indexer_types": ["full", "shared", "shared"] * 2}, (0, 3)),
        ({"index_topk_pattern": "FFSSSF"}, (0, 1, 5)),
        ({"index_topk_freq": 3}, (0, 1, 4)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (0, 2, 4)),
    ],
)
def test_only_layers_with_an_indexer_have_index_keys(
    changes: dict[str, Any], layers: int | tuple[int, ...]
) -> None:
    """GLM-5's configuration in transformers names them by kinds, a pattern or a schedule."""
    config = load("deepseek-v3.2", model_type="glm_moe_dsa", num_hidden_layers=6, **changes)
    assert layers == dict(cache_of(config).geometry.sizes)["index_layer"]


def pages_of(first: int, stop: int, page_size: int) -> int:
    """Counts the pages that hold the tokens from `first` to before `stop`."""
    return len({token // page_size for token in range(first, stop)})


@given(token_count=st.integers(1, 300), page_size=st.integers(1, 40), window=st.integers(1, 100))
def test_request_keeps_the_pages_of_its_tokens_and_of_its_window(
    token_count: int, page_size: int, window: int
) -> None:
    """Layers without a window keep all pages, and those with one the last; the test counts them."""
    cache = cache_of(load("gpt-oss-20b", sliding_window=window), page_size=page_size)
    kept = pages_of(0, token_count, page_size)
    in_window = pages_of(max(0, token_count - window), token_count, page_size)
    assert (kept + in_window) * page_size * 12 * 2 * KIB == cache.bytes_of(token_count)


def test_request_has_its_state_beside_its_pages() -> None:
    """17 tokens need two pages of 16."""
    cache = cache_of(load("qwen3-next-80b-a3b"))
    assert 32 * 24 * KIB + 77_266_944 == cache.bytes_of(17)


KINDS = ("full_attention", "mamba")
EXAONE = {"model_type": "exaone4", "use_sliding_window": ...}
REFUSED = [
    ("llama-3.1-8b", {"model_type": "jamba", "layer_types": [*KINDS]}, "'jamba'.*mamba.*gpt_oss"),
    ("llama-3.1-8b", {"model_type": ...}, "model_type, text_config"),
    ("llama-3.1-8b", {"model_type": ["llama"]}, "model_type, text_config"),
    (
        "llama-3.1-8b",
        {"num_hidden_layers": 2, "layer_types": [*KINDS]},
        "has mamba, which is",
    ),
    ("llama-3.1-8b", {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}, "linear"),
    ("llama-3.1-8b", {"layer_types": ["full_attention"]}, "1 entries for num_hidden_layers 32"),
    ("llama-3.1-8b", {"layer_types": 3}, "layer_types has 3 entries"),
    ("llama-3.1-8b", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ("llama-3.1-8b", {"num_hidden_layers": True}, "num_hidden_layers is True"),
    ("llama-3.1-8b", {"num_hidden_layers": 1 << 40}, "num_hidden_layers is 1099511627776"),
    ("llama-3.1-8b", {"num_key_value_heads": [8, 4]}, r"num_key_value_heads is \[8, 4\]"),
    ("llama-3.1-8b", {"hidden_size": 4097}, "4097 doesn't divide into 32 heads"),
    ("llama-3.1-8b", {"kv_lora_rank": 512}, "kv_lora_rank is 512"),
    ("llama-3.1-8b", {"is_encoder_decoder": True}, "across to an encoder"),
    ("llama-3.1-8b", {"num_kv_shared_layers": 10}, "num_kv_shared_layers is 10"),
    ("llama-3.1-8b", {"attention_chunk_size": 8192}, "attention_chunk_size is 8192"),
    ("qwen3-8b", {**EXAONE, "sliding_window": 64}, "no layer_types"),
    ("gemma-3-27b", {"sliding_window": None}, "sliding_window is None"),
    ("gemma-3-27b", {"use_bidirectional_attention": True}, "later tokens"),
    ("deepseek-v3", {"qk_rope_head_dim": ...}, "has no qk_rope_head_dim"),
    ("deepseek-v3.2", {"indexer_types": ["full"]}, "of 61 layers have an indexer"),
    ("deepseek-v3.2", {"indexer_types": ["half"] * 61}, "of 61 layers have an indexer"),
    ("deepseek-v3.2", {"indexer_types": 61}, "of 61 layers have an indexer"),
    ("qwen3-next-80b-a3b", {"mamba_ssm_dtype": "float64"}, "mamba_ssm_dtype is 'float64'"),
    ("qwen3-next-80b-a3b", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
]


@pytest.mark.parametrize(("name", "changes", "reason"), REFUSED)
def test_unknown_settings_are_refused_by_name(
    name: str, changes: dict[str, Any], reason: str
) -> None:
    """One line names the field, and nothing is guessed."""
    with pytest.raises(UsageError, match=reason) as caught:
        cache_of(load(name, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stages", "reason"), [(33, "don't divide over 33"), (0, "don't divide over 0")]
)
def test_stages_without_a_layer_are_refused(stages: int, reason: str) -> None:
    """Each stage needs at least one layer."""
    with pytest.raises(UsageError, match=f"32 layers {reason}"):
        cache_of(load("llama-3.1-8b"), stages=stages)


@pytest.mark.parametrize(
    ("ranks", "heads", "has_padding"),
    [(2, 4, False), (3, 3, True), (5, 2, True), (8, 1, False), (12, 1, True), (16, 1, False)],
)
def test_heads_that_do_not_divide_are_padded(ranks: int, heads: int, has_padding: bool) -> None:
    """SGLang on a CPU gives all ranks as many of Llama's 8 KV heads as the fullest rank has."""
    cache = cache_of(load("llama-3.1-8b"), tensor_ranks=ranks)
    assert (heads, has_padding) == (cache.geometry.planes[0].row_shape[0], cache.has_padding)


def test_heads_of_a_state_that_do_not_divide_are_padded() -> None:
    """Each of 3 ranks gets 6 of 16 key heads, each with its 2 value heads; so for 32 ranks."""
    for ranks, keys in ((3, 6), (32, 1)):
        cache = cache_of(load("qwen3-next-80b-a3b"), tensor_ranks=ranks)
        rows = {plane.name: plane.row_shape for plane in cache.geometry.planes}
        assert ((2 * keys + 2 * keys) * 128, 3) == rows["state.conv"]
        assert ((2 * keys, 128, 128), True) == (rows["state.ssm"], cache.has_padding)


def test_sizes_that_llava_1_5_leaves_out_are_llamas() -> None:
    """Its text_config names neither layers nor heads: Llama has 32 layers of 32 heads of 128."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32_064}
    cache = cache_of({"model_type": "llava", "text_config": text})
    assert 32 * 2 * 32 * 128 * 2 == cache.geometry.token_bytes


SMALL_DEEPSEEK = {
    "model_type": "deepseek_v2",
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "hidden_size": 1280,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
NO_HEADS = {"qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "kv_lora_rank": None}


@pytest.mark.parametrize(
    ("changes", "layout", "token_bytes"),
    [
        ({}, "mla", 12 * 576 * 2),
        ({"use_mla": True}, "mla", 12 * 576 * 2),
        ({"use_mla": False}, "gqa", 12 * 10 * (192 + 128) * 2),
        ({"use_mla": False, **NO_HEADS}, "gqa", 12 * 10 * (128 + 128) * 2),
    ],
)
def test_deepseek_without_latents_has_heads(
    changes: dict[str, Any], layout: str, token_bytes: int
) -> None:
    """`use_mla: false` decides, even if a rank is left in; keys and values differ in width."""
    geometry = cache_of({**SMALL_DEEPSEEK, **changes}).geometry
    assert (layout, token_bytes) == (geometry.layout.name, geometry.token_bytes)


@pytest.mark.parametrize(
    ("config", "heads", "head_dim"),
    [
        ({"model_type": "gptj", "n_layer": 28, "n_head": 16, "n_embd": 4096}, 16, 256),
        ({"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144}, 1, 128),
        (
            {"model_type": "gpt_bigcode", "n_head": 48, "n_embd": 6144, "multi_query": False},
            48,
            128,
        ),
        ({"model_type": "falcon"}, 1, 64),
        ({"model_type": "falcon", "multi_query": False}, 71, 64),
        ({"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 8}, 8, 64),
        ({"model_type": "opt", "hidden_size": 512, "num_attention_heads": 8}, 8, 64),
        ({"model_type": "jetmoe"}, 16, 128),
        ({"model_type": "gpt2", "num_attention_heads": 4, "hidden_size": 32}, 4, 8),
    ],
)
def test_heads_of_types_with_other_field_names(
    config: dict[str, Any], heads: int, head_dim: int
) -> None:
    """All queries share one head unless a field says otherwise; either name of a field is read."""
    assert (heads, head_dim) == cache_of(config).geometry.planes[0].row_shape


def test_default_sizes_are_those_of_transformers() -> None:
    """They equal the configuration classes; Kimi-K2 has DeepSeek's, and Qwen-VL a text part's."""
    elsewhere = {"kimi_k2": "deepseek_v3", "qwen2_vl": "qwen2_vl_text"}
    elsewhere |= {"qwen2_5_vl": "qwen2_5_vl_text"}
    assert set(DEFAULT_SIZES) == set(model_types._MODEL_TYPES)
    for name, sizes in DEFAULT_SIZES.items():
        kind = CONFIG_MAPPING[elsewhere.get(name, name)]
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}
        aliases = {**kind.attribute_map, **model_types._MODEL_TYPES[name].aliases}
        expected = {
            field: defaults[aliases.get(field, field)]
            for field in model_sizes._FIELDS
            if isinstance(defaults.get(aliases.get(field, field)), int)
        }
        assert expected == dict(sizes), name


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
FIELDS = sorted({key for name in NAMES for key in load(name)} | {"use_mla", "is_decoder"})


@given(
    name=st.sampled_from(NAMES),
    changes=st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4),
)
def test_any_configuration_is_planned_or_refused_in_one_line(
    name: str, changes: dict[str, Any]
) -> None:
    """Files are hostile: any value in any field gives a plan or a UsageError."""
    line = ""
    try:
        cache_of({**load(name), **changes})
    except UsageError as error:
        line = str(error)
    assert "\n" not in line
