from __future__ import annotations

from kvtide.cli.report import make_report, summarize
from support.fake_serving import FOUND, make_request, make_stats

ANSWERED = {"output_ids": [5, 6], "text": "hé\n", "finish_reason": "stop", "retractions": 2}


def test_report_has_exactly_these_keys() -> None:
    """The keys are an interface, and each holds the count of the same name."""
    stats = make_stats(
        prompt_tokens=10,
        new_tokens=6,
        retractions=3,
        resumes=2,
        offloaded_bytes=4096,
        restored_bytes=2048,
        recomputed_tokens=5,
        pool_tokens=64,
        peak_pool_tokens=48,
        peak_host_bytes=8192,
        offload_seconds=0.25,
        restore_seconds=0.125,
    )
    requests = [make_request("a", **ANSWERED), make_request("b", error="too large")]
    expected = {
        "requests": 2,
        "failed": 1,
        "prompt_tokens": 10,
        "new_tokens": 6,
        "retractions": 3,
        "resumes": 2,
        "offloaded_bytes": 4096,
        "restored_bytes": 2048,
        "recomputed_tokens": 5,
        "pool_tokens": 64,
        "peak_pool_tokens": 48,
        "peak_host_bytes": 8192,
        "seconds": 1.5,
        "tokens_per_second": 4.0,
        "offload_seconds": 0.25,
        "restore_seconds": 0.125,
        "exact": True,
        "exact_rows": "2 to 4",
        "selfcheck_seconds": 0.25,
        "verified": None,
    }
    report = make_report(requests, stats, seconds=1.5, exact=True, check=FOUND, verified=None)
    assert expected == report
    assert list(expected) == list(report)


def test_table_says_what_was_recomputed() -> None:
    """The table counts the recomputed tokens, and the requests that are inexact because of them."""
    requests = [make_request("a", exact=False), make_request("b")]
    stats = make_stats(recomputed_tokens=7)
    report = make_report(requests, stats, seconds=1.0, exact=False, check=None, verified=None)
    rows = dict(summarize(requests, report))
    assert "the KV of 7 tokens" == rows["recomputed"]
    assert "false (1 request recomputed in different steps)" == rows["exact"]


def test_table_of_a_fast_run_says_so() -> None:
    """Nothing was recomputed, so `--fast` is the reason."""
    report = make_report([], make_stats(), seconds=0.0, exact=False, check=None, verified=None)
    rows = dict(summarize([], report))
    assert "false (--fast)" == rows["exact"]
    assert "recomputed" not in rows
