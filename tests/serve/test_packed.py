"""A model whose matrices are packed computes the same, and is given back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Linear

from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.packed import PackedLinear, PackedWeights, _can_pack
from serve.harness import make_requests, run_all, tiny
from serve.small_models import model_of


def linear_layers(model: torch.nn.Module) -> list[type[Linear]]:
    """Returns the classes of a model's linear layers."""
    return [type(layer) for layer in model.modules() if isinstance(layer, Linear)]


def of_packed(layer: type[Linear]) -> type[Linear]:
    """Returns the class that stands for a linear layer of bfloat16 on this machine."""
    can_pack = _can_pack(torch.zeros(1, dtype=torch.bfloat16))
    return PackedLinear if layer is Linear and can_pack else layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("width", "out"), [(64, 64), (61, 131), (576, 1536)])
def test_a_packed_layer_computes_the_same_product(width: int, out: int, bias: bool) -> None:
    """The product differs by rounding at most, for one row and for many."""
    layer = Linear(width, out, bias=bias).bfloat16().requires_grad_(False)
    model = torch.nn.Sequential(layer)
    for row_count in (1, 5, 64):
        rows = torch.randn(1, row_count, width).bfloat16()
        with PackedWeights(model):
            found = model(rows)
        torch.testing.assert_close(found, layer(rows), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_a_model_is_given_back_as_it_was(family: str) -> None:
    """Its layers and its weights are the same objects, after the last of those who want it so.

    Meanwhile it has the same weights by the same names, tied ones too.
    """
    model = model_of(family, torch.bfloat16)
    layers, weights = linear_layers(model), dict(model.state_dict(keep_vars=True))
    first, second = PackedWeights(model), PackedWeights(model)
    for _ in range(2):  # a second release of the same one does nothing
        assert [of_packed(layer) for layer in layers] == linear_layers(model)
        first.release()
    assert [of_packed(layer) for layer in layers] == linear_layers(model)
    meanwhile = model.state_dict(keep_vars=True)
    assert list(weights) == list(meanwhile)
    assert all(weights[name] is meanwhile[name] for name in weights)
    second.release()
    assert layers == linear_layers(model)
    assert all(weights[name] is weight for name, weight in model.state_dict(keep_vars=True).items())


def test_matrices_of_float32_stay_as_they_are() -> None:
    """Another library multiplies them, which needs no order of its own."""
    model: Any = model_of("Llama", torch.float32)
    with PackedWeights(model):
        assert PackedLinear not in linear_layers(model)


@pytest.mark.parametrize("exact", [True, False])
def test_an_engine_packs_its_model_until_it_is_closed(exact: bool) -> None:
    """Requests are computed with packed matrices, and a closed engine leaves none."""
    source = tiny("bfloat16")
    before = linear_layers(source.model)
    engine = Engine.build(source, EngineOptions(exact=exact))
    assert [of_packed(layer) for layer in before] == linear_layers(source.model)
    run_all(engine, make_requests(1, count=2))
    engine.close()
    assert before == linear_layers(source.model)
