"""Makes the counts of a run: `--report`, one JSON object, and the table at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtide.cli.files import write_text
from kvtide.cli.outcome import Outcome, PromptCounts
from kvtide.errors import first_line
from kvtide.sizes import counted, format_size

if TYPE_CHECKING:
    from kvtide.serve.engine import EngineStats
    from kvtide.serve.request import Request
    from kvtide.serve.selfcheck import RowCheck
    from kvtide.tier.counts import TierCounts

_PLACES = {"device": "the pool", "host": "host memory", "disk": "disk", "mooncake": "Mooncake"}


def write_report(path: Path, report: dict[str, object]) -> None:
    """Writes the report. Raises KvtideError if it can't be written."""
    write_text(path, json.dumps(report, indent=2) + "\n")


def make_report(
    counts: PromptCounts, outcome: Outcome, *, exact: bool, verified: bool | None
) -> dict[str, object]:
    """The `--report` object. What is counted beside prompts is of this run alone.

    `exact` says whether every answer is exact, recomputed ones included; the report has null where
    no prompt was answered. `verified` is None without `--verify` and until verifying has ended.
    """
    stats, seconds, check = outcome.stats, outcome.seconds, outcome.exact_check
    return {
        "requests": counts.prompts,
        "kept": counts.kept,
        "answered": counts.answered,
        "failed": counts.failed,
        "ended_by": _what_ended(outcome),
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "cached_tokens": {"device": 0, "host": 0, **stats.cached_tokens},
        "retractions": stats.retractions,
        "resumes": stats.resumes,
        "offloaded_bytes": stats.offloaded_bytes,
        "restored_bytes": stats.restored_bytes,
        "recomputed_tokens": stats.recomputed_tokens,
        "pool_tokens": stats.pool_tokens,
        "peak_pool_tokens": stats.peak_pool_tokens,
        "host_limit_bytes": stats.host_limit_bytes,
        "peak_host_bytes": stats.peak_host_bytes,
        "disk_limit_bytes": stats.disk_limit_bytes,
        "peak_disk_bytes": stats.peak_disk_bytes,
        "spills": stats.spills,
        "reads_in_time": stats.reads_in_time,
        "reads_late": stats.reads_late,
        "tier_wait_seconds": round(stats.tier_wait_seconds, 6),
        "tiers": {name: _rounded(counts) for name, counts in stats.tiers.items()},
        "seconds": round(seconds, 6),
        "tokens_per_second": round(stats.new_tokens / seconds, 3) if seconds > 0 else 0.0,
        "offload_seconds": round(stats.offload_seconds, 6),
        "restore_seconds": round(stats.restore_seconds, 6),
        "exact": exact if counts.answered else None,
        "exact_rows": None if check is None else check.exact_rows,
        "selfcheck_seconds": None if check is None else round(check.seconds, 3),
        "verified": verified,
    }


def describe_cuts(stats: EngineStats) -> str | None:
    """The line about answers that the model's context ends; None if there are none."""
    if not stats.cut:
        return None
    return (
        f"{counted(stats.cut, 'request')} may have fewer new tokens than max_new_tokens says: "
        "the model's context ends before"
    )


def _what_ended(outcome: Outcome) -> str | None:
    """The signal or the error that ended the run early."""
    if outcome.error is not None:
        return first_line(outcome.error)
    return None if outcome.ended_by is None else outcome.ended_by.name


def describe_check(check: RowCheck) -> str:
    """The line about exact mode: its row counts, and its cost if it is slow here."""
    return f"exact mode: {check.detail} (self-check: {check.seconds:.1f} s)"


def summarize(requests: Sequence[Request], report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows (name, value) of the table that is printed at the end."""
    retracted = sum(request.retractions > 0 for request in requests)
    moving = report["offload_seconds"] + report["restore_seconds"]
    share = moving / report["seconds"] if report["seconds"] else 0.0
    rows = [
        ("requests", _explain_requests(report)),
        ("prompt tokens", f"{report['prompt_tokens']:,}"),
        *_cached_rows(report),
        (
            "new tokens",
            f"{report['new_tokens']:,} in {report['seconds']:.1f} s, "
            f"{report['tokens_per_second']:.1f} a second",
        ),
        (
            "retractions",
            f"{report['retractions']:,}, of {counted(retracted, 'request')}; "
            f"{report['resumes']:,} resumed",
        ),
        (
            "moved",
            f"{format_size(report['offloaded_bytes'])} out, "
            f"{format_size(report['restored_bytes'])} back, in {share:.2%} of the time",
        ),
        (
            "KV pool",
            f"{report['pool_tokens']:,} tokens, at most {report['peak_pool_tokens']:,} in use",
        ),
        ("host memory", f"at most {format_size(report['peak_host_bytes'])} in use"),
    ]
    rows += [(name, _explain_tier(name, report)) for name in report["tiers"]]
    if report["tiers"]:
        rows.append(("read ahead", _explain_reads(report)))
    if report["recomputed_tokens"]:
        rows.append(("recomputed", f"the KV of {counted(report['recomputed_tokens'], 'token')}"))
    inexact = sum(not request.exact for request in requests)
    rows.append(("exact", _explain_exact(report["exact"], inexact)))
    return rows


def _cached_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The row about tokens of prompts that weren't computed; none if all were."""
    places = {place: count for place, count in report["cached_tokens"].items() if count}
    if not places:
        return []
    said = ", ".join(
        f"{count:,} from {_PLACES.get(place, place)}" for place, count in places.items()
    )
    return [("cached tokens", f"{sum(places.values()):,} of the prompts weren't computed: {said}")]


def _explain_requests(report: Mapping[str, Any]) -> str:
    kept = f", {report['kept']:,} kept from earlier runs" if report["kept"] else ""
    return f"{report['requests']:,}, {report['failed']:,} of them failed{kept}"


def _explain_tier(name: str, report: Mapping[str, Any]) -> str:
    """What a tier took and gave back; then what it didn't, and why."""
    counts = report["tiers"][name]
    said = (
        f"{format_size(counts['down_bytes'])} down in {counts['down_seconds']:.1f} s, "
        f"{format_size(counts['up_bytes'])} up in {counts['up_seconds']:.1f} s"
    )
    if name == "disk":
        said += f", at most {format_size(report['peak_disk_bytes'])} in use"
    lost = {**counts["misses"], "damaged": counts["damaged"]}
    for what, reasons in (("not given back", lost), ("refused", counts["refused_writes"])):
        named = [f"{count:,} {reason}" for reason, count in reasons.items() if count]
        said += f"; {what}: {', '.join(named)}" if named else ""
    return said


def _explain_reads(report: Mapping[str, Any]) -> str:
    return (
        f"{report['reads_in_time']:,} in time, {report['reads_late']:,} late; "
        f"{report['tier_wait_seconds']:.1f} s waited for tiers"
    )


def _rounded(counts: TierCounts) -> dict[str, Any]:
    values = asdict(counts)
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in values.items()
    }


def _explain_exact(exact: bool | None, inexact_count: int) -> str:
    if exact is None:
        return "null (nothing was answered)"
    if exact:
        return "true"
    if inexact_count:
        return f"false ({counted(inexact_count, 'request')} recomputed in different steps)"
    return "false (--fast)"
