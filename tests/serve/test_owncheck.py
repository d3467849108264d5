"""A model whose answers through kvtide would differ from its own is refused with the reason."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

from kvtide.device import CPUDevice
from kvtide.errors import UsageError
from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.models import OpenModel
from kvtide.serve.owncheck import OwnCheck, check_own_answers
from serve.harness import tiny
from serve.small_models import SMALL, model_of

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:]
)
EXACT = pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])

NOT_CAUSAL = "its attention isn't causal"
FROM_CACHE = "it takes positions from its cache's length"
NOT_FROM_0 = "it doesn't count positions from 0"


def encoder(**changes: Any) -> dict[str, Any]:
    """Returns the sizes of a BERT and similar models, with their padding token."""
    sizes = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    return {**sizes, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, **changes}


def decoder_of_two() -> dict[str, Any]:
    """Returns the sizes of a BART and similar models."""
    return {
        "vocab_size": 199,
        "d_model": 48,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 96,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "pad_token_id": 1,
        "max_position_embeddings": 512,
    }


WRONG: dict[str, tuple[Callable[[], dict[str, Any]], list[str]]] = {
    "Roberta": (lambda: encoder(is_decoder=True), [NOT_FROM_0]),
    "XLMRobertaXL": (lambda: encoder(is_decoder=True), [NOT_FROM_0]),
    "Bart": (decoder_of_two, [FROM_CACHE]),
    "Marian": (decoder_of_two, [FROM_CACHE]),
    "BigBirdPegasus": (decoder_of_two, [FROM_CACHE]),
    "JetMoe": (
        lambda: {**SMALL, "num_key_value_heads": 2, "kv_channels": 12, "num_local_experts": 4},
        ["it makes 4 heads of 2 KV heads in an unknown order"],
    ),
}


@functools.cache
def wrong_model(family: str, dtype: torch.dtype) -> Any:
    """Makes a small random model that would be served wrongly; no test changes it."""
    torch.manual_seed(3)
    config = getattr(tf, f"{family}Config")(**WRONG[family][0]())
    return tf.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def refusal(model: Any, *, exact: bool = True) -> str:
    """Returns the line with which the check refuses a model."""
    with pytest.raises(UsageError, match="isn't served") as caught:
        check_own_answers(model, CPUDevice(), exact=exact)
    line = str(caught.value)
    assert "\n" not in line
    return line


@DTYPES
@pytest.mark.parametrize("family", WRONG)
def test_models_that_would_answer_otherwise_are_refused_with_the_reason(
    family: str, dtype: torch.dtype
) -> None:
    """The line names the model and every reason that applies, and no other."""
    model = wrong_model(family, dtype)
    line = refusal(model)
    assert f"'{model.config.model_type}'" in line or family in line
    for reason in (NOT_CAUSAL, FROM_CACHE, NOT_FROM_0, *WRONG[family][1]):
        assert (reason in WRONG[family][1]) == (reason in line)


@EXACT
@DTYPES
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe", "GPTNeoX", "OPT"])
def test_models_that_answer_as_by_themselves_are_served(
    family: str, dtype: torch.dtype, exact: bool
) -> None:
    """The difference is float32's rounding in every dtype, far from the limit."""
    found = check_own_answers(model_of(family, dtype), CPUDevice(), exact=exact)
    assert isinstance(found, OwnCheck)
    assert found.deviation < 2e-5


@DTYPES
def test_attention_to_later_tokens_is_named(dtype: torch.dtype) -> None:
    """A Llama layer attends to later tokens."""
    torch.manual_seed(3)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)).to(dtype).eval()
    model.model.layers[1].self_attn.is_causal = False
    line = refusal(model)
    assert "from position 0 on: its attention isn't causal (a later token changes" in line


def test_an_engine_is_not_built_over_such_a_model() -> None:
    """The model is refused when the engine is built, before the first request."""
    source = OpenModel(wrong_model("Bart", torch.float32), tiny().tokenizer, "a/bart", frozenset())
    with pytest.raises(UsageError, match=FROM_CACHE):
        Engine.build(source, EngineOptions())


def test_a_mistake_in_the_models_own_dtype_alone_is_enough() -> None:
    """The check runs in the model's dtype as well as in float32."""
    model = model_of("Llama", torch.bfloat16)

    def disturb(module: Any, arguments: Any, keywords: Any, hidden: torch.Tensor) -> torch.Tensor:
        is_served = keywords.get("cache") is not None
        return hidden.flip(1) if is_served and hidden.dtype == torch.bfloat16 else hidden

    hook = model.model.layers[1].register_forward_hook(disturb, with_kwargs=True)
    try:
        assert "in torch.bfloat16, though not in float32" in refusal(model)
    finally:
        hook.remove()


@DTYPES
@pytest.mark.parametrize("place", range(17))
def test_one_wrong_position_is_enough(place: int, dtype: torch.dtype) -> None:
    """While the model is served, a layer changes the state of one token by a thousandth."""
    model = model_of("Llama", dtype)

    def disturb(module: Any, arguments: Any, keywords: Any, hidden: torch.Tensor) -> torch.Tensor:
        if keywords.get("cache") is None:
            return hidden
        there = (keywords["position_ids"] == place)[..., None]
        return torch.where(there, hidden * 1.001 + 0.01, hidden)

    hook = model.model.layers[1].register_forward_hook(disturb, with_kwargs=True)
    try:
        assert f"from position {place} on" in refusal(model)
    finally:
        hook.remove()


