"""Tells whether kvtide is active in this environment's SGLang, and exact for each of its pools.

Only this module of the doctor imports SGLang.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, final

from kvtide.doctor.below import facts_of, findings_of, to_json
from kvtide.doctor.finding import Finding, count_failed
from kvtide.doctor.report import Page
from kvtide.errors import first_line
from kvtide.plugin.environment import HOST_MEMORY
from kvtide.plugin.sglang.settings import COLOCATED, MODE, Settings, read_settings
from kvtide.sizes import counted, format_size

if TYPE_CHECKING:
    from kvtide.doctor.sglang_checks import ClassFound, TriedCase

_TITLES = (
    (("exact", "wrong", "untried"), "Pools that kvtide moves"),
    (("refused",), "Pools that are left to SGLang"),
    (("part", "abstract"), "Classes that aren't pools by themselves"),
    (("unknown",), "Pools that kvtide doesn't know"),
)
_CONSEQUENCE = "SGLang runs as if kvtide weren't there"


@final
class SGLangReport:
    """See Report."""

    def __init__(self) -> None:
        """Imports SGLang, and reads kvtide's settings.

        Raises UsageError if SGLang isn't installed or can't be imported, and for invalid settings.
        """
        from kvtide.arena.budget import default_host_bytes
        from kvtide.doctor.sglang_checks import import_sglang

        # SGLang prints to standard output, which belongs to the report and its JSON.
        with redirect_stdout(sys.stderr):
            import_sglang()
            self.settings: Settings = read_settings()
            limit_bytes = self.settings.host_memory_bytes
            self.limit_bytes = default_host_bytes(0) if limit_bytes is None else limit_bytes
            """The limit of the arenas of all ranks of a server on this host."""
            self.versions = _versions()
            self.below: list[Finding] = findings_of(self.settings.below)
        self.gone: list[str] = []
        """Names that kvtide reads of SGLang and that this SGLang doesn't have."""
        self.active: list[Finding] = []
        self.trips: list[TriedCase] = []
        self.classes: list[ClassFound] = []
        self.lost: Finding | None = None
        """Why no round trip could be tried, or None."""

    @property
    def is_refused(self) -> bool:
        """Whether kvtide refuses this SGLang, which lacks names that kvtide reads."""
        from kvtide.plugin.sglang.package import SGLANG

        return bool(self.gone) and self.versions["sglang"] not in SGLANG.tested

    @property
    def is_active(self) -> bool:
        """Whether a server of this SGLang would save and restore through kvtide."""
        return not count_failed(self.active) and not self.is_refused

    @property
    def findings(self) -> list[Finding]:
        """See Report. A case that can't be built here isn't a check."""
        trips = [_trip_finding(trip) for trip in self.trips if trip.by_kvtide is not None]
        classes = [_class_finding(found) for found in self.classes]
        lost = [self.lost] if self.lost else []
        set_here = [self._variables_finding(), *self.below]
        before = [*set_here, self._reads_finding(), *self.active, *lost]
        return [*before, *trips, *classes]

    def examine(self, page: Page) -> None:
        """See Report."""
        with redirect_stdout(sys.stderr):
            page.facts(self._facts())
            for finding in (self._variables_finding(), *self.below):
                page.finding(finding)
            self._look_for_reads(page)
            self._check_active(page)
            self._try_trips(page)
            self._look_at_classes(page)
        page.heading(self._in_short())
        is_off = self.settings.mode == "off"
        meanwhile = "" if is_off else f" ({MODE}=0 turns kvtide off meanwhile)"
        page.repeat_failed(f"What failed{meanwhile}", self.findings)
        page.verdict(f"SGLang {self.versions['sglang']}", self.findings, good=self._for_whom())

    def _look_for_reads(self, page: Page) -> None:
        from kvtide.plugin.sglang.reads import SGLANG_READS

        page.heading("Whether kvtide can read this SGLang")
        self.gone = SGLANG_READS.what_is_gone()
        page.finding(self._reads_finding(), good="all there")

    def _check_active(self, page: Page) -> None:
        from kvtide.doctor.sglang_checks import why_not_hooked, why_not_loaded

        page.heading("Whether kvtide is active in SGLang")

        def find(name: str, reason: str | None) -> bool:
            finding = Finding(name, reason, _CONSEQUENCE if reason else "")
            self.active.append(finding)
            page.finding(finding)
            return finding.ok

        if self.settings.mode == "off":
            find("kvtide is on", f"{MODE}=0 turns it off; to turn it on, unset {MODE}")
        elif find("SGLang loads kvtide's plugin", why_not_loaded()):
            find("hooks are in place", why_not_hooked(self.settings))

    def _try_trips(self, page: Page) -> None:
        from kvtide.doctor.sglang_checks import all_cases, make_trips

        page.heading("Round trips of small pools on the CPU, by kvtide and by SGLang's own copy")
        try:
            cases = all_cases()
        except (ImportError, AttributeError) as error:
            reason = f"this SGLang lacks what the cases are made of: {first_line(error)}"
            self.lost = Finding("round trips", reason, "nothing is known about its pools")
            page.finding(self.lost)
            return
        for trip in make_trips(cases):
            self.trips.append(trip)
            if trip.by_kvtide is None:
                page.value(trip.name, f"can't be built here: {trip.unbuilt}", is_doubtful=True)
            else:
                page.finding(_trip_finding(trip), good=_beside(trip))

    def _look_at_classes(self, page: Page) -> None:
        from kvtide.doctor.sglang_checks import find_classes

        self.classes = find_classes(self.trips)
        for verdicts, title in _TITLES:
            classes = [found for found in self.classes if found.verdict in verdicts]
            if not classes:
                continue
            page.heading(f"{title}: {len(classes)}")
            failed = [found for found in classes if found.verdict in ("unknown", "wrong")]
            others = [found for found in classes if found not in failed]
            if others:
                page.facts([(found.name, _said_of(found)) for found in others])
            for found in failed:
                page.finding(Finding(f"{found.name} ({found.file})", found.reason))

    def _reads_finding(self) -> Finding:
        reason = f"gone: {', '.join(self.gone)}" if self.gone else None
        moved = "pools that use these names aren't moved"
        consequence = "all pools are left to SGLang" if self.is_refused else moved
        return Finding("names that kvtide reads of SGLang", reason, consequence if reason else "")

    def _variables_finding(self) -> Finding:
        unknown = self.settings.unknown
        reason = f"kvtide knows no variable {', '.join(unknown)}" if unknown else None
        return Finding("variables of kvtide", reason, "it has no effect" if unknown else "")

    def _for_whom(self) -> str:
        """The verdict on a sound plugin: the servers that it serves with these settings."""
        if self.settings.is_colocated:
            return "ok for decode servers and for ordinary servers"
        return f"ok for decode servers; ordinary servers need {COLOCATED}=1"

    def _in_short(self) -> str:
        from kvtide.doctor.sglang_checks import where_copies_fail

        alone = Counter(trip.sglang_word for trip in self.trips)
        through = [trip.by_kvtide for trip in self.trips if trip.by_kvtide is not None]
        exact = sum(outcome.verdict == "exact" for outcome in through)
        unbuilt = len(self.trips) - len(through)
        counts = ", ".join(
            f"{alone[verdict]} {verdict}" for verdict in ("exact", "wrong", "crash", "no copy")
        )
        skipped = f"; {counted(unbuilt, 'case')} can't be built here" if unbuilt else ""
        trips = counted(len(through), "round trip")
        where = where_copies_fail(self.trips)
        fail = f" (those that aren't exact fail: {where})" if where else ""
        return f"{trips}: kvtide {exact} exact; SGLang's own copy {counts}{fail}{skipped}"

    def _facts(self) -> list[tuple[str, str]]:
        settings, limit = self.settings, format_size(self.limit_bytes)
        modes = {
            "on": "on: a pool that is refused is left to SGLang",
            "off": "0: off",
            "strict": "strict: a pool that is refused stops the server",
        }
        colocated = {
            True: "1: servers that aren't decode servers save and restore, too",
            False: "0: servers that aren't decode servers compute retracted requests again",
        }
        memory = f"{limit} for all ranks on this host"
        if settings.host_memory_bytes is None:
            memory = f"not set: a quarter of the memory that is free, now {memory}"
        return [
            ("versions", ", ".join(f"{name} {text}" for name, text in self.versions.items())),
            (MODE, modes[settings.mode]),
            (COLOCATED, colocated[settings.is_colocated]),
            (HOST_MEMORY, memory),
            *facts_of(settings.below),
        ]

    def to_json(self) -> dict[str, object]:
        """See Report."""
        settings, failed = self.settings, count_failed(self.findings)
        return {
            **self.versions,
            "settings": {
                "mode": settings.mode,
                "colocated": settings.is_colocated,
                "host_memory_bytes": settings.host_memory_bytes,
                **to_json(settings.below),
            },
            "arena_limit_bytes": self.limit_bytes,
            "gone": self.gone,
            "active": self.is_active,
            "unknown_variables": [*settings.unknown],
            "below": [finding.to_json() for finding in self.below],
            "hooks": [finding.to_json() for finding in self.active],
            "round_trips": [_trip_to_json(trip, self.classes) for trip in self.trips],
            "classes": [_class_to_json(found) for found in self.classes],
            "lost": None if self.lost is None else self.lost.reason,
            "checks": len(self.findings),
            "failed": failed,
            "ok": not failed,
        }


