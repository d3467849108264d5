from __future__ import annotations

import signal
from dataclasses import replace

from kvtide.cli.outcome import Outcome, PromptCounts
from kvtide.cli.report import make_report, summarize
from kvtide.errors import KvtideError
from kvtide.tier.counts import TierCounts
from support.fake_serving import FOUND, make_request, make_stats

DISK = {
    "writes": 4,
    "down_bytes": 300,
    "down_seconds": 0.0,
    "hits": 0,
    "up_bytes": 0,
    "up_seconds": 0.123457,
    "misses": {"gone": 0, "away": 0, "late": 0},
    "damaged": 0,
    "refused_writes": {"full": 0, "away": 0, "late": 0},
}


def test_report_has_exactly_these_keys() -> None:
    """The keys are an interface, and each holds the count of the same name."""
    stats = make_stats(
        prompt_tokens=10,
        cached_tokens={"device": 3, "disk": 1},
        new_tokens=6,
        retractions=3,
        resumes=2,
        offloaded_bytes=4096,
        restored_bytes=2048,
        recomputed_tokens=5,
        pool_tokens=64,
        peak_pool_tokens=48,
        peak_host_bytes=8192,
        host_limit_bytes=9999,
        disk_limit_bytes=500,
        peak_disk_bytes=400,
        reads_in_time=5,
        reads_late=1,
        tier_wait_seconds=0.5,
        tiers={"disk": TierCounts(writes=4, down_bytes=300, up_seconds=0.1234567)},
        offload_seconds=0.25,
        restore_seconds=0.125,
    )
    outcome = Outcome([], stats, 1.5, FOUND)
    expected = {
        "requests": 9,
        "kept": 3,
        "answered": 7,
        "failed": 2,
        "ended_by": None,
        "prompt_tokens": 10,
        "new_tokens": 6,
        "cached_tokens": {"device": 3, "host": 0, "disk": 1},
        "retractions": 3,
        "resumes": 2,
        "offloaded_bytes": 4096,
        "restored_bytes": 2048,
        "recomputed_tokens": 5,
        "pool_tokens": 64,
        "peak_pool_tokens": 48,
        "host_limit_bytes": 9999,
        "peak_host_bytes": 8192,
        "disk_limit_bytes": 500,
        "peak_disk_bytes": 400,
        "spills": 4,
        "reads_in_time": 5,
        "reads_late": 1,
        "tier_wait_seconds": 0.5,
        "tiers": {"disk": DISK},
        "seconds": 1.5,
        "tokens_per_second": 4.0,
        "offload_seconds": 0.25,
        "restore_seconds": 0.125,
        "exact": True,
        "exact_rows": "2 to 4",
        "selfcheck_seconds": 0.25,
        "verified": None,
    }
    report = make_report(PromptCounts(9, 3, 7, 2), outcome, exact=True, verified=None)
    assert expected == report
    assert list(expected) == list(report)


def test_table_says_what_was_recomputed() -> None:
    """The table counts the recomputed tokens, and the requests that are inexact because of them."""
    requests = [make_request("a", exact=False), make_request("b")]
    stats = make_stats(recomputed_tokens=7)
    outcome = Outcome(requests, stats, 1.0, None)
    report = make_report(PromptCounts(2, 0, 2, 0), outcome, exact=False, verified=None)
    rows = dict(summarize(requests, report))
    assert "the KV of 7 tokens" == rows["recomputed"]
    assert "false (1 request recomputed in different steps)" == rows["exact"]


def test_table_says_which_tokens_of_prompts_were_not_computed() -> None:
    """The row is there if there are any, and says where their KV was."""
    for cached, expected in (
        ({}, None),
        ({"device": 1200}, "1,200 of the prompts weren't computed: 1,200 from the pool"),
        (
            {"host": 0, "disk": 7, "tape": 2},
            "9 of the prompts weren't computed: 7 from disk, 2 from tape",
        ),
    ):
        outcome = Outcome([], make_stats(cached_tokens=cached), 1.0, None)
        report = make_report(PromptCounts(1, 0, 1, 0), outcome, exact=True, verified=None)
        assert expected == dict(summarize([], report)).get("cached tokens")


def test_table_of_a_fast_run_says_so() -> None:
    """Nothing was recomputed, so `--fast` is the reason."""
    outcome = Outcome([], make_stats(), 0.0, None)
    report = make_report(PromptCounts(1, 1, 1, 0), outcome, exact=False, verified=None)
    rows = dict(summarize([], report))
    assert "false (--fast)" == rows["exact"]
    assert "recomputed" not in rows
    assert "1, 0 of them failed, 1 kept from earlier runs" == rows["requests"]


def test_nothing_answered_is_neither_exact_nor_not() -> None:
    """The report has null, and the table says why."""
    outcome = Outcome([], make_stats(), 1.0, FOUND)
    report = make_report(PromptCounts(2, 0, 0, 2), outcome, exact=True, verified=None)
    assert report["exact"] is None
    assert "null (nothing was answered)" == dict(summarize([], report))["exact"]


def test_report_says_what_ended_the_run() -> None:
    """The signal by its name, or the error's first line, which comes first."""
    outcome = Outcome([], make_stats(), 1.0, None, ended_by=signal.SIGTERM)
    counts = PromptCounts(2, 0, 1, 0)
    assert "SIGTERM" == make_report(counts, outcome, exact=True, verified=None)["ended_by"]
    outcome = replace(outcome, error=KvtideError("the disk\nis full"))
    report = make_report(counts, outcome, exact=True, verified=None)
    assert "KvtideError: the disk" == report["ended_by"]


def test_table_has_a_row_for_each_tier() -> None:
    """It says what went down and up, and what didn't and why; without tiers there is no row."""
    disk = TierCounts(down_bytes=2048, down_seconds=1.25, up_bytes=1024, up_seconds=0.5)
    store = TierCounts(damaged=1)
    store.misses["gone"] = 1002
    store.refused_writes |= {"full": 2, "late": 1}
    stats = make_stats(
        tiers={"disk": disk, "mooncake": store},
        peak_disk_bytes=4096,
        reads_in_time=7,
        reads_late=3,
        tier_wait_seconds=0.75,
    )
    expected = {
        "disk": "2.0 KiB down in 1.2 s, 1.0 KiB up in 0.5 s, at most 4.0 KiB in use",
        "mooncake": "0 B down in 0.0 s, 0 B up in 0.0 s; not given back: 1,002 gone, 1 damaged; "
        "refused: 2 full, 1 late",
        "read ahead": "7 in time, 3 late; 0.8 s waited for tiers",
    }
    for found in (stats, make_stats()):
        outcome = Outcome([], found, 1.0, FOUND)
        report = make_report(PromptCounts(1, 0, 1, 0), outcome, exact=True, verified=None)
        rows = dict(summarize([], report))
        assert (expected if found.tiers else {}) == {n: rows[n] for n in expected if n in rows}
