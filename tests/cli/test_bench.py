from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvtide.arena import HostArena
from kvtide.cli.bench import (
    CopyFigures,
    Timing,
    make_operations,
    make_slots,
    time_in_turns,
    to_json,
)
from kvtide.cli.main import main
from kvtide.device import open_device
from kvtide.layout import GQA
from kvtide.pool import Pool

OPERATIONS = ["gather", "sealed_gather", "scatter", "engine_gather", "engine_scatter"]


def test_json_has_these_keys_for_these_cases(capsys: pytest.CaptureFixture[str]) -> None:
    """What the command prints is one object; threads are as they were before."""
    before = torch.get_num_threads()
    assert (
        main(["bench", "copy", "--json", "--size", "1MiB", "--rounds", "1", "--threads", "1"]) == 0
    )
    printed = json.loads(capsys.readouterr().out)
    assert ["memcpy_gb_s", "cases"] == list(printed)
    assert printed["memcpy_gb_s"] > 0
    assert ["contiguous", "pages", "random"] == [case["name"] for case in printed["cases"]]
    for case in printed["cases"]:
        assert [
            "name",
            "gather_ratio",
            "scatter_ratio",
            "engine_gather_ratio",
            "engine_scatter_ratio",
            "seal_ratio",
        ] == list(case)
        assert all(ratio > 0 for key, ratio in case.items() if key != "name")
    assert before == torch.get_num_threads()


def test_table_names_each_operation_of_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    """People see times beside ratios, the size and the thread count."""
    assert main(["bench", "copy", "--size", "2MiB", "--rounds", "1", "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert "2.0 MiB each" in printed
    assert "1 thread, median of 1 round" in printed
    for operation in OPERATIONS:
        assert 3 == printed.count(f"  {operation.replace('_', ' ')}  ")


def test_ratios_are_of_bandwidth_and_seal_of_time() -> None:
    """Half of memcpy's speed is 0.5; sealing that adds a fifth is 1.2."""
    seconds = {
        "gather": 0.2,
        "sealed_gather": 0.24,
        "scatter": 0.4,
        "engine_gather": 0.5,
        "engine_scatter": 1.0,
    }
    case = {name: Timing(value, 0.0) for name, value in seconds.items()}
    figures = CopyFigures(2_000_000_000, Timing(0.1, 0.2), {"pages": case})
    assert {
        "memcpy_gb_s": 20.0,
        "cases": [
            {
                "name": "pages",
                "gather_ratio": 0.5,
                "scatter_ratio": 0.25,
                "engine_gather_ratio": 0.2,
                "engine_scatter_ratio": 0.1,
                "seal_ratio": 1.2,
            }
        ],
    } == to_json(figures)


def test_slots_lie_as_their_case_says() -> None:
    """Contiguous, whole pages in any order, and single slots in any order; none twice."""
    cases = make_slots(256, 1024)
    for slots in cases.values():
        assert (256, 256) == (slots.size, np.unique(slots).size)
        assert 0 <= slots.min() <= slots.max() < 1024
    assert (np.diff(cases["contiguous"]) == 1).all()
    pages = cases["pages"].reshape(4, 64)
    assert (pages[:, 0] % 64 == 0).all()
    assert (np.diff(pages) == 1).all()
    assert (np.diff(pages[:, 0]) != 64).any()
    assert (np.diff(cases["random"]) != 1).mean() > 0.9


@pytest.mark.parametrize("case", ["contiguous", "pages", "random"])
def test_every_operation_copies_what_it_should(case: str) -> None:
    """Both scatters bring back what was gathered, wherever it lay, and touch nothing else."""
    device = open_device("cpu")
    geometry = GQA.bind(dtype="bfloat16", layer=4, token=64, head=8, head_dim=128, v_head_dim=128)
    pool = Pool.create(geometry, device, page_count=8)
    for buffer in pool.buffers:
        buffer.random_()
    expected = [buffer.clone() for buffer in pool.buffers]
    slots = make_slots(128, pool.slot_count)[case]
    lease = HostArena(device, limit_bytes=2 << 20, block_bytes=1 << 20).lease(2)
    operations = make_operations(pool, slots, lease.blocks)
    assert OPERATIONS == list(operations)
    for gather, scatter in (("sealed_gather", "scatter"), ("engine_gather", "engine_scatter")):
        checksums = operations[gather]()
        assert gather != "sealed_gather" or checksums != operations["gather"]()
        for name in ("k", "v"):
            for layer in range(4):
                pool.plane(name, layer)[torch.from_numpy(slots)] = 0
        assert not torch.equal(expected[0], pool.buffers[0])
        operations[scatter]()
        for before, after in zip(expected, pool.buffers, strict=True):
            assert torch.equal(before, after)
    lease.release()
    device.close()


class _Time:
    """Time that passes only in the operations."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return 2 * self.now


def test_operations_take_turns_and_only_the_second_call_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow machine slows all alike only if they alternate; a cold start isn't measured."""
    clock = _Time()
    monkeypatch.setattr("kvtide.cli.bench.time", clock)
    seconds = {"a": [9.0, 1.0, 9.0, 3.0, 9.0, 2.0], "b": [9.0, 4.0, 9.0, 4.0, 9.0, 6.0]}
    calls: list[str] = []

    def operation(name: str) -> Callable[[], None]:
        def call() -> None:
            clock.now += seconds[name][calls.count(name)]
            calls.append(name)

        return call

    timings = time_in_turns({("", name): operation(name) for name in seconds}, rounds=3)
    assert ["a", "a", "b", "b"] * 3 == calls
    assert {("", "a"): Timing(2.0, 4.0), ("", "b"): Timing(4.0, 8.0)} == timings


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("--size=lots", "--size: 'lots' is not a size"),
        ("--size=1023KiB", "--size: 1023KiB isn't from 1.0 MiB, a page, to "),
        ("--size=1000TiB", "a tenth of this machine's memory"),
        ("--rounds=0", "'--rounds'"),
        ("--threads=0", "'--threads'"),
    ],
)
def test_bad_option_is_one_line_and_exit_code_2(
    option: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is measured, and nothing is on standard output."""
    assert main(["bench", "copy", option]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert (1, "") == (captured.err.count("\n"), captured.out)
