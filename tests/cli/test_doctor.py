"""`kvtide doctor` on the CPU, and on devices of which each has one fault."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from kvtide.cli.main import main
from kvtide.cli.page import ConsolePage
from kvtide.conformance import SAMPLES
from kvtide.device import Device
from kvtide.doctor.device import DeviceReport, in_words
from kvtide.layout import Layout, Plane
from support.broken_devices import (
    DirtyDevice,
    FakeDevice,
    FlippingDevice,
    FullDevice,
    LateDevice,
    PoorDevice,
    UnpinnedDevice,
)

CPU = ["doctor", "--device", "cpu", "--size", "1MiB"]
HEADING = "Round trips: created and adopted pools, slots of every kind"
TRIP_COUNT = len(SAMPLES)
MOVES = [f"{case} {move}" for case in ("contiguous", "pages", "random")
         for move in ("gather", "sealed gather", "scatter")]  # fmt: skip


Ask = Callable[[Callable[[], Device]], tuple[int, list[str]]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """A function that runs the doctor on the device that `make` makes: exit code and lines."""

    def run(make: Callable[[], Device]) -> tuple[int, list[str]]:
        monkeypatch.setattr("kvtide.doctor.device._ROUNDS", 1)
        monkeypatch.setattr("kvtide.doctor.here.open_device", lambda name: make())
        code = main(CPU)
        captured = capsys.readouterr()
        assert "" == captured.err
        return code, captured.out.splitlines()

    return run


def failed(lines: Sequence[str]) -> list[str]:
    """Names the checks that failed."""
    return [line.partition(": FAILED: ")[0] for line in lines if ": FAILED: " in line]


def trips(lines: Sequence[str]) -> list[str]:
    """Finds the lines of the round trips."""
    if HEADING not in lines:
        return []
    first = lines.index(HEADING) + 1
    return [line for line in lines[first : lines.index("", first)] if line]


def test_sound_device_is_ok(ask: Ask) -> None:
    """The report has all parts in order, no failure, and says `ok` in its last line."""
    code, lines = ask(FakeDevice)
    assert 0 == code
    assert [] == failed(lines)
    assert lines[0].startswith("device: cpu: ")
    assert f"torch {torch.__version__}, kvtide " in lines[1]
    assert "host memory: pageable, as both ends are host memory" == lines[2]
    needs = lines.index("What kvtide needs of it")
    copies = lines.index(HEADING)
    speed = lines.index("Speed, 1.0 MiB each, median of 1 round")
    assert ["kvtide opens the device: ok", "device memory, zeroed: ok"] == lines[
        needs + 1 : needs + 3
    ]
    assert "uint8 view of float8_e5m2: ok" in lines[needs:copies]
    assert TRIP_COUNT == sum(line.endswith(": exact") for line in trips(lines[copies:]))
    assert lines[speed + 1].startswith("memcpy: ")
    assert ["contiguous", "pages", "random"] == [line.split()[0] for line in lines[speed + 3 :][:3]]
    assert "device cpu: ok" == lines[-1]


def test_line_of_a_round_trip_says_what_moved(ask: Ask) -> None:
    """The line has the layout, the dtype, the planes with their widths, bytes a token, the page."""
    _, lines = ask(FakeDevice)
    assert (
        "gqa bfloat16: k 3x[2,5] v 3x[2,3], 96 B a token, pages of 4: exact" in lines
    )  # 3 * 2 * (5 + 3) * 2


def test_planes_of_different_dtypes_are_told_apart() -> None:
    """Where planes differ in dtype, each plane is followed by its dtype."""

    class Mixed:
        layout = Layout("mixed", Plane("a", "layer page token x"), Plane("b", "page token y"))
        planes = (
            replace(layout.bind(dtype="uint8", layer=2, token=4, x=3, y=5).planes[0]),
            replace(layout.bind(dtype="float32", layer=2, token=4, x=3, y=5).planes[1]),
        )
        token_bytes, page_size = 26, 4

    described = in_words(Mixed())  # type: ignore[arg-type] # all that it reads of a geometry
    assert "mixed: a uint8 2x[3] b float32 1x[5], 26 B a token, pages of 4" == described


def test_byte_that_a_copy_flips_is_found(ask: Ask) -> None:
    """The byte changes before it is sealed, so no checksum sees it; comparing the bytes does."""
    code, lines = ask(lambda: FlippingDevice(before_it_is_sealed=True))
    assert 1 == code
    assert TRIP_COUNT == len(failed(lines)) == len(trips(lines))
    for line in trips(lines):
        assert "created pool, contiguous slots: restored into other slots: plane " in line
        assert ", layer 0, row " in line
        assert "; 1 of " in line
    assert f"device cpu: {TRIP_COUNT} of " in lines[-1]


def test_byte_that_flips_in_host_memory_is_found(ask: Ask) -> None:
    """The seal's checksum differs, so the restore raises SnapshotDamaged."""
    code, lines = ask(lambda: FlippingDevice(before_it_is_sealed=False))
    assert 1 == code
    assert TRIP_COUNT == len(failed(lines)) == len(trips(lines))
    assert all("contiguous slots: SnapshotDamaged: chunk 0: " in line for line in trips(lines))


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (FullDevice, "RuntimeError: the queue is full"),
        (LateDevice, "OSError: the link is down"),
    ],
)
def test_device_that_moves_nothing_is_tried_to_the_end(
    device: Callable[[], Device], reason: str, ask: Ask
) -> None:
    """Each copy fails with the first line of its error, and all other checks still run."""
    code, lines = ask(device)
    assert 1 == code
    assert TRIP_COUNT == len(trips(lines))
    assert all(line.endswith(f"created pool, contiguous slots: {reason}") for line in trips(lines))
    assert [f"speed of {move}: FAILED: {reason}" for move in MOVES] == [
        line for line in lines if line.startswith("speed of ")
    ]
    assert TRIP_COUNT + len(MOVES) == len(failed(lines))
    assert any(line.startswith("memcpy: ") for line in lines)
    assert f"device cpu: {TRIP_COUNT + len(MOVES)} of {24 + TRIP_COUNT} checks failed" == lines[-1]


