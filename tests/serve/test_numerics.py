"""What decides the last bits of a computation is told, and nothing that passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvtide.serve.batch import ExactRules, RowCounts
from kvtide.serve.numerics import numerics_of

CPU = torch.device("cpu")
RULES = ExactRules(RowCounts((4,)), RowCounts((16,)), share_attention=True)


def told(rules: ExactRules, chunk_tokens: int, *, is_packed: bool = True) -> str:
    """Returns the numerics of the CPU."""
    return numerics_of(CPU, rules, chunk_tokens, is_packed=is_packed)


def test_numerics_stay_in_a_process() -> None:
    """An engine finds what another one of the same process left."""
    assert told(RULES, 256) == told(RULES, 256)


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_CBWR"])
def test_a_setting_of_a_library_makes_other_numerics(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The libraries choose other kernels then."""
    before = told(RULES, 256)
    monkeypatch.setenv(name, "AVX2")
    assert before != told(RULES, 256)


def test_products_of_other_matrices_are_other_numerics() -> None:
    """Whether a model is packed depends on the memory that is free."""
    assert told(RULES, 256) != told(RULES, 256, is_packed=False)


def test_processors_of_one_name_have_other_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine names several of them alike."""
    before = told(RULES, 256)
    monkeypatch.setattr("kvtide.serve.numerics.processor_traits", lambda: "flags=amx_bf16")
    assert before != told(RULES, 256)


@pytest.mark.parametrize("query_rows", [None, RowCounts((4, 8))])
def test_the_length_of_chunks_counts_only_where_bits_depend_on_it(
    query_rows: RowCounts | None,
) -> None:
    """An engine with other chunks computes the same bits where a prompt may be cut anywhere."""
    rules = replace(RULES, query_rows=query_rows)
    is_same = told(rules, 256) == told(rules, 128)
    assert is_same == (query_rows is not None)
