"""`kvtide doctor --sglang`: whether kvtide is active in this SGLang, and what comes of its pools.

Each line is printed as it becomes known. SGLang is imported here and nowhere else in the command.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from rich.console import Console
from rich.text import Text

from kvtide.cli.checkup.finding import Finding
from kvtide.cli.display import counted, print_table
from kvtide.cli.findings import (
    count_failed,
    finding_to_json,
    print_finding,
    print_heading,
    print_value,
    print_verdict,
)
from kvtide.errors import first_line
from kvtide.sizes import format_size

if TYPE_CHECKING:
    from kvtide.plugin.sglang.checkup.installed import ClassFound, Trip
    from kvtide.plugin.sglang.settings import Settings

_GROUPS = (
    (("exact", "wrong", "untried"), "Pools that kvtide moves"),
    (("refused",), "Pools that are left to SGLang"),
    (("part", "abstract"), "Classes that are no pool by themselves"),
    (("unknown",), "Pools that kvtide doesn't know"),
)


@final
@dataclass(slots=True)
class SGLangReport:
    """All that was found, in the order in which it is printed."""

    versions: dict[str, str]
    settings: Settings
    limit_bytes: int
    """What the arenas of this host's ranks might take together, were a server to start now."""
    gone: list[str] = field(default_factory=list)
    """Of what kvtide reads of SGLang, all that this one doesn't have."""
    active: list[Finding] = field(default_factory=list)
    trips: list[Trip] = field(default_factory=list)
    classes: list[ClassFound] = field(default_factory=list)
    lost: Finding | None = None
    """Why no round trips could be tried, if so."""

    @property
    def is_refused(self) -> bool:
        """Whether kvtide leaves all pools to this SGLang, as `attach` finds that it has moved."""
        from kvtide.plugin.sglang.homes import SGLANG

        return bool(self.gone) and self.versions["sglang"] not in SGLANG.tested

    @property
    def findings(self) -> list[Finding]:
        """One for each check; what can't be built here is none."""
        trips = [_of_trip(trip) for trip in self.trips if trip.through is not None]
        classes = [_of_class(found) for found in self.classes]
        lost = [self.lost] if self.lost else []
        return [_of_reads(self), *self.active, *lost, *trips, *classes]

    @property
    def failed_count(self) -> int:
        """How many checks failed."""
        return count_failed(self.findings)


def examine_sglang(console: Console) -> SGLangReport:
    """Does all of it, and prints what is found to `console`.

    Raises UsageError where SGLang isn't installed or can't be imported, and for settings that
    can't be meant.
    """
    # What SGLang prints on the way isn't part of the report, nor of its JSON.
    with redirect_stdout(sys.stderr):
        report = _look_around()
        _print_here(console, report)
        _look_for_reads(console, report)
        _check_active(console, report)
        _try_trips(console, report)
        _look_at_classes(console, report)
    print_heading(console, _in_short(report))
    _print_failed_again(console, report)
    print_verdict(console, f"SGLang {report.versions['sglang']}", report.findings)
    return report


def _look_around() -> SGLangReport:
    from kvtide.arena.budget import default_host_bytes
    from kvtide.plugin.sglang.checkup.installed import import_sglang
    from kvtide.plugin.sglang.settings import read_settings

    import_sglang()
    settings = read_settings()
    limit_bytes = settings.host_memory_bytes
    if limit_bytes is None:
        limit_bytes = default_host_bytes(0)
    return SGLangReport(_versions(), settings, limit_bytes)


def _look_for_reads(console: Console, report: SGLangReport) -> None:
    from kvtide.plugin.sglang.reads import what_is_gone

    print_heading(console, "Whether this SGLang is one that kvtide can read")
    report.gone = what_is_gone()
    print_finding(console, _of_reads(report), good="all there")


def _check_active(console: Console, report: SGLangReport) -> None:
    from kvtide.plugin.sglang.checkup.installed import why_not_hooked, why_not_loaded

    if report.settings.mode == "off":
        print_heading(console, "kvtide is turned off (KVTIDE_SGLANG=0)")
        return
    print_heading(console, "Whether kvtide is active in SGLang")

    def found(name: str, reason: str | None) -> bool:
        finding = Finding(name, reason, "SGLang runs as if kvtide weren't there" if reason else "")
        report.active.append(finding)
        print_finding(console, finding)
        return finding.ok

    if found("SGLang loads kvtide's plugin", why_not_loaded()):
        found("hooks are in place", why_not_hooked(report.settings))


def _try_trips(console: Console, report: SGLangReport) -> None:
    from kvtide.plugin.sglang.checkup.installed import all_cases, make_trips

    print_heading(console, "Round trips of small pools on the CPU, and what SGLang's own copy does")
    try:
        cases = all_cases()
    except (ImportError, AttributeError) as error:
        reason = f"this SGLang lacks what they are made of: {first_line(error)}"
        report.lost = Finding("round trips", reason, "nothing is known of its pools")
        print_finding(console, report.lost)
        return
    for trip in make_trips(cases):
        report.trips.append(trip)
        if trip.through is None:
            print_value(console, trip.name, Text(f"can't be built here: {trip.unbuilt}", "yellow"))
        else:
            print_finding(console, _of_trip(trip), good=_beside(trip))


