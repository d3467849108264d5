"""What decides the last bits of a computation is told, and nothing that passes."""

from __future__ import annotations

import pytest
import torch

from kvtide.serve.batch import ExactRules, RowCounts
from kvtide.serve.numerics import numerics_of

CPU = torch.device("cpu")
RULES = ExactRules(RowCounts((4,)), RowCounts((16,)), share_attention=True)


def test_numerics_stay_in_a_process() -> None:
    """An engine finds what another one of the same process left."""
    assert numerics_of(CPU, RULES) == numerics_of(CPU, RULES)


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_CBWR"])
def test_a_setting_of_a_library_makes_other_numerics(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The libraries choose other kernels then."""
    before = numerics_of(CPU, RULES)
    monkeypatch.setenv(name, "AVX2")
    assert before != numerics_of(CPU, RULES)


def test_processors_of_one_name_have_other_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine names several of them alike."""
    before = numerics_of(CPU, RULES)
    monkeypatch.setattr("kvtide.serve.numerics.processor_traits", lambda: "flags=amx_bf16")
    assert before != numerics_of(CPU, RULES)
