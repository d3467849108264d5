"""The kit itself: what it needs, what it reports, and how independent its reference is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import kvtide.conformance
from kvtide.conformance import LayoutTests, Sample, checks, ways
from kvtide.conformance.pool_under_test import KINDS
from kvtide.conformance.reference import Place, TokenIds, first_difference, ids_by, rows_of_plane
from kvtide.conformance.samples import SAMPLES, sample
from kvtide.conformance.trips import INDICES, ORDERS, counts_of, make_trip
from kvtide.device import CPUDevice
from kvtide.layout import Counts, Layout, Maps, Plane, Rows, Rule

PACKAGE = Path(kvtide.conformance.__file__).parent


def test_samples_and_checks_need_no_pytest() -> None:
    """`kvtide doctor` uses samples and checks where pytest may not be installed."""
    program = (
        "import sys, kvtide.conformance.checks, kvtide.doctor.roundtrips; "
        "sys.exit('pytest' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=300, check=False)
    assert 0 == done.returncode


def test_public_names_are_there() -> None:
    """Every public name can be imported, and an unknown one is refused."""
    for name in kvtide.conformance.__all__:
        assert name == getattr(getattr(kvtide.conformance, name), "__name__", name)
    with pytest.raises(AttributeError, match="no attribute 'OtherTests'"):
        _ = kvtide.conformance.OtherTests


def test_reference_imports_only_declarations() -> None:
    """The reference doesn't use the code that it is compared with."""
    tree = ast.parse((PACKAGE / "reference.py").read_text(encoding="utf-8"))
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = {node.module for node in froms if (node.module or "").startswith("kvtide")}
    names = {alias.name for node in froms if node.module == "kvtide.layout" for alias in node.names}
    assert {"kvtide.layout"} == modules
    assert names.isdisjoint({"apply_rules", "Rows", "BufferRows"})


def test_reference_reads_a_known_case() -> None:
    """The expected rows were worked out by hand: pages, a window with a hole, a request's row."""
    pages = sample("gqa_hnd").geometry.planes[0]
    assert {0: 2, 4: 0} == rows_of_plane(pages, Place([8, 9, 10, 11, 0], None, {}))
    held = {"full_to_window": np.array([0, 5, 0, 2])}
    window = sample("window").geometry.planes[0]
    assert {0: 2, 2: 5} == rows_of_plane(window, Place([3, 2, 1], None, held))
    state = sample("recurrent").geometry.planes[0]
    assert {0: 3} == rows_of_plane(state, Place([], 3, {}))


@dataclass(frozen=True, slots=True)
class EveryOther(Rule):
    """A rule that kvtide doesn't have: even tokens have rows, in the order of the slots."""

    form_name: ClassVar[str] = "test_kit.every_other"

    def apply(self, rows: Rows, maps: Maps) -> Rows:
        """See Rule."""
        even = rows.tokens % 2 == 0
        return rows.only(even, rows.ids[even])

    def row_count(self, id_count: int, known: Counts) -> int:
        """See Rule."""
        return id_count

    @property
    def tokens_per_row(self) -> int:
        """See Rule."""
        return 1


EVERY_OTHER = Layout("every_other", Plane("k", "layer page token 3", rows=(EveryOther(),)))


@ids_by.register
def _(_rule: EveryOther, ids: TokenIds, _place: Place) -> TokenIds:
    return {token: slot for token, slot in ids.items() if token % 2 == 0}


class TestForeignRule(LayoutTests):
    """The kit takes a rule that it doesn't know, if its expected rows are registered."""

    thorough = False

    def samples(self) -> list[Sample]:
        """Returns a sample with one plane by that rule."""
        planes = {"k": ("uint8", 2, (3,))}
        return [Sample("every-other", EVERY_OTHER, "uint8", {"layer": 2}, planes)]


@dataclass(frozen=True, slots=True)
class Table(EveryOther):
    """Another foreign rule: its map gives each slot a row, or -1."""

    form_name: ClassVar[str] = "test_kit.table"

    def apply(self, rows: Rows, maps: Maps) -> Rows:
        """See Rule."""
        found = maps["table"](rows.ids)
        return rows.only(found >= 0, found[found >= 0])

    def row_count(self, id_count: int, known: Counts) -> int:
        """See Rule."""
        return known.mapped_rows["table"]

    @property
    def map_name(self) -> str:
        """See Rule."""
        return "table"


TABLE = Layout("table", Plane("k", "layer page token 3", rows=(Table(),)))


@ids_by.register
def _(_rule: Table, ids: TokenIds, place: Place) -> TokenIds:
    found = {token: int(place.maps["table"][slot]) for token, slot in ids.items()}
    return {token: row for token, row in found.items() if row >= 0}


