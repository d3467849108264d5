"""The adapter to transformers: its trial pass, its release, and scores."""

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
    """A served model is left as it was, and so is the way in which its experts run."""
    model = model_of("Qwen3Moe")
    expected = generated(model, [1, 2, 3]), model.config._experts_implementation
    HookedModel(model, pool_of(model), experts_by_token=True).release()
    assert expected == (generated(model, [1, 2, 3]), model.config._experts_implementation)


def full_gemma() -> Any:
    """Makes a Gemma 2 without windows, so that only its cap on scores is special."""
    config = tf.Gemma2Config(**SMALL, head_dim=12, layer_types=["full_attention"] * 2)
    config.sliding_window = None
    return tf.Gemma2ForCausalLM(config)


def full_gpt_oss() -> Any:
    """Makes a GPT-OSS without windows, so that only its attention sinks are special."""
    config = tf.GptOssConfig(
        **SMALL, num_local_experts=4, head_dim=12, layer_types=["full_attention"] * 2
    )
    config.sliding_window = None
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    return tf.GptOssForCausalLM(config)


@pytest.mark.parametrize(("build", "name"), [(full_gemma, "softcap"), (full_gpt_oss, "s_aux")])
def test_an_argument_that_changes_attention_is_refused_at_the_start(build: Any, name: str) -> None:
    """The trial pass names the argument, and the model gets its own attention back."""
    model = build().eval()
    before = model.config._attn_implementation
    with pytest.raises(UsageError, match=f"'{name}'"):
        HookedModel(model, pool_of(model), experts_by_token=False)
    assert before == model.config._attn_implementation


def test_an_architecture_that_attends_by_its_own_code_is_refused() -> None:
    """Its attention would never read the pool; one line names the model."""
    model = model_of("GPTNeo")
    pool = pool_of(model_of("GPT2"))
    with pytest.raises(UsageError, match=r"GPTNeoForCausalLM isn't served: its layers don.t call"):
        HookedModel(model, pool, experts_by_token=False)


def test_an_architecture_that_cannot_run_over_a_cache_is_refused() -> None:
    """The error that the model raises becomes one line."""
    model = model_of()
    forward = model.model.forward
    model.model.forward = lambda *_, **__: [][0]
    try:
        with pytest.raises(UsageError, match=r"it can't run over a paged cache \(IndexError"):
            HookedModel(model, pool_of(model), experts_by_token=False)
    finally:
        model.model.forward = forward


def test_a_model_with_a_layer_that_skips_the_attention_is_refused() -> None:
    """A layer that doesn't call the replaceable attention would attend to this step only."""
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
    """One layer gives its attention a window that is shorter than the context."""
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
    """The trial pass names both shapes: Qwen3's heads are 128 wide, this Llama's 12."""
    with pytest.raises(UsageError, match=r"layer 0 .* k rows of \[2, 12\] .* of \[2, 128\]"):
        HookedModel(model_of(), pool_of(model_of("Qwen3")), experts_by_token=False)


def test_quiet_restores_the_settings() -> None:
    """transformers prints messages again, also after an error."""
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
    """top_k keeps the two highest; of these, top_p needs only the higher."""
    scores, never = torch.tensor([[0.0, 3.0, 2.0, 1.0]]), float("-inf")
    assert [[0.0, 1.5, 1.0, 0.5]] == warper(2, 0, 1)(scores).tolist()
    assert [[never, 1.5, 1.0, never]] == warper(2, 2, 1)(scores).tolist()
    assert [[never, 1.5, never, never]] == warper(2, 2, 0.5)(scores).tolist()
