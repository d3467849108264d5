"""The self-check finds planted dependences on the row count, and says so where none is safe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from kvtide.device import CPUDevice
from kvtide.serve import selfcheck
from kvtide.serve.batch import RowRange
from kvtide.serve.selfcheck import find_rows


@pytest.fixture
def model() -> Any:
    """A small random Llama."""
    torch.manual_seed(4)
    config = tf.LlamaConfig(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return tf.LlamaForCausalLM(config).eval()


@pytest.fixture(autouse=True)
def _steady_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products row by row, so that what is found is what the test plants, on any machine."""
    monkeypatch.setattr(torch.nn.functional, "linear", row_by_row)
    monkeypatch.setattr(selfcheck, "linear", row_by_row)


def row_by_row(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product in which each number is a sum of its own: it depends on no row count."""
    out = (inputs[..., None, :] * weight).sum(-1)
    return out if bias is None else out + bias


def plant(monkeypatch: pytest.MonkeyPatch, change: Any, out_features: int = 128) -> None:
    """Products of one layer shape get ``change(row_count, output)``."""

    def changed(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = row_by_row(inputs, weight, bias)
        if weight.shape[0] != out_features:
            return out
        rows = out.reshape(-1, out_features)
        changed_rows: Tensor = change(len(rows), rows).reshape(out.shape)
        return changed_rows

    monkeypatch.setattr(torch.nn.functional, "linear", changed)
    monkeypatch.setattr(selfcheck, "linear", changed)


def test_without_dependence_every_count_is_safe(model: Any) -> None:
    """From one row to all that were asked for."""
    assert RowRange(1, 24) == find_rows(model, CPUDevice(), max_rows=24).rows


@pytest.mark.parametrize("out_features", [32, 64, 128])
def test_the_range_ends_where_the_numbers_change(
    model: Any, monkeypatch: pytest.MonkeyPatch, out_features: int
) -> None:
    """Below 5 rows and above 20 another kernel: whichever layer it is, 5 to 20 is found."""
    plant(monkeypatch, lambda count, out: out if 5 <= count <= 20 else out + 1e-3, out_features)
    assert RowRange(5, 20) == find_rows(model, CPUDevice(), max_rows=24).rows


def test_counts_that_all_differ_leave_a_single_one(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each count has numbers of its own, one of them is fixed: all passes have it."""
    plant(monkeypatch, lambda count, out: out + 1e-3 * count)
    rows = find_rows(model, CPUDevice(), max_rows=12).rows
    assert rows is not None
    assert rows.least == rows.most


def test_where_the_place_matters_each_row_runs_alone(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that depends on where its row stands leaves passes of one row."""
    plant(monkeypatch, lambda count, out: out + 1e-3 * torch.arange(count)[:, None])
    assert RowRange(1, 1) == find_rows(model, CPUDevice(), max_rows=12).rows


def test_a_dependence_outside_the_products_is_found(model: Any) -> None:
    """A norm that looks at the whole pass: only whole passes can show it."""
    model.model.norm.register_forward_hook(
        lambda module, arguments, out: out + 1e-3 * out.mean(1, keepdim=True)
    )
    assert RowRange(1, 1) == find_rows(model, CPUDevice(), max_rows=12).rows


def test_numbers_that_never_repeat_leave_no_exact_mode(model: Any) -> None:
    """Not even alone does a row give the same bits twice: the check says so."""
    model.model.norm.register_forward_hook(
        lambda module, arguments, out: out + 1e-3 * torch.randn(())
    )
    check = find_rows(model, CPUDevice(), max_rows=12)
    assert check.rows is None
    assert "no row count up to 12 is safe" in check.detail
    assert "1..12" in check.detail


def test_the_products_alone_show_where_the_place_matters(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole passes could miss it by chance: the probes move their rows, too."""
    monkeypatch.setattr(selfcheck, "_passes_agree", lambda model, device, rows: True)
    plant(monkeypatch, lambda count, out: out + 1e-3 * torch.arange(count)[:, None])
    assert RowRange(1, 1) == find_rows(model, CPUDevice(), max_rows=12).rows


def test_a_large_head_is_measured_over_the_range(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary's weight is too large for every count, but not left out."""
    monkeypatch.setattr(selfcheck, "_LARGE_WEIGHT", 131 * 64 - 1)
    monkeypatch.setattr(selfcheck, "_passes_agree", lambda model, device, rows: True)
    plant(monkeypatch, lambda count, out: out if count > 9 else out + 1e-3, out_features=131)
    assert RowRange(32, 32) == find_rows(model, CPUDevice(), max_rows=32).rows


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
    probe = selfcheck._probe(48, 64, torch.bfloat16, 16)
    exact = probe.inputs.double() @ probe.weight.double().T
    assert torch.equal(torch.zeros_like(exact), exact)
    forwards = probe.inputs.float() @ probe.weight.float().T
    turned = probe.inputs.float().flip(1) @ probe.weight.float().flip(1).T
    assert (forwards.bfloat16() != turned.bfloat16()).any(1).all()
