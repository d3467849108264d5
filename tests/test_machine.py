"""A machine is described for figures, and told apart from others."""

from __future__ import annotations

import pytest

from kvtide import machine

CPUINFO = """processor\t: 0
model name\t: A Processor
cpu family\t: 26
cpu MHz\t\t: 2400.01
flags\t\t: fpu avx2 avx512f

processor\t: 1
model name\t: A Processor
cpu family\t: 26
"""


def traits(monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    """What is told of the machine with this /proc/cpuinfo."""
    monkeypatch.setattr(machine, "_cpuinfo", lambda: text)
    return machine.processor_traits()


@pytest.mark.parametrize(("old", "new"), [("avx512f", "avx512f amx_bf16"), ("26", "25")])
def test_processors_of_one_name_can_be_told_apart(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    """Their instructions or families differ."""
    other = CPUINFO.replace(old, new)
    assert traits(monkeypatch, CPUINFO) != traits(monkeypatch, other)


def test_a_processors_traits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks and numbers of processors pass."""
    later = CPUINFO.replace("2400.01", "1800.5").replace("processor\t: 0", "processor\t: 7")
    assert traits(monkeypatch, CPUINFO) == traits(monkeypatch, later)


def test_hosts_that_tell_nothing_have_no_traits_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows whether their processors are alike."""
    monkeypatch.setattr("platform.node", lambda: "a")
    first = traits(monkeypatch, "")
    monkeypatch.setattr("platform.node", lambda: "b")
    assert first != traits(monkeypatch, "")
