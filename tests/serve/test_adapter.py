"""What touches transformers: the trial pass refuses, release leaves no trace, scores narrow."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.utils import logging

from kvtide.errors import UsageError
from kvtide.serve.adapter import HookedModel, warper
from kvtide.serve.adapter_files import quiet
from serve.small_models import SMALL, generated, model_of, pool_of


def test_a_released_model_generates_again() -> None:
    """Being served leaves no trace in the model, nor in how its experts run."""
    model = model_of("Qwen3Moe")
    expected = generated(model, [1, 2, 3]), model.config._experts_implementation
    HookedModel(model, pool_of(model), experts_by_token=True).release()
    assert expected == (generated(model, [1, 2, 3]), model.config._experts_implementation)


def full_gemma() -> Any:
    """Gemma 2 with no windows: what is left is that it caps its scores."""
    config = tf.Gemma2Config(**SMALL, head_dim=12, layer_types=["full_attention"] * 2)
    config.sliding_window = None
    return tf.Gemma2ForCausalLM(config)


def full_gpt_oss() -> Any:
    """GPT-OSS with no windows: what is left is its attention sinks."""
    config = tf.GptOssConfig(
        **SMALL, num_local_experts=4, head_dim=12, layer_types=["full_attention"] * 2
    )
    config.sliding_window = None
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    return tf.GptOssForCausalLM(config)


@pytest.mark.parametrize(("build", "name"), [(full_gemma, "softcap"), (full_gpt_oss, "s_aux")])
def test_an_argument_that_changes_attention_is_refused_at_the_start(build: Any, name: str) -> None:
    """By the trial pass, naming the argument; the model gets its own attention back."""
    model = build().eval()
    before = model.config._attn_implementation
    with pytest.raises(UsageError, match=f"'{name}'"):
        HookedModel(model, pool_of(model), experts_by_token=False)
    assert before == model.config._attn_implementation


def test_an_architecture_that_attends_by_its_own_code_is_refused() -> None:
    """It would never look into the pool; a person reads one line that names it."""
    model = model_of("GPTNeo")
    pool = pool_of(model_of("GPT2"))
    with pytest.raises(UsageError, match=r"GPTNeoForCausalLM isn't served: its layers don.t call"):
        HookedModel(model, pool, experts_by_token=False)


def test_an_architecture_that_cannot_run_over_a_cache_is_refused() -> None:
    """Whatever it raises."""
    model = model_of()
    forward = model.model.forward
    model.model.forward = lambda *_, **__: [][0]
    try:
        with pytest.raises(UsageError, match=r"it can't run over a paged cache \(IndexError"):
            HookedModel(model, pool_of(model), experts_by_token=False)
    finally:
        model.model.forward = forward


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    """Layers that never call the replaceable attention would attend to this step only."""
    model = model_of()
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    try:
        with pytest.raises(UsageError, match="the attention 1 times in 1 layers"):
            HookedModel(model, pool_of(model), experts_by_token=False)
    finally:
        layer.forward = forward


def test_a_window_that_the_configuration_did_not_show_is_refused() -> None:
    """A layer that hands one to its attention, shorter than the context."""
    model = model_of("Qwen2")
    attention = model.model.layers[1].self_attn
    attention.sliding_window = 511
    try:
        with pytest.raises(UsageError, match=r"sliding window \(511 of 512 positions\)"):
            HookedModel(model, pool_of(model), experts_by_token=False)
        attention.sliding_window = 512
        HookedModel(model, pool_of(model), experts_by_token=False).release()
    finally:
        attention.sliding_window = None


def test_rows_of_another_shape_than_the_pools_are_refused() -> None:
    """By the trial pass, with both shapes: Qwen3's heads are 128 wide, this Llama's 12."""
    with pytest.raises(UsageError, match=r"layer 0 .* k rows of \[2, 12\] .* of \[2, 128\]"):
        HookedModel(model_of(), pool_of(model_of("Qwen3")), experts_by_token=False)


def test_quiet_sets_back_what_was_set() -> None:
    """Also after an error: who wants transformers' messages gets them again."""
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    with contextlib.suppress(KeyError), quiet():
        during = logging.get_verbosity(), logging.is_progress_bar_enabled()
        raise KeyError
    after = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(before[0])
    if not before[1]:
        logging.disable_progress_bar()
    assert (logging.ERROR, False) == during
    assert (logging.INFO, True) == after


def test_scores_are_divided_by_temperature_and_the_unlikely_excluded() -> None:
    """First the two highest by top_k; of these, the lower one isn't needed to reach top_p."""
    scores, never = torch.tensor([[0.0, 3.0, 2.0, 1.0]]), float("-inf")
    assert [[0.0, 1.5, 1.0, 0.5]] == warper(2, 0, 1)(scores).tolist()
    assert [[never, 1.5, 1.0, never]] == warper(2, 2, 1)(scores).tolist()
    assert [[never, 1.5, never, never]] == warper(2, 2, 0.5)(scores).tolist()