@pytest.mark.parametrize(("calls", "is_refused"), [({2}, False), ({2, 8}, True)])
def test_a_near_tie_of_two_experts_is_no_reason_to_refuse(
    calls: set[int], is_refused: bool
) -> None:
    """Rounding may choose another expert for one token, but not for two."""
    model, count = model_of(), itertools.count()

    def flip(module: Any, arguments: Any, logits: torch.Tensor) -> torch.Tensor:
        # The head runs six times in each try: in a trial, in four steps, and in the model alone.
        return logits * 1.01 if next(count) in calls else logits

    hook = model.lm_head.register_forward_hook(flip)
    try:
        with pytest.raises(UsageError) if is_refused else contextlib.nullcontext():
            check_own_answers(model, CPUDevice(), exact=True)
    finally:
        hook.remove()


def state_of(model: Any) -> tuple[object, ...]:
    """Returns all that a check could change: tensors, their bytes, hooks and settings."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return (
        [(name, tensor.data_ptr(), tensor.dtype, tensor.device) for name, tensor in tensors],
        [
            tensor.detach().view(torch.uint8).numpy().tobytes()
            for _, tensor in tensors
            if tensor.dim()
        ],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        [module.training for module in model.modules()],
        model.config.to_dict(),
        model.config._attn_implementation,
        model.config._experts_implementation,
        torch.random.get_rng_state().tolist(),
    )


@DTYPES
@pytest.mark.parametrize("family", ["Qwen3Moe", "Bart"])
def test_the_model_is_left_as_it_was(family: str, dtype: torch.dtype) -> None:
    """A model that is refused is left unchanged, too."""
    model = wrong_model(family, dtype) if family in WRONG else model_of(family, dtype)
    before = state_of(model)
    if family in WRONG:
        refusal(model)
    else:
        check_own_answers(model, CPUDevice(), exact=True)
    assert before == state_of(model)


def test_the_model_is_left_as_it_was_after_an_interrupt() -> None:
    """Ctrl-C arrives while a layer's weights are wide; they become narrow again."""
    model = model_of("Llama", torch.bfloat16)
    before = state_of(model)

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        check_own_answers(model, CPUDevice(), exact=True)
    hook.remove()
    assert before == state_of(model)


def test_only_the_running_layer_is_held_twice() -> None:
    """A model that fills half of the memory can be checked: layers that don't run stay narrow."""
    model = model_of("Llama", torch.bfloat16)
    layers = model.model.layers
    seen: set[tuple[torch.dtype, torch.dtype]] = set()

    def look(*arguments: Any) -> None:
        seen.add((layers[0].self_attn.q_proj.weight.dtype, layers[1].self_attn.q_proj.weight.dtype))

    hooks = [layer.mlp.register_forward_hook(look) for layer in layers]
    check_own_answers(model, CPUDevice(), exact=True)
    for hook in hooks:
        hook.remove()
    narrow, wide = torch.bfloat16, torch.float32
    assert {(wide, narrow), (narrow, wide), (narrow, narrow)} == seen


@pytest.mark.parametrize("layer", [0, 1])
@DTYPES
def test_weights_that_are_not_numbers_are_named(dtype: torch.dtype, layer: int) -> None:
    """The model's plain forward pass shows them, whether or not they reach the cache."""
    torch.manual_seed(3)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL)).to(dtype).eval()
    with torch.no_grad():
        model.model.layers[layer].mlp.up_proj.weight[3, 5] = float("nan")
    assert "without kvtide it gives NaN" in refusal(model)


@pytest.mark.parametrize("ruled_out", [float("-inf"), torch.finfo(torch.float32).min])
def test_tokens_that_a_model_rules_out_are_no_difference(ruled_out: float) -> None:
    """Some models give tokens that don't exist the lowest number, or minus infinity."""
    model = model_of()

    def rule_out(module: Any, arguments: Any, logits: torch.Tensor) -> torch.Tensor:
        return torch.cat([logits[..., :190], torch.full_like(logits[..., 190:], ruled_out)], -1)

    hook = model.lm_head.register_forward_hook(rule_out)
    try:
        assert check_own_answers(model, CPUDevice(), exact=True).deviation < 2e-5
    finally:
        hook.remove()


def test_a_short_context_is_not_exceeded() -> None:
    """A model of five positions has no sixth position."""
    torch.manual_seed(3)
    sizes = {**SMALL, "max_position_embeddings": 5}
    del sizes["num_key_value_heads"], sizes["intermediate_size"]
    model = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes)).eval()
    assert check_own_answers(model, CPUDevice(), exact=False).deviation < 2e-5


@DTYPES
def test_experts_of_any_width_are_compared(dtype: torch.dtype) -> None:
    """transformers' preferred form of experts needs rows of whole 16 bytes."""
    torch.manual_seed(3)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 35}
    model = tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**SMALL, **experts)).to(dtype).eval()
    before = model.config._experts_implementation
    assert check_own_answers(model, CPUDevice(), exact=True).deviation < 1e-4
    assert before == model.config._experts_implementation