def test_memory_that_cannot_be_pinned_is_said_with_the_remedy(ask: Ask) -> None:
    """The report has a line with the remedy and no warning of Python; all else works."""
    code, lines = ask(UnpinnedDevice)
    assert 1 == code
    assert "host memory: pageable: 64 bytes can't be pinned; raise ulimit -l" == lines[2]
    assert ["pinned host memory"] == failed(lines)
    follows = "FAILED: host memory is pageable; see the line `host memory`; so copies are slower"
    assert any(follows in line for line in lines)
    assert f"device cpu: 1 of {25 + TRIP_COUNT} checks failed" == lines[-1]


def test_device_without_memory_is_tried_to_the_end(ask: Ask) -> None:
    """The doctor goes on without memory, and an error without a message is named by its class."""
    code, lines = ask(PoorDevice)
    assert 1 == code
    assert "host memory: pageable: MemoryError" == lines[2]
    assert "device memory, zeroed: FAILED: OutOfMemoryError: no device memory; so " in "\n".join(
        lines
    )
    assert TRIP_COUNT == len(trips(lines))
    assert "speed: FAILED: OutOfMemoryError: no device memory" in lines
    assert lines[-1].endswith(" checks failed")


def test_memory_that_is_not_zeroed_is_found(ask: Ask) -> None:
    """Pool.create needs zeros, so this check fails; the round trips are exact all the same."""
    code, lines = ask(DirtyDevice)
    assert 1 == code
    assert ["device memory, zeroed"] == failed(lines)
    assert any("3 of 1048576 bytes aren't zero; so Pool.create" in line for line in lines)


@pytest.mark.parametrize("make", [FakeDevice, FullDevice])
def test_device_is_closed_at_the_end(make: Callable[[], FakeDevice], ask: Ask) -> None:
    """The doctor closes the device that it opened, whether it works or not."""
    made: list[FakeDevice] = []

    def remember() -> Device:
        made.append(make())
        return made[-1]

    ask(remember)
    assert [True] == [device.closed for device in made]


