"""Real servers with less host memory than their retracted requests need, and a disk below it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engine_case import DECODE_SERVER, EngineRun, run_engine
from ordinary_case import make_model, requests, run_ordinary
from test_decode_server import ask

NEW_TOKENS = 80
TIGHT_SERVER = {
    **DECODE_SERVER,
    "max_total_tokens": 160,
    "page_size": 16,
    "num_reserved_decode_tokens": 16,
    "log_level": "debug",
}
"""The pool has room for half of the tokens of a crowd."""
ONE_BLOCK = "64KiB"
"""So little host memory has room for a single request."""


def crowd(kind: str = "plain") -> list[dict[str, Any]]:
    """Makes four requests, which are retracted only when the pool is full; see the meddler."""
    return [ask(f"crowd-{kind}-{number}", NEW_TOKENS) for number in range(4)]


def endings(result: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Says of each answer that it is whole, or how its error begins."""
    return [
        answer["error"][:4]
        if "error" in answer
        else "whole" * (len(answer["output_ids"]) == NEW_TOKENS)
        for answer in result.values()
    ]


def files_in(folder: Path) -> list[Path]:
    """Lists the snapshots that are on the disk."""
    return list(folder.rglob("*.safetensors"))


def same_whenever_idle(run: EngineRun, but: str = "") -> bool:
    """Returns whether slots, rows and arena are the same whenever the server is idle."""
    first, *later = (
        {name: value for name, value in event.items() if name != but}
        for event in run.events_of("idle")
    )
    return first["slots_free"] == first["slots"] and all(event == first for event in later)


@pytest.mark.parametrize("has_disk", [False, True])
def test_a_full_server_answers_everybody_while_the_disk_has_room(
    has_disk: bool, tmp_path: Path
) -> None:
    """Without a disk the same server ends requests with 503, since the arena is full."""
    run = run_engine(
        tmp_path,
        TIGHT_SERVER,
        [("ask", crowd()), ("rest", 1.0)],
        KVTIDE_HOST_MEMORY=ONE_BLOCK,
        KVTIDE_DISK_DIR=str(tmp_path / "kv") if has_disk else "",
    )
    assert ({"whole"} if has_disk else {"whole", "503:"}) == set(endings(run.results[0]))
    saved = [event["saved"] for event in run.events_of("retract")]
    assert has_disk == all(saved)
    assert len(saved) >= 3
    assert [True] * sum(saved) == [event["exact"] for event in run.events_of("resume")]
    assert has_disk == bool(run.log_lines("below it disk up to"))
    assert same_whenever_idle(run)
    assert [] == files_in(tmp_path / "kv")


def test_a_disk_that_hangs_stops_nobody(tmp_path: Path) -> None:
    """Requests without room end with 503, as without a disk; others are answered, also later.

    Only the first of them has waited for the disk, whose call keeps its piece of host memory.
    """
    run = run_engine(
        tmp_path,
        {**TIGHT_SERVER, "enable_metrics": True},
        [("ask", crowd("hang1")), ("ask", crowd()), ("rest", 2.0), ("metrics", None)],
        KVTIDE_HOST_MEMORY=ONE_BLOCK,
        KVTIDE_DISK_DIR=str(tmp_path / "kv"),
        KVTIDE_TIER_SECONDS="0.5",
    )
    assert 0 == run.exit_code
    assert [{"whole", "503:"}] * 2 == [set(endings(result)) for result in run.results[:2]]
    assert same_whenever_idle(run, but="arena_bytes")
    late = [
        line
        for line in run.results[3].splitlines()
        if line.startswith("kvtide:tier_refusals_total") and 'reason="late"' in line
    ]
    assert [1.0] == [float(line.rsplit(" ", 1)[1]) for line in late]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """Two ranks with a disk. On the first of them alone it is full, or files vanish from it."""
    folder = tmp_path_factory.mktemp("ranks")
    kinds = ("plain", "diskfull1", "filelost1", "plain")
    run = run_engine(
        folder,
        {**TIGHT_SERVER, "tp_size": 2},
        [*(("ask", crowd(kind)) for kind in kinds), ("rest", 1.0)],
        SGLANG_CPU_OMP_THREADS_BIND="0|1",
        KVTIDE_HOST_MEMORY="128KiB",
        KVTIDE_DISK_DIR=str(folder / "kv"),
    )
    names = sorted(path.name for path in (folder / "kv").iterdir())
    assert ["retracted-0", "retracted-1"] == names
    assert [] == files_in(folder / "kv")
    return run


def test_both_ranks_go_on_if_one_has_a_full_disk_or_loses_a_file(ranks: EngineRun) -> None:
    """A request ends on both ranks; a rank that went on alone would wait for the other forever."""
    whole, full, lost, again = [set(endings(result)) for result in ranks.results[:4]]
    assert ({"whole"}, {"whole"}) == (whole, again)
    assert ({"whole", "503:"}, {"whole", "500:"}) == (full, lost)
    assert [] == [event for event in ranks.events_of("resume", "crowd-plain") if not event["exact"]]
    assert ranks.log_lines("crowd-diskfull1-", "another rank couldn't save its share")
    assert ranks.log_lines("crowd-filelost1-", "another rank couldn't restore its share")
    assert same_whenever_idle(ranks)


def test_a_rank_without_a_disk_is_no_reason_not_to_start(tmp_path: Path) -> None:
    """The server says so, and refuses what one of its ranks has no room for."""
    run = run_engine(
        tmp_path,
        {**TIGHT_SERVER, "tp_size": 2},
        [("ask", crowd()), ("rest", 1.0)],
        SGLANG_CPU_OMP_THREADS_BIND="0|1",
        KVTIDE_HOST_MEMORY="128KiB",
        KVTIDE_DISK_DIR=str(tmp_path / "kv"),
        KVTIDE_MEDDLE="no disk",
    )
    assert {"whole", "503:"} == set(endings(run.results[0]))
    assert 1 == len(run.log_lines("kvtide goes on without a tier: no such device"))
    assert same_whenever_idle(run)


STEPS: dict[str, tuple[str, Any]] = {
    "alone": ("alone", requests(6, 40)),
    "together": ("generate", requests(6, 40)),
    "rest": ("rest", 0.5),
}


@pytest.mark.parametrize("has_disk", [False, True])
def test_a_full_ordinary_server_computes_nothing_again_while_the_disk_has_room(
    has_disk: bool, tmp_path: Path
) -> None:
    """Without a disk it computes requests again. In both cases each answer is the same."""
    make_model(tmp_path / "llama", "llama")
    served = run_ordinary(
        tmp_path / "llama",
        tmp_path,
        STEPS,
        {},
        KVTIDE_HOST_MEMORY=ONE_BLOCK,
        KVTIDE_DISK_DIR=str(tmp_path / "kv") if has_disk else "",
    )
    alone, together = (
        [answer["output_ids"] for answer in served.answers[name]] for name in ("alone", "together")
    )
    assert alone == together
    assert has_disk != bool(served.run.events_of("refused"))
    restores = served.run.events_of("restore")
    assert len(restores) >= 5 or not has_disk
    assert [] == [event for event in restores if not event["exact"]]
    assert same_whenever_idle(served.run)
    assert [] == files_in(tmp_path / "kv")
