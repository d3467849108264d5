"""A model whose matrices are packed computes the same, and is given back as it was."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import Linear

from kvtide.device import CPUDevice
from kvtide.serve import packed
from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.packed import PackedLinear, PackedWeights, WideLinear, packed_bytes_of
from kvtide.serve.probes import ProductProbe
from kvtide.serve.trial_passes import TrialPasses
from serve.harness import answers, make_requests, run_all, tiny, token_bytes
from serve.small_models import model_of


def linear_layers(model: torch.nn.Module) -> list[type[Linear]]:
    """Returns the classes of a model's linear layers."""
    return [type(layer) for layer in model.modules() if isinstance(layer, Linear)]


def of_packed(layer: type[Linear]) -> type[Linear]:
    """Returns the class that stands for a linear layer of bfloat16 in a packed model."""
    form = packed._form_for(torch.bfloat16)
    return layer if form is None or layer is not Linear else form


@pytest.fixture(params=["as here", "wide"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs as it is best on this processor, and as on one without bfloat16 instructions."""
    if request.param == "wide":
        monkeypatch.setattr(packed, "_multiplies_bfloat16", lambda: False)


def test_a_processor_without_instructions_for_bfloat16_multiplies_wide_copies() -> None:
    """One that has them multiplies matrices in an order of its own."""
    expected = PackedLinear if packed._multiplies_bfloat16() else WideLinear
    assert expected is packed._form_for(torch.bfloat16)
    assert packed._form_for(torch.float32) is None


@pytest.mark.parametrize("bias", [True, False])
def test_a_wide_layer_rounds_once(bias: bool) -> None:
    """Sums are those of float32, and the result is the bfloat16 that is nearest to the sum."""
    layer = Linear(64, 64, bias=bias).bfloat16().requires_grad_(False)
    rows = torch.randn(5, 64).bfloat16()
    wide = WideLinear(layer)
    found = wide(rows)
    assert found.dtype is torch.bfloat16
    exact = rows.double() @ layer.weight.double().T
    if bias:
        exact += layer.bias.double()
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)


def copy_bytes_of(layer: torch.nn.Module) -> int:
    """Returns the memory of a layer's copy. An opaque one is as large as the matrix."""
    if isinstance(layer, WideLinear):
        return layer._wide.nbytes
    return layer.weight.nbytes if isinstance(layer, PackedLinear) else 0


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


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_layer_with_a_hook_stays_as_it_is(hook: str) -> None:
    """The hook belongs to the answer. Weight normalisation is one, too."""
    layers = [Linear(64, 64).bfloat16().requires_grad_(False) for _ in range(2)]
    getattr(layers[0], hook)(lambda *_: None)
    model = torch.nn.Sequential(*layers)
    counted = packed_bytes_of(model)
    with PackedWeights(model):
        assert [Linear, of_packed(Linear)] == linear_layers(model)
        assert counted == copy_bytes_of(model[1])


def test_a_copy_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be no memory for one in the middle."""
    layers = [Linear(64, 64).bfloat16().requires_grad_(False) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    results = iter([layers[0].weight])
    monkeypatch.setattr(packed, "_form_for", lambda _: PackedLinear)
    monkeypatch.setattr(packed, "pack", lambda _: next(results))
    with pytest.raises(StopIteration):
        PackedWeights(model)
    assert layers == list(model)


def test_matrices_of_float32_stay_as_they_are() -> None:
    """Another library multiplies them, which needs no order of its own."""
    model: Any = model_of("Llama", torch.float32)
    with PackedWeights(model):
        assert {Linear} == {*linear_layers(model)}


def test_the_copies_take_what_was_counted() -> None:
    """Only linear layers of bfloat16 are copied."""
    model: Any = model_of("Llama", torch.bfloat16)
    counted = packed_bytes_of(model)
    with PackedWeights(model):
        layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
        assert sum(map(copy_bytes_of, layers)) == counted


def test_a_model_is_packed_only_where_half_of_what_is_spare_suffices() -> None:
    """The first who wants a model decides for all, since they share a self-check."""
    for missing_bytes in (0, 1):
        model: Any = copy.deepcopy(model_of("Llama", torch.bfloat16))
        before = linear_layers(model)
        counted = packed_bytes_of(model)
        fits = not (counted and missing_bytes)
        with PackedWeights(model, 2 * counted - missing_bytes) as first, PackedWeights(model):
            assert fits == first.is_packed
            expected = [of_packed(layer) for layer in before] if fits else before
            assert expected == linear_layers(model)
        with PackedWeights(model) as later:
            assert fits == later.is_packed


def test_an_engine_without_memory_for_copies_answers_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It multiplies the matrices as they were loaded, and its self-check measures that."""
    monkeypatch.setattr(packed, "packed_bytes_of", lambda _: 1 << 60)
    source = replace(tiny("bfloat16"), model=copy.deepcopy(tiny("bfloat16").model))
    plenty, scarce = make_requests(1, count=4), make_requests(1, count=4)
    for requests, options in (
        (plenty, EngineOptions(keep_logits=True, kv_memory_bytes=9000 * token_bytes(source))),
        (scarce, EngineOptions(keep_logits=True, kv_memory_bytes=100 * token_bytes(source))),
    ):
        engine = Engine.build(source, options)
        assert {Linear} == {*linear_layers(source.model)}
        run_all(engine, requests)
        engine.close()
    assert engine.stats.retractions >= 1
    assert answers(plenty) == answers(scarce)


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


def test_products_are_tried_in_the_dtype_in_which_they_are_computed() -> None:
    """The self-check knows nothing of how a model is packed: it sees the operations of a pass."""
    model: Any = model_of("Llama", torch.bfloat16)
    form = packed._form_for(torch.bfloat16)
    with PackedWeights(model), torch.inference_mode():
        small, large = TrialPasses(model, CPUDevice(), 8).probes()
    tried = [probe for probe in (*small, *large) if isinstance(probe, ProductProbe)]
    expected = torch.float32 if form is WideLinear else torch.bfloat16
    assert {expected} == {probe.weight.dtype for probe in tried}
