"""The self-check finds planted dependences on the row count, and says if no count is safe.

No test asserts what a library does on this machine. test_processors.py asserts that what is
accepted is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from kvtide.device import CPUDevice
from kvtide.serve import attention, probes, query_blocks, selfcheck, trial_passes
from kvtide.serve.batch import ExactRules, RowCounts
from kvtide.serve.operations import Product, SingleOperation
from kvtide.serve.packed import PackedLinear, _form_for, is_packed_linear
from kvtide.serve.query_blocks import QUERY_ROWS, WHOLE_BLOCKS
from kvtide.serve.selfcheck import RowCheck, find_rows
from kvtide.serve.trial_passes import TrialPasses
from serve import small_models

Change = Callable[[int, Tensor], Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def model_of(width: int = 128, dtype: torch.dtype = torch.float32) -> Any:
    """Makes a small random Llama with feed-forward layers of this width."""
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
    """A model whose widths every vector length divides."""
    return model_of()


class Planted(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Computes products and activations in float64, so that only planted differences are found.

    `change(row_count, output)` is applied to the products of one layer size; with `of_packed` only
    to those with packed matrices.
    """

    def __init__(
        self, change: Change | None = None, out_features: int = 128, *, of_packed: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_packed = of_packed
        self._change = change
        self._out_features = out_features
        self._activation: Callable[[Tensor], Tensor] = lambda given: given

    def with_activation(self, activation: Callable[[Tensor], Tensor]) -> Planted:
        """Applies `activation(input)` before each activation."""
        self._activation = activation
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Computes the planted operation in place of torch's."""
        if func is torch.ops.aten.linear.default:
            return self._product(*args, can_change=not self._of_packed)
        if is_packed_linear(func):
            return self._product(args[0], args[1].to_dense(), args[2])
        if func is torch.ops.aten.addmm.default:
            return self._product(args[1], args[2].T, args[0])
        if func is torch.ops.aten.silu.default:
            given = self._activation(args[0]).double()
            return (given * given.sigmoid()).to(args[0].dtype)
        return func(*args, **(kwargs or {}))

    def _product(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, can_change: bool = True
    ) -> Tensor:
        out = (inputs[..., None, :] * weight).sum(-1)
        if bias is not None:
            out = out + bias
        if self._change is None or not can_change or len(weight) != self._out_features:
            return out
        rows = out.reshape(-1, len(weight))
        return self._change(len(rows), rows).reshape(out.shape)


def check(model: Any, max_rows: int, planted: Planted | None = None) -> RowCheck:
    """Runs the self-check with a planted difference."""
    with planted or Planted():
        return find_rows(model, CPUDevice(), max_rows=max_rows)


def rules(*counts: int, query_rows: RowCounts | None = WHOLE_BLOCKS) -> ExactRules:
    """Makes rules that allow passes of these row counts."""
    return ExactRules(RowCounts(counts), RowCounts(counts), query_rows=query_rows)


def found_rules(found: RowCheck) -> ExactRules | None:
    """Takes rules as if calls had whole blocks: the library decides whether they may have less."""
    if found.rules is None or found.rules.query_rows is None:
        return found.rules
    return replace(found.rules, query_rows=WHOLE_BLOCKS)


def test_without_dependence_every_count_is_safe(model: Any) -> None:
    """Every count from one row to the largest tried is safe."""
    found = check(model, 24)
    assert rules(*range(1, 25)) == found_rules(found)
    assert "1 to 24" == found.exact_rows
    assert "passes of 1 to 24 rows agree bit for bit" == found.detail


@pytest.mark.parametrize("out_features", [32, 64, 128, 131])
def test_packed_matrices_are_tried(out_features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 each product may be of another operation, which probes try as well."""
    monkeypatch.setattr(TrialPasses, "passes_agree", lambda trial, rules, chunks: True)
    are_packed = _form_for(torch.bfloat16) is PackedLinear
    planted = Planted(
        lambda count, out: out if count > 9 else out + 1, out_features, of_packed=are_packed
    )
    found = check(model_of(dtype=torch.bfloat16), 16, planted).rules
    assert found is not None
    assert RowCounts(tuple(range(10, 17))) == found.rows


@pytest.mark.parametrize("out_features", [32, 64, 128])
def test_the_range_ends_where_results_change(model: Any, out_features: int) -> None:
    """Below 5 rows and above 20 a layer computes otherwise; 5 to 20 is found for every layer."""
    planted = Planted(
        lambda count, out: out + (0.0 if 5 <= count <= 20 else 1e-3 * count), out_features
    )
    found = check(model, 24, planted).rules
    assert found is not None
    assert RowCounts(tuple(range(5, 21))) == found.rows


def test_safe_counts_need_not_be_consecutive(model: Any) -> None:
    """A kernel for four rows at once makes only the multiples of four safe."""
    planted = Planted(lambda count, out: out if count % 4 == 0 else out + 1e-3 * count)
    found = check(model, 16, planted)
    assert rules(4, 8, 12, 16) == found_rules(found)
    assert "4 to 16 in steps of 4" == found.exact_rows


def test_prompts_have_their_own_row_counts(model: Any) -> None:
    """Small counts agree with each other, and so do large ones: answers use the small counts."""
    planted = Planted(lambda count, out: out if count <= 64 else out + 1e-3)
    found = check(model, 256, planted).rules
    assert found is not None
    assert RowCounts(tuple(range(1, 65))) == found.rows
    assert RowCounts(tuple(range(96, 257, 32))) == found.chunk_rows


def test_a_single_count_is_used_if_all_differ(model: Any) -> None:
    """Every count gives other numbers, so all passes use the same count."""
    found = check(model, 12, Planted(lambda count, out: out + 1e-3 * count)).rules
    assert found is not None
    assert len(found.rows.counts) == 1


def test_rows_run_alone_if_their_place_matters(model: Any) -> None:
    """Only passes of one row are safe; the check says that this is slow, and why."""
    planted = Planted(lambda count, out: out + 1e-3 * torch.arange(count)[:, None])
    found = check(model, 12, planted)
    assert rules(1, query_rows=None) == found_rules(found)
    why = "that is slow: all passes have 1 row, since other numbers of rows change a product"
    assert why in found.detail
    assert "--fast" in found.detail


def test_counts_whose_activations_have_a_remainder_are_excluded() -> None:
    """Eight numbers are computed at once and the rest otherwise: an odd count of rows of 100."""

    def rest_differs(given: Tensor) -> Tensor:
        if not given.is_contiguous():
            return given + 1e-2
        flat = given.flatten().clone()
        flat[len(flat) // 8 * 8 :] += 1e-2
        return flat.view(given.shape)

    planted = Planted().with_activation(rest_differs)
    assert rules(2, 4, 6, 8, 10, 12) == found_rules(check(model_of(100), 12, planted))


def test_a_dependence_in_no_probe_is_found(model: Any) -> None:
    """A norm looks at the whole pass, so only whole passes show the difference."""
    model.model.norm.register_forward_hook(
        lambda module, arguments, out: out + 1e-3 * out.mean(1, keepdim=True)
    )
    assert rules(1, query_rows=None) == found_rules(check(model, 12))


def test_results_that_never_repeat_allow_no_exact_mode(model: Any) -> None:
    """Even a row alone never gives the same bits twice, and the check says so."""
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
    """The second half of a call adds in another order, so each request needs its own call."""

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


def by_place(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
    """Attention in which queries of zeros change the others."""
    out = scaled_dot_product_attention(query, key, value, **named)
    return out + 1e-3 * (query == 0).all(-1).sum()


def test_attention_that_depends_on_how_a_prompt_is_cut_is_found(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then prompts are computed and shared in whole chunks, and the check says so."""
    monkeypatch.setattr(query_blocks, "scaled_dot_product_attention", by_place)
    found = check(model, 24)
    assert rules(*range(1, 25), query_rows=None) == found_rules(found)
    why = "prompts share whole chunks alone, since another cut of a prompt changes attention over"
    assert why in found.detail


def test_whole_passes_show_what_no_probe_of_a_cut_shows(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same dependence, with probes that see nothing."""
    monkeypatch.setattr(query_blocks, "scaled_dot_product_attention", by_place)
    monkeypatch.setattr(TrialPasses, "cut_probes", lambda trial: [])
    found = check(model, 24)
    assert rules(*range(1, 25), query_rows=None) == found_rules(found)
    assert "changes a pass of the model" in found.detail


def few_differ(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
    """Attention that computes calls of fewer than 16 queries, of 4 heads, in another manner."""
    out = scaled_dot_product_attention(query, key, value, **named)
    return out + 1e-3 * (query.shape[1] * query.shape[2] < 16 * 4)


@pytest.mark.parametrize("has_probes", [True, False])
def test_calls_have_as_many_queries_as_change_no_bit(
    has_probes: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes find which numbers are safe; what only whole passes show costs whole blocks."""
    monkeypatch.setattr(query_blocks, "scaled_dot_product_attention", few_differ)
    if not has_probes:
        monkeypatch.setattr(TrialPasses, "cut_probes", lambda trial: [])
    found = check(model, 256).rules
    assert found is not None
    assert found.query_rows is not None
    if has_probes:
        assert 16 <= found.query_rows.counts[0]
    else:
        assert WHOLE_BLOCKS == found.query_rows


@pytest.mark.parametrize("of_scores", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_probe_of_a_cut_shows_another_order_of_additions(
    dtype: torch.dtype, of_scores: bool
) -> None:
    """With the earlier tokens in another order most numbers of each row differ."""
    sizes = probes.AttentionSizes(6, 2, 64, 64, dtype)
    probe = probes.CutProbe(sizes, torch.device("cpu"), 128, of_scores=of_scores)

    def output() -> Tensor:
        found = probe.outcome(13)
        assert found is not None
        return found.view(dtype).view(QUERY_ROWS, -1)

    forward = output()
    assert torch.equal(forward, output())
    if of_scores:
        probe.query, probe.keys = probe.query.flip(2), probe.keys.flip(2)
    else:
        for rows in (probe.keys, probe.values):
            rows[:96] = rows[:96].flip(0)
    assert ((forward != output()).float().mean(1) > 0.5).all()


def test_mkl_without_its_repeatable_mode_is_named(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If exact mode is slow and MKL's repeatable mode is off, that is the likely reason."""
    monkeypatch.setattr(selfcheck, "is_mkl_repeatable", lambda: False)
    planted = Planted(lambda count, out: out + 1e-3 * torch.arange(count)[:, None])
    assert "set MKL_CBWR=AUTO" in check(model, 12, planted).detail


def test_the_product_probes_alone_show_that_the_place_matters(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole passes could miss it by chance; the probes move rows to other places, too."""
    monkeypatch.setattr(TrialPasses, "passes_agree", lambda trial, rules, chunks: True)
    planted = Planted(lambda count, out: out + 1e-3 * torch.arange(count)[:, None])
    assert rules(1, query_rows=None) == found_rules(check(model, 12, planted))


def test_products_of_transposed_weights_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPT-2 keeps its weights as [in, out], and multiplies them by another operation."""
    monkeypatch.setattr(TrialPasses, "passes_agree", lambda trial, rules, chunks: True)
    planted = Planted(lambda count, out: out if count > 9 else out + 1e-3, out_features=256)
    found = check(small_models.model_of("GPT2"), 16, planted).rules
    assert found is not None
    assert found.rows.counts[0] > 9


def test_a_large_head_is_measured_over_the_range(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary's weight is too large to try every count, but some counts are tried."""
    monkeypatch.setattr(trial_passes, "_LARGE_WEIGHT", 131 * 64 - 1)
    monkeypatch.setattr(TrialPasses, "passes_agree", lambda trial, rules, chunks: True)
    planted = Planted(lambda count, out: out if count > 9 else out + 1e-3, out_features=131)
    assert rules(32) == found_rules(check(model, 32, planted))


def test_the_model_is_left_as_it_was(model: Any) -> None:
    """Neither weights nor attention change."""
    before = model.config._attn_implementation
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    find_rows(model, CPUDevice(), max_rows=8)
    assert before == model.config._attn_implementation
    for name, weight in model.state_dict().items():
        assert torch.equal(weights[name], weight)


def test_the_probe_shows_another_order_of_additions_in_every_row() -> None:
    """Exact sums are zero, so the probe shows only rounding, which bfloat16 can't hide."""
    product = Product(48, 64, has_bias=False, dtype=torch.bfloat16)
    probe = probes.ProductProbe(product, torch.device("cpu"), 16)
    exact = probe.inputs.double() @ probe.weight.double().T
    assert torch.equal(torch.zeros_like(exact), exact)
    forwards = probe.inputs.float() @ probe.weight.float().T
    turned = probe.inputs.float().flip(1) @ probe.weight.float().flip(1).T
    assert (forwards.bfloat16() != turned.bfloat16()).any(1).all()


@pytest.mark.parametrize("of_scores", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_attention_probe_shows_another_order_of_additions(
    dtype: torch.dtype, of_scores: bool
) -> None:
    """Each head shows the difference in most numbers, in a score's products and in the values."""
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


@pytest.mark.parametrize("of_scores", [True, False])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_probes_of_attention_compute_with_finite_numbers(
    dtype: torch.dtype, head_dim: int, of_scores: bool
) -> None:
    """NaN is the same for all orders of additions, so it shows none; and its sign may differ."""
    sizes = probes.AttentionSizes(32, 8, head_dim, head_dim, dtype)
    cpu = torch.device("cpu")
    for probe in (
        probes.AttentionProbe(sizes, cpu, 288, of_scores=of_scores),
        probes.CutProbe(sizes, cpu, 288, of_scores=of_scores),
    ):
        found = probe.outcome(1)
        assert found is not None
        for numbers in (probe.query, probe.keys, probe.values, found.view(dtype)):
            assert numbers.isfinite().all(), probe


@pytest.mark.parametrize("dtype", DTYPES)
def test_probes_of_products_compute_with_finite_numbers(dtype: torch.dtype) -> None:
    """The probes of single operations are left out: they try infinite results as well."""
    product = Product(512, 4096, has_bias=True, dtype=dtype)
    probe = probes.ProductProbe(product, torch.device("cpu"), 16)
    found = probe.outcome(16)
    assert found is not None
    for numbers in (probe.inputs, probe.weight, found.view(dtype)):
        assert numbers.isfinite().all()


@pytest.mark.parametrize("family", ["GPTJ", "Olmo"])
def test_an_operation_along_an_axis_of_its_own_is_tried(family: str) -> None:
    """Such an operation needs its whole axis, so no probe can give it a plain line of numbers."""
    assert find_rows(small_models.model_of(family), CPUDevice(), max_rows=16).rules is not None


def norm_probe(width: int, weight: float = 1.0) -> probes.SingleProbe:
    """Makes the probe of a bfloat16 norm with these weights."""
    weights = torch.full((width,), weight).bfloat16(), torch.zeros(width).bfloat16()
    call = torch.ops.aten.layer_norm.default
    norm = SingleOperation(
        call, (1, None, width), (0, 1, 2), torch.bfloat16, ([width], *weights), {}
    )
    return probes.SingleProbe(norm, torch.device("cpu"))


@pytest.mark.parametrize("width", [64, 256])
def test_a_norm_is_tried_with_numbers_that_it_can_take(width: int) -> None:
    """With the largest bfloat16 numbers a norm gives NaN or zeros, which show nothing."""
    outcome = norm_probe(width).outcome(3)
    assert outcome is not None
    found = outcome.view(torch.bfloat16)
    assert found.isfinite().all()
    assert 16 < len(set(found.flatten().tolist()))


def test_rows_of_nan_agree() -> None:
    """NaN doesn't equal itself, but exact mode compares bits."""
    probe = norm_probe(64, weight=torch.nan)
    assert {3: 0, 5: 0} == selfcheck._kinds_of(probe, [3, 5])