def _trip_finding(trip: TriedCase) -> Finding:
    assert trip.by_kvtide is not None, "a case that wasn't built has no finding"
    if trip.by_kvtide.verdict == "exact":
        return Finding(trip.name, None)
    return Finding(trip.name, f"{trip.by_kvtide.verdict}: {trip.by_kvtide.detail}")


def _class_finding(found: ClassFound) -> Finding:
    """Only an unknown class fails here; for a wrong class its round trip has failed."""
    return Finding(found.name, found.reason if found.verdict == "unknown" else None)


def _beside(trip: TriedCase) -> str:
    if not trip.fails_on:
        return "exact"
    return f"exact; SGLang: {trip.sglang_word} ({trip.fails_on}): {trip.reason}"


def _said_of(found: ClassFound) -> str:
    if found.verdict == "exact":
        return f"exact in {counted(found.trip_count, 'round trip')}"
    return found.reason


def _versions() -> dict[str, str]:
    import torch

    from kvtide import __version__
    from kvtide.plugin.sglang.package import SGLANG

    return {"sglang": SGLANG.version, "kvtide": __version__, "torch": torch.__version__}


def _trip_to_json(trip: TriedCase, classes: Sequence[ClassFound]) -> dict[str, object]:
    outcomes = {"sglang": trip.by_sglang, "kvtide": trip.by_kvtide}
    told: dict[str, object] = {
        name: outcome and {"verdict": outcome.verdict, "detail": outcome.detail or None}
        for name, outcome in outcomes.items()
    }
    return {
        "name": trip.name,
        **told,
        "classes": [found.name for found in classes if found.name in trip.classes],
        "unbuilt": trip.unbuilt or None,
        "reason": trip.reason or None,
        "fails_on": trip.fails_on or None,
    }


def _class_to_json(found: ClassFound) -> dict[str, object]:
    return {
        "name": found.name,
        "file": found.file,
        "verdict": found.verdict,
        "reason": found.reason or None,
        "round_trips": found.trip_count,
    }
