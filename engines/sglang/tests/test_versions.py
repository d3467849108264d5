"""kvtide in an SGLang that it wasn't tested with."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from kvtide.plugin import package
from kvtide.plugin.engine_reads import EngineReads
from kvtide.plugin.reader import Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.package import SGLANG
from kvtide.plugin.sglang.pools import keys_values
from kvtide.plugin.sglang.reads import SGLANG_READS
from kvtide.plugin.source import Source


@pytest.fixture(scope="module")
def source() -> Source:
    """SGLang's source, read once for all tests, since that takes two seconds."""
    return SGLANG.source()


@pytest.fixture(autouse=True)
def read_once(monkeypatch: pytest.MonkeyPatch, source: Source) -> None:
    """Makes all tests use the source that was read."""
    monkeypatch.setattr(Source, "of_installed", lambda *_: source)


def install(monkeypatch: pytest.MonkeyPatch, number: str, more: Table) -> None:
    """Pretends that SGLang has this version, and that kvtide reads these attributes, too."""
    monkeypatch.setattr(package, "installed_version", lambda name: number)
    monkeypatch.setattr(keys_values, "READS", {**keys_values.READS, **more})


def test_the_installed_sglang_is_a_tested_version() -> None:
    """The package's version is listed, and all attributes that kvtide reads exist."""
    assert version("sglang") == SGLANG.version
    assert SGLANG.version in SGLANG.tested
    assert [] == SGLANG_READS.what_is_gone()


def test_the_source_of_a_tested_sglang_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each rank would wait for it at each start."""
    install(monkeypatch, SGLANG.tested[0], {"OncePool": ("k_buffer",)})
    monkeypatch.setattr(EngineReads, "what_is_gone", lambda _: pytest.fail("it looked"))
    SGLANG_READS.refuse_if_moved()


def test_another_sglang_with_all_attributes_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attribute that an object may lack must be in the source, too."""
    install(monkeypatch, "0.6.0", {"ModelRunner": ("token_to_kv_pool?",)})
    SGLANG_READS.refuse_if_moved()


def test_another_sglang_without_an_attribute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optional attribute counts: a describer would leave it out without an error."""
    install(monkeypatch, "0.6.0", {"ModelRunner": ("token_to_kv_pool", "renamed?")})
    with pytest.raises(Refused) as caught:
        SGLANG_READS.refuse_if_moved()
    said = (
        "SGLang 0.6.0 lacks what kvtide reads: ModelRunner.renamed; kvtide was tested with SGLang "
        f"{', '.join(SGLANG.tested)}; `kvtide doctor --sglang` names all that is gone"
    )
    assert said == str(caught.value)


@pytest.mark.parametrize(("count", "said"), [(5, ".n4; "), (7, ".n4 and 2 more; ")])
def test_five_attributes_are_named_and_the_others_counted(
    monkeypatch: pytest.MonkeyPatch, count: int, said: str
) -> None:
    """The message is a line in a server's log."""
    install(monkeypatch, "0.6.0", {"ModelRunner": tuple(f"n{number}" for number in range(count))})
    with pytest.raises(Refused, match="lacks what kvtide reads: ModelRunner") as caught:
        SGLANG_READS.refuse_if_moved()
    assert said in str(caught.value)
    assert "n5" not in str(caught.value)


def test_another_sglang_whose_source_cannot_be_read_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is known about it then, but the server doesn't end."""
    (tmp_path / "memory_pool.py").write_text("class ModelRunner:\n    def (")
    install(monkeypatch, "of unknown version", {})
    monkeypatch.setattr(Source, "of_installed", lambda *_: Source(tmp_path))
    with pytest.raises(Refused, match="SGLang of unknown version: whether") as caught:
        SGLANG_READS.refuse_if_moved()
    assert "its source can't be read (SyntaxError: " in str(caught.value)