def test_operator_that_raises_is_named(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each dtype has one line that names the missing operator; all other operators are ok."""

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise NotImplementedError("index_select isn't there\nregistered are: none")

    monkeypatch.setattr("torch.index_select", refuse)
    code, lines = ask(FakeDevice)
    assert 1 == code
    reason = "NotImplementedError: index_select isn't there"
    for dtype in ("complex128", "int64", "uint8"):
        line = f"index_select(out=), {dtype}: FAILED: {reason}; so no offload works"
        assert line in lines
        assert f"index_copy_, {dtype}: ok" in lines
    assert all(line.endswith(reason) for line in trips(lines))
    assert not any("registered are" in line for line in lines)


def test_operator_that_computes_something_else_is_named(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator that returns without an error isn't trusted: its result is compared."""

    def forget(*_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
        return out.fill_(0)

    monkeypatch.setattr("torch.index_select", forget)
    _, lines = ask(FakeDevice)
    wrong = [line for line in lines if line.startswith("index_select")]
    assert 3 == len(wrong)
    assert all(" bytes differ; so no offload works" in line for line in wrong)
    assert all("restored into other slots: plane " in line for line in trips(lines))


def test_device_that_cannot_be_opened_is_tried_without_kvtide(ask: Ask) -> None:
    """torch's operators are still tried on the device; copies and speed are not."""

    def refuse() -> Device:
        raise RuntimeError("no stream left")

    code, lines = ask(refuse)
    assert 1 == code
    assert ["kvtide opens the device"] == failed(lines)
    assert "index_copy_, int64: ok" in lines
    assert [] == trips(lines)
    assert "Neither copies nor speed were tried: there is no device" in lines
    assert lines[-1].startswith("device cpu: 1 of ")


def test_json_is_one_object_with_the_whole_report(capsys: pytest.CaptureFixture[str]) -> None:
    """The object holds the whole report, and nothing else is on standard output."""
    assert 0 == main([*CPU, "--json"])
    captured = capsys.readouterr()
    assert "" == captured.err
    found = json.loads(captured.out)
    assert ("cpu", False, None, True) == (
        found["device"], found["simulated"], found["schedule"], found["ok"]
    )  # fmt: skip
    assert {"pinned": False, "reason": None} == found["host_memory"]
    assert all(need["ok"] and need["reason"] is None for need in found["needs"])
    assert TRIP_COUNT == len(found["round_trips"])
    assert {
        "layout": "gqa",
        "planes": [
            {"name": "k", "dtype": "bfloat16", "layers": 3, "row": [2, 5]},
            {"name": "v", "dtype": "bfloat16", "layers": 3, "row": [2, 3]},
        ],
        "page_size": 4,
        "token_bytes": 96,
        "exact": True,
        "reason": None,
    } == found["round_trips"][0]
    speed = found["speed"]
    assert (1 << 20, "memcpy", []) == (speed["size_bytes"], speed["yardstick"], speed["errors"])
    assert ["memcpy"] == list(speed["gb_s"])
    assert ["contiguous", "pages", "random"] == list(speed["ratios"])
    for ratios in speed["ratios"].values():
        assert ["gather", "sealed_gather", "scatter"] == list(ratios)
        assert all(ratio > 0 for ratio in ratios.values())
    assert (0, len(found["needs"]) + TRIP_COUNT + len(MOVES) + 1) == (
        found["failed"], found["checks"]
    )  # fmt: skip


def test_json_has_the_reasons_of_what_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code and counts equal those of the printed report."""
    monkeypatch.setattr("kvtide.doctor.here.open_device", lambda name: FullDevice())
    assert 1 == main([*CPU, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert TRIP_COUNT + len(MOVES) == found["failed"]
    assert {"created pool, contiguous slots: RuntimeError: the queue is full"} == {
        trip["reason"] for trip in found["round_trips"]
    }
    assert {"RuntimeError: the queue is full"} == {
        error["reason"] for error in found["speed"]["errors"]
    }
    assert {"contiguous": {}, "pages": {}, "random": {}} == found["speed"]["ratios"]


def test_reasons_fit_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons are folded below their line, and no line is wider than the terminal."""
    monkeypatch.setattr("kvtide.doctor.here.open_device", lambda name: FullDevice())
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system=None, width=80)
    DeviceReport("cpu", size_bytes=1 << 20).examine(ConsolePage(console))
    lines = shown.getvalue().splitlines()
    assert max(len(line) for line in lines) <= 80
    failed = next(i for i, line in enumerate(lines) if line.startswith("gqa bfloat16"))
    assert lines[failed].endswith("  FAILED")
    assert "    created pool, contiguous slots: RuntimeError: the queue is full" == (
        lines[failed + 1].rstrip()
    )


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--schedule", "lazy"], "--schedule is for a simulated device; add --simulate"),
        (["--simulate", "--schedule", "late"], "schedule 'late' is unknown"),
        (["--simulate", "--device", "cpu"], "device 'cpu' can't be simulated"),
        (["--device", "warp9"], "device 'warp9' isn't known here; known are: cpu"),
        (["--size", "lots"], "--size: 'lots' is not a size"),
        (["--size", "1KiB"], "--size: 1KiB isn't from 1.0 MiB"),
        (["--frobnicate"], "No such option: --frobnicate"),
    ],
)
def test_bad_option_is_one_line_and_exit_code_2(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is tried, and standard output stays empty."""
    assert 2 == main(["doctor", *options])
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert (1, "") == (captured.err.count("\n"), captured.out)