class TestForeignRuleWithAMap(LayoutTests):
    """The kit makes the map and fills it."""

    thorough = False

    def samples(self) -> list[Sample]:
        """Returns a sample with one plane by that rule."""
        planes = {"k": ("uint8", 2, (3,))}
        rows = {"table": 24}
        return [Sample("table", TABLE, "uint8", {"layer": 2}, planes, mapped_rows=rows)]


def test_a_foreign_rule_that_moves_other_rows_is_found(
    device: CPUDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expected rows don't come from the rule's own `apply`."""
    monkeypatch.setattr(EveryOther, "apply", lambda self, rows, maps: rows)
    (other,) = TestForeignRule().samples()
    with pytest.raises(AssertionError, match="byte"):
        checks.check_round_trips(KINDS["created"](other, device))


def test_a_rule_without_registered_rows_is_refused() -> None:
    """Such a rule isn't taken for one that names every token."""
    unknown = type("Unknown", (Rule,), {**vars(EveryOther), "form_name": "test_kit.unknown"})()
    plane = replace(EVERY_OTHER.bind(dtype="uint8", layer=1).planes[0], rules=(unknown,))
    with pytest.raises(NotImplementedError, match=r"doesn't know .*@ids_by\.register"):
        rows_of_plane(plane, Place([0, 1], None, {}))


def test_difference_is_named_by_plane_layer_row_and_byte() -> None:
    """The message also counts the bytes that differ."""
    expected = {("k", 0): np.zeros((4, 3), np.uint8), ("v", 1): np.zeros((4, 3), np.uint8)}
    found = {part: rows.copy() for part, rows in expected.items()}
    assert first_difference(expected, found) is None
    found["v", 1][2, 1] = 0x5A
    found["v", 1][3, 0] = 1
    assert (
        "plane v, layer 1, row 2, byte 1 is 0x5a, not 0x00; 2 of 12 bytes of that layer differ"
    ) == first_difference(expected, found)


@pytest.mark.parametrize("tried", SAMPLES, ids=lambda tried: tried.name)
def test_trips_lead_to_other_slots_in_every_order(device: CPUDevice, tried: object) -> None:
    """Slots are distinct and in the pool, and source and target are never the same set."""
    subject = KINDS["created"](tried, device)  # type: ignore[arg-type] # a sample
    count = ways.some_tokens(subject)
    for order in ORDERS:
        seen = set()
        for seed in range(8):
            trip = make_trip(subject, count, seed, order)
            for place in (trip.source, trip.target):
                assert count == len({*place.slots})
                assert 0 <= min(place.slots) <= max(place.slots) < subject.pool.slot_count
            seen.add(trip.source.slots == trip.target.slots)
        assert False in seen


def test_counts_lie_around_the_boundaries_of_chunks(device: CPUDevice) -> None:
    """The counts are 0, 1, n - 1, n, n + 1 and multiples, and parts of pages."""
    assert [0, 1, 2, 3, 4, 5, 7, 8, 9] == counts_of(KINDS["created"](sample("gqa"), device), 4)
    pages = counts_of(KINDS["created"](sample("gqa_hnd"), device), 4)
    assert {0, 1, 3, 5, 12, 15, 16, 17, 20, 31, 32, 36} == {*pages}


def test_indices_are_of_every_kind() -> None:
    """Indices have 32 and 64 bits, and lie on the host and on the device."""
    assert 7 == len(INDICES)


WRONG_SAMPLES = """
from dataclasses import replace
from kvtide.conformance import LayoutTests
from kvtide.conformance.samples import sample

GQA, WINDOW, STATE = (sample(name) for name in ("gqa", "window", "recurrent"))
OTHER_ROW = {**GQA.planes, "v": ("bfloat16", 3, (2, 4))}


class TestMyLayouts(LayoutTests):
    thorough = False

    def samples(self):
        return [
            GQA,
            replace(GQA, name="other-row", planes=OTHER_ROW),
            replace(GQA, name="no-heads", sizes={"layer": 3}),
            replace(WINDOW, name="no-rows-of-the-map", mapped_rows={}),
            replace(STATE, name="no-requests", request_count=0),
        ]
"""


def test_a_wrong_sample_fails_once(tmp_path: Path) -> None:
    """The sample's own test says what is wrong; the other tests name that test."""
    (tmp_path / "test_wrong.py").write_text(WRONG_SAMPLES, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfsE", "test_wrong.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\w+)\[(\S+)\]", done.stdout, re.MULTILINE)
    test = "test_planes_are_as_the_sample_says"
    wrong = ["other-row", "no-heads", "no-rows-of-the-map", "no-requests"]
    assert [(test, name) for name in wrong] == failed
    passed, skipped = (int(n) for n in re.findall(r"(\d+) (?:passed|skipped)", done.stdout))
    assert skipped == len(wrong) * (passed - 1)
    assert f"sample other-row is wrong: {test} says how" in done.stdout
    for said in ("no-rows-of-the-map: mapped_rows", "no-requests: request_count"):
        assert said in done.stdout
