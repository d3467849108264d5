"""The self-check finds planted dependences on the row count, and says so where none is safe.

What a library does on one machine isn't asserted: test_processors.py asserts that what is accepted
is exact, whatever the machine does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from kvtide.device import CPUDevice
from kvtide.serve import attention, probes, selfcheck
from kvtide.serve.batch import ExactRules, RowCounts
from kvtide.serve.operations import Product, SingleOperation
from kvtide.serve.selfcheck import RowCheck, find_rows
from serve import small_models

Change = Callable[[int, Tensor], Tensor]


def model_of(width: int = 128, dtype: torch.dtype = torch.float32) -> Any:
    """A small random Llama; ``width`` is that of its feed-forward layers."""
    torch.manual_seed(4)
    config = tf.LlamaConfig(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return tf.LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture
def model() -> Any:
    """Of widths that every vector length divides."""
    return model_of()


class Planted(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Products row by row and activations in float64, so that what is found is what is planted.

    The products of one layer size get ``change(row_count, output)``.
    """

    def __init__(self, change: Change | None = None, out_features: int = 128) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._change = change
        self._out_features = out_features
        self._activation: Callable[[Tensor], Tensor] = lambda given: given

    def with_activation(self, activation: Callable[[Tensor], Tensor]) -> Planted:
        """And activations that get ``activation(input)`` in place of their input."""
        self._activation = activation
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Does what is planted in place of torch's own."""
        if func is torch.ops.aten.linear.default:
            return self._product(*args)
        if func is torch.ops.aten.addmm.default:
            return self._product(args[1], args[2].T, args[0])
        if func is torch.ops.aten.silu.default:
            given = self._activation(args[0]).double()
            return (given * given.sigmoid()).to(args[0].dtype)
        return func(*args, **(kwargs or {}))

    def _product(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = (inputs[..., None, :] * weight).sum(-1)
        if bias is not None:
            out = out + bias
        if self._change is None or len(weight) != self._out_features:
            return out
        rows = out.reshape(-1, len(weight))
        return self._change(len(rows), rows).reshape(out.shape)


def check(model: Any, max_rows: int, planted: Planted | None = None) -> RowCheck:
    """What the self-check finds where this is planted."""
    with planted or Planted():
        return find_rows(model, CPUDevice(), max_rows=max_rows)


def rules(*counts: int, share_attention: bool = True) -> ExactRules:
    """Passes of these row counts."""
    return ExactRules(RowCounts(counts), RowCounts(counts), share_attention)


def test_without_dependence_every_count_is_safe(model: Any) -> None:
    """From one row to all that were asked for."""
    found = check(model, 24)
    assert rules(*range(1, 25)) == found.rules
    assert "1 to 24" == found.exact_rows
    assert "passes of 1 to 24 rows agree bit for bit" == found.detail


@pytest.mark.parametrize("out_features", [32, 64, 128])
def test_the_range_ends_where_the_numbers_change(model: Any, out_features: int) -> None:
    """Below 5 rows and above 20 another kernel: whichever layer it is, 5 to 20 is found."""
    planted = Planted(
        lambda count, out: out + (0.0 if 5 <= count <= 20 else 1e-3 * count), out_features
    )
    found = check(model, 24, planted).rules
    assert found is not None
    assert RowCounts(tuple(range(5, 21))) == found.rows


def test_counts_that_agree_need_not_be_neighbours(model: Any) -> None:
    """A kernel for four rows at once leaves the multiples of four."""
    planted = Planted(lambda count, out: out if count % 4 == 0 else out + 1e-3 * count)
    found = check(model, 16, planted)
    assert rules(4, 8, 12, 16) == found.rules
    assert "4 to 16 in steps of 4" == found.exact_rows


def test_prompts_go_by_counts_of_their_own(model: Any) -> None:
    """Where few rows agree with few and many with many, answers stay few."""
    planted = Planted(lambda count, out: out if count <= 64 else out + 1e-3)
    found = check(model, 256, planted).rules
    assert found is not None
    assert RowCounts(tuple(range(1, 65))) == found.rows
    assert RowCounts(tuple(range(96, 257, 32))) == found.chunk_rows


def test_counts_that_all_differ_leave_a_single_one(model: Any) -> None:
    """Where each count has numbers of its own, one of them is fixed: all passes have it."""
    found = check(model, 12, Planted(lambda count, out: out + 1e-3 * count)).rules
    assert found is not None
    assert len(found.rows.counts) == 1


def test_where_the_place_matters_each_row_runs_alone(model: Any) -> None:
    """Passes of one row are left, and the check says what that costs, and why."""
    planted = Planted(lambda count, out: out + 1e-3 * torch.arange(count)[:, None])
    found = check(model, 12, planted)
    assert rules(1) == found.rules
    why = "that is slow: all passes have 1 row, since other numbers of rows change a product"
    assert why in found.detail
    assert "--fast" in found.detail


def test_the_last_numbers_of_an_activation_leave_counts_without_any() -> None:
    """Eight numbers go at once, the rest in another way: of rows of 100, every second count."""

    def rest_differs(given: Tensor) -> Tensor:
        if not given.is_contiguous():
            return given + 1e-2
        flat = given.flatten().clone()
        flat[len(flat) // 8 * 8 :] += 1e-2
        return flat.view(given.shape)

    planted = Planted().with_activation(rest_differs)
    assert rules(2, 4, 6, 8, 10, 12) == check(model_of(100), 12, planted).rules


def test_a_dependence_outside_the_probes_is_found(model: Any) -> None:
    """A norm that looks at the whole pass: only whole passes can show it."""
    model.model.norm.register_forward_hook(
        lambda module, arguments, out: out + 1e-3 * out.mean(1, keepdim=True)
    )
    assert rules(1) == check(model, 12).rules


def test_numbers_that_never_repeat_leave_no_exact_mode(model: Any) -> None:
    """Not even alone does a row give the same bits twice: the check says so."""
    model.model.norm.register_forward_hook(
        lambda module, arguments, out: out + 1e-3 * torch.randn(())
    )
    found = check(model, 12)
    assert found.rules is None
    assert "no row count up to 12 is safe" in found.detail
    assert "1 to 12" in found.detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_depends_on_its_thread_is_found(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of a call adds in another order: then each request has a call of its own."""

    def by_thread(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
        first = scaled_dot_product_attention(query, key, value, **named)
        if len(query) == 1:
            return first
        named["attn_mask"] = named["attn_mask"].flip(-1)
        second = scaled_dot_product_attention(query, key.flip(2), value.flip(2), **named)
        return torch.cat([first[: len(query) // 2], second[len(query) // 2 :]])

    monkeypatch.setattr(attention, "scaled_dot_product_attention", by_thread)
    found = check(model_of(dtype=dtype), 24)
    assert found.rules is not None
    assert not found.rules.share_attention
    why = "each request needs a call by itself, since others in it change attention over 64 tokens"
    assert why in found.detail


def test_a_library_that_may_not_repeat_its_results_is_named(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where exact mode is slow and MKL's mode isn't in force, that is the likely reason."""
    monkeypatch.setattr(selfcheck, "is_mkl_repeatable", lambda: False)
    planted = Planted(lambda count, out: out + 1e-3 * torch.arange(count)[:, None])
    assert "set MKL_CBWR=AUTO" in check(model, 12, planted).detail


def test_the_products_alone_show_where_the_place_matters(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole passes could miss it by chance: the probes move their rows, too."""
    monkeypatch.setattr(selfcheck._Trial, "passes_agree", lambda trial, rules, chunks: True)
    planted = Planted(lambda count, out: out + 1e-3 * torch.arange(count)[:, None])
    assert rules(1) == check(model, 12, planted).rules


def test_products_of_weights_that_lie_the_other_way_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPT-2 keeps its weights [in, out], and multiplies by another operation than others do."""
    monkeypatch.setattr(selfcheck._Trial, "passes_agree", lambda trial, rules, chunks: True)
    planted = Planted(lambda count, out: out if count > 9 else out + 1e-3, out_features=256)
    found = check(small_models.model_of("GPT2"), 16, planted).rules
    assert found is not None
    assert found.rows.counts[0] > 9


def test_a_large_head_is_measured_over_the_range(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary's weight is too large for every count, but not left out."""
    monkeypatch.setattr(selfcheck, "_LARGE_WEIGHT", 131 * 64 - 1)
    monkeypatch.setattr(selfcheck._Trial, "passes_agree", lambda trial, rules, chunks: True)
    planted = Planted(lambda count, out: out if count > 9 else out + 1e-3, out_features=131)
    assert rules(32) == check(model, 32, planted).rules


def test_the_model_is_left_as_it_was(model: Any) -> None:
    """Weights and attention."""
    before = model.config._attn_implementation
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    find_rows(model, CPUDevice(), max_rows=8)
    assert before == model.config._attn_implementation
    for name, weight in model.state_dict().items():
        assert torch.equal(weights[name], weight)


def test_the_probe_shows_another_order_of_additions_in_every_row() -> None:
    """Exact sums are zero, so what is computed is rounding: bfloat16 can't hide a difference."""
    product = Product(48, 64, has_bias=False)
    probe = probes.ProductProbe(product, torch.bfloat16, torch.device("cpu"), 16)
    exact = probe.inputs.double() @ probe.weight.double().T
    assert torch.equal(torch.zeros_like(exact), exact)
    forwards = probe.inputs.float() @ probe.weight.float().T
    turned = probe.inputs.float().flip(1) @ probe.weight.float().flip(1).T
    assert (forwards.bfloat16() != turned.bfloat16()).any(1).all()


@pytest.mark.parametrize("of_scores", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_attention_probe_shows_another_order_of_additions(
    dtype: torch.dtype, of_scores: bool
) -> None:
    """Head by head, in most of its numbers: of the products in a score, and of the values."""
    sizes = probes.AttentionSizes(6, 2, 64, 64, dtype)
    probe = probes.AttentionProbe(sizes, torch.device("cpu"), 64, of_scores=of_scores)

    def output() -> Tensor:
        found = probe.outcome(1)
        assert found is not None
        return found.view(dtype).view(6, 64)

    forward = output()
    probe.query, probe.keys = probe.query.flip(2), probe.keys.flip(2)
    if not of_scores:
        slots = torch.arange(64)
        slots[:61] = slots[:61].flip(0)
        probe.keys, probe.values = probe.keys[slots], probe.values[slots]
    assert ((forward != output()).float().mean(1) > 0.5).all()


@pytest.mark.parametrize("family", ["GPTJ", "Olmo"])
def test_an_operation_along_an_axis_of_its_own_is_tried(family: str) -> None:
    """It can't be applied to a line of numbers, and so may have two ways."""
    assert find_rows(small_models.model_of(family), CPUDevice(), max_rows=16).rules is not None


def norm_probe(width: int, weight: float = 1.0) -> probes.SingleProbe:
    """The probe of a norm in bfloat16 with these weights."""
    weights = torch.full((width,), weight).bfloat16(), torch.zeros(width).bfloat16()
    call = torch.ops.aten.layer_norm.default
    norm = SingleOperation(
        call, (1, None, width), (0, 1, 2), torch.bfloat16, ([width], *weights), {}
    )
    return probes.SingleProbe(norm, torch.device("cpu"))


@pytest.mark.parametrize("width", [64, 256])
def test_a_norm_is_tried_with_numbers_that_it_can_take(width: int) -> None:
    """Of the largest numbers of bfloat16 it would make NaN or zeros, which show nothing."""
    outcome = norm_probe(width).outcome(3)
    assert outcome is not None
    found = outcome.view(torch.bfloat16)
    assert found.isfinite().all()
    assert 16 < len(set(found.flatten().tolist()))


def test_rows_that_are_not_a_number_agree() -> None:
    """NaN isn't equal to itself, but bits are what exact mode promises."""
    probe = norm_probe(64, weight=torch.nan)
    assert {3: 0, 5: 0} == selfcheck._kinds_of(probe, [3, 5])