def _look_at_classes(console: Console, report: SGLangReport) -> None:
    from kvtide.plugin.sglang.checkup.installed import find_classes

    report.classes = find_classes(report.trips)
    for verdicts, title in _GROUPS:
        group = [found for found in report.classes if found.verdict in verdicts]
        if not group:
            continue
        print_heading(console, f"{title}: {len(group)}")
        failed = [found for found in group if found.verdict in ("unknown", "wrong")]
        others = [found for found in group if found not in failed]
        if others:
            print_table(console, [(found.name, _said_of(found)) for found in others])
        for found in failed:
            print_finding(console, Finding(f"{found.name} ({found.file})", found.reason))


def _print_failed_again(console: Console, report: SGLangReport) -> None:
    """On a terminal, where a hundred lines have gone by since."""
    failed = [finding for finding in report.findings if not finding.ok]
    if failed and console.is_terminal:
        print_heading(console, "What failed (KVTIDE_SGLANG=0 turns kvtide off meanwhile)")
        for finding in failed:
            print_finding(console, finding)


def _of_reads(report: SGLangReport) -> Finding:
    reason = f"gone: {', '.join(report.gone)}" if report.gone else None
    moved = "what has another name now isn't moved"
    consequence = "all pools are left to SGLang" if report.is_refused else moved
    return Finding("what kvtide reads of SGLang", reason, consequence if reason else "")


def _of_trip(trip: Trip) -> Finding:
    assert trip.through is not None, "a trip that wasn't made is no finding"
    if trip.through.verdict == "exact":
        return Finding(trip.name, None)
    return Finding(trip.name, f"{trip.through.verdict}: {trip.through.detail}")


def _of_class(found: ClassFound) -> Finding:
    """One that is wrong has failed as a round trip."""
    return Finding(found.name, found.reason if found.verdict == "unknown" else None)


def _beside(trip: Trip) -> str:
    return "exact" if trip.own_word == "exact" else f"exact; SGLang: {trip.own_word}"


def _said_of(found: ClassFound) -> str:
    if found.verdict == "exact":
        return f"exact in {counted(found.trip_count, 'round trip')}"
    return found.reason


def _in_short(report: SGLangReport) -> str:
    own = Counter(trip.own_word for trip in report.trips)
    through = [trip.through for trip in report.trips if trip.through is not None]
    exact = sum(outcome.verdict == "exact" for outcome in through)
    unbuilt = len(report.trips) - len(through)
    counts = ", ".join(
        f"{own[verdict]} {verdict}" for verdict in ("exact", "wrong", "crash", "no copy")
    )
    skipped = f"; {counted(unbuilt, 'case')} can't be built here" if unbuilt else ""
    return (
        f"{counted(len(through), 'round trip')}: kvtide {exact} exact; SGLang's own copy {counts}"
        f"{skipped}"
    )


def _versions() -> dict[str, str]:
    import torch

    from kvtide import __version__
    from kvtide.plugin.sglang.homes import SGLANG

    return {"sglang": SGLANG.version, "kvtide": __version__, "torch": torch.__version__}


def _print_here(console: Console, report: SGLangReport) -> None:
    from kvtide.plugin.sglang import settings as names

    settings, limit = report.settings, format_size(report.limit_bytes)
    modes = {
        "on": "on: a pool that is refused is left to SGLang",
        "off": "0: off",
        "strict": "strict: a pool that is refused stops the server",
    }
    colocated = {
        True: "1: servers that aren't decode servers save and restore, too",
        False: "0: servers that aren't decode servers compute retracted requests anew",
    }
    memory = f"{limit} for all ranks on this host"
    if settings.host_memory_bytes is None:
        memory = f"not set: a quarter of the memory that is free, now {memory}"
    rows = [
        ("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())),
        (names.MODE, modes[settings.mode]),
        (names.COLOCATED, colocated[settings.is_colocated]),
        (names.HOST_MEMORY, memory),
    ]
    print_table(console, rows)


def to_json(report: SGLangReport) -> dict[str, object]:
    """The object that `--json` prints."""
    settings = report.settings
    return {
        **report.versions,
        "settings": {
            "mode": settings.mode,
            "colocated": settings.is_colocated,
            "host_memory_bytes": settings.host_memory_bytes,
        },
        "arena_limit_bytes": report.limit_bytes,
        "gone": report.gone,
        "active": _is_active(report),
        "hooks": [finding_to_json(finding) for finding in report.active],
        "round_trips": [_trip_to_json(trip, report.classes) for trip in report.trips],
        "classes": [
            {
                "name": found.name,
                "file": found.file,
                "verdict": found.verdict,
                "reason": found.reason or None,
                "round_trips": found.trip_count,
            }
            for found in report.classes
        ],
        "lost": None if report.lost is None else report.lost.reason,
        "checks": len(report.findings),
        "failed": report.failed_count,
        "ok": not report.failed_count,
    }


def _is_active(report: SGLangReport) -> bool:
    is_on = report.settings.mode != "off"
    return is_on and not count_failed(report.active) and not report.is_refused


def _trip_to_json(trip: Trip, classes: Sequence[ClassFound]) -> dict[str, object]:
    outcomes = {"sglang": trip.own, "kvtide": trip.through}
    told: dict[str, object] = {
        name: None if one is None else {"verdict": one.verdict, "detail": one.detail or None}
        for name, one in outcomes.items()
    }
    return {
        "name": trip.name,
        **told,
        "classes": [found.name for found in classes if found.name in trip.classes],
        "unbuilt": trip.unbuilt or None,
        "reason": trip.reason or None,
    }
