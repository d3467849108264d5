"""Checks the SGLang of this environment: is kvtide active in it, and exact for its pools?

`kvtide doctor --sglang` prints the findings. Nothing here needs a server or an accelerator: the
pools are small, and on the CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal, final

from kvtide.errors import UsageError, first_line
from kvtide.plugin.sglang.pools.known_classes import known_classes
from kvtide.plugin.sglang.settings import Settings

if TYPE_CHECKING:
    from kvtide.plugin.sglang.cases.round_trips import Built, Case, OnlyOn, TripResult

PLUGINS, ENTRY_POINT = "sglang.srt.plugins", "kvtide.plugin.sglang:register"
CHOSEN = "SGLANG_PLUGINS"
"""SGLang's variable with the names of the plugins that it is to load, if not all."""

MACHINES: Mapping[OnlyOn, str] = {
    "": "CUDA too",
    "NPU": "NPU",
    "ROCm": "ROCm",
    "no CUDA": "no CUDA",
    "CPU": "CPU alone",
}
"""The machines on which SGLang's copy of a case isn't exact, as reports call them."""

WHERE: Mapping[OnlyOn, str] = {
    "": "on CUDA machines too",
    "NPU": "on NPUs",
    "ROCm": "on ROCm machines",
    "no CUDA": "only where torch has no CUDA, as for XPU",
    "CPU": "on a CPU alone",
}
"""The same machines in a sentence."""

Verdict = Literal["exact", "wrong", "untried", "refused", "part", "abstract", "unknown"]


@final
@dataclass(frozen=True, slots=True)
class TriedCase:
    """A case, and the results of its round trips by SGLang's copy and by kvtide's.

    The results are None where its pool can't be built here.
    """

    name: str
    classes: frozenset[str] = frozenset()
    """The classes of its pools, by name."""
    by_sglang: TripResult | None = None
    by_kvtide: TripResult | None = None
    unbuilt: str = ""
    """Why its pool can't be built here; empty if it can."""
    reason: str = ""
    """Why SGLang's copy isn't exact, where that is known."""
    only_on: OnlyOn = ""
    """The only machines on which it isn't exact; empty if CUDA machines are among them."""

    @property
    def sglang_word(self) -> str:
        """What SGLang's copy did: its verdict, or `no copy` where the class has none."""
        return "untried" if self.by_sglang is None else word_for(self.by_sglang)

    @property
    def fails_on(self) -> str:
        """The machines on which SGLang's copy isn't exact, in words; empty if it is exact."""
        return "" if self.sglang_word in ("exact", "untried") else MACHINES[self.only_on]


@final
@dataclass(frozen=True, slots=True)
class ClassFound:
    """A class of pools, in `file` below `sglang/srt`, and kvtide's verdict on it.

    The class is `exact` in all round trips, or `wrong` in some; `untried` if no pool of it can be
    built here; `refused`, `part` of another class's pools, `abstract`, or `unknown` to kvtide.
    """

    name: str
    file: str
    verdict: Verdict
    reason: str = ""
    trip_count: int = 0


def import_sglang() -> None:
    """Imports what the doctor needs. Raises UsageError, with the remedy, if that fails."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise UsageError(
            f"--sglang: SGLang isn't installed in this environment ({sys.prefix}); install kvtide "
            "into SGLang's own environment (pip install kvtide) and run it there"
        )
    try:
        for name in (PLUGINS, "sglang.srt.mem_cache.memory_pool"):
            importlib.import_module(name)
    except Exception as error:  # whatever its kernels and a vendor's packages raise
        raise UsageError(
            f"--sglang: SGLang is installed here, but can't be imported: {first_line(error)}; "
            "run it where SGLang's server runs"
        ) from error


def why_not_loaded() -> str | None:
    """Why SGLang's processes won't load kvtide's plugin; None if they will."""
    found = [entry for entry in entry_points(group=PLUGINS) if entry.value == ENTRY_POINT]
    if not found:
        return f"no package in {sys.prefix} registers it; install kvtide there: pip install kvtide"
    chosen = [name.strip() for name in os.environ.get(CHOSEN, "").split(",") if name.strip()]
    if chosen and found[0].name not in chosen:
        return f"{CHOSEN}={','.join(chosen)} leaves it out; add {found[0].name}, or unset it"
    return None


def why_not_hooked(settings: Settings) -> str | None:
    """Loads SGLang's plugins into this process, as its own do. None if all hooks are in place."""
    from kvtide.plugin.sglang.hooks import hooks_not_in_place

    try:
        importlib.import_module(PLUGINS).load_plugins()
        loose = hooks_not_in_place(settings)
    except SystemExit as error:  # `strict`, and this SGLang lacks a function
        return str(error)
    except (ImportError, AttributeError) as error:
        return f"this SGLang lacks a function that kvtide stands around: {first_line(error)}"
    return f"SGLang calls {', '.join(loose)} without them" if loose else None


def word_for(result: TripResult) -> str:
    """The verdict, or `no copy`: SGLang's base class raises that error where a class has none."""
    return "no copy" if result.detail.strip() == "NotImplementedError:" else result.verdict


def where_copies_fail(trips: Iterable[TriedCase]) -> str:
    """Counts on which machines SGLang's copies aren't exact: `3 on CUDA machines too, …`."""
    counts = Counter(trip.only_on for trip in trips if trip.fails_on)
    return ", ".join(f"{counts[kind]} {text}" for kind, text in WHERE.items() if counts[kind])


def all_cases() -> Sequence[Case]:
    """Collects all cases. Raises ImportError or AttributeError if SGLang has moved a class."""
    from kvtide.plugin.sglang.cases.round_trips import set_what_servers_set

    set_what_servers_set()
    from kvtide.plugin.sglang.cases.all_cases import CASES

    return CASES


def make_trips(cases: Iterable[Case]) -> Iterator[TriedCase]:
    """Tries each case by SGLang's copy and by kvtide's, one by one. Pools may fail to be built."""
    for case in cases:
        try:
            yield _make_trip(case)
        except Exception as error:  # whatever a kernel raises that isn't made for this machine
            yield TriedCase(
                case.name, unbuilt=first_line(error), reason=case.reason, only_on=case.only_on
            )


def _make_trip(case: Case) -> TriedCase:
    from kvtide.plugin.sglang.cases.round_trips import KvtideWay, Way, round_trip

    names: set[str] = set()

    def build() -> Built:
        built = case.build()
        names.update(type(part).__name__ for part in reachable(built))
        return built

    watched = replace(case, build=build)
    by_sglang, by_kvtide = round_trip(watched, Way()), round_trip(watched, KvtideWay())
    tried = TriedCase(case.name, frozenset(names), by_sglang, by_kvtide)
    return replace(tried, reason=case.reason, only_on=case.only_on)


def reachable(built: Built) -> Iterator[object]:
    """The objects of SGLang's classes, and of kvtide's, that the pools consist of."""
    waiting: list[Any] = [built.pool, built.request_pool, *built.draft_pools]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, list | tuple):
            waiting += part
        elif type(part).__module__.partition(".")[0] in ("sglang", "kvtide"):
            yield part
            waiting += getattr(part, "__dict__", {}).values()


def find_classes(trips: Sequence[TriedCase]) -> list[ClassFound]:
    """Lists each class of pools in the installed SGLang, with the verdict that the trips gave."""
    tried = [trip for trip in trips if trip.by_kvtide is not None]
    counts = Counter(name for trip in tried for name in trip.classes)
    wrong: dict[str, list[str]] = {}
    for trip in tried:
        if trip.by_kvtide is not None and trip.by_kvtide.verdict != "exact":
            for name in trip.classes:
                wrong.setdefault(name, []).append(trip.name)
    found = []
    for known in known_classes():
        count = counts[known.name]
        verdict, reason = _verdict(known.verdict, count, wrong.get(known.name, []))
        found.append(ClassFound(known.name, known.file, verdict, reason or known.reason, count))
    return found


def _verdict(verdict: str, count: int, wrong: Sequence[str]) -> tuple[Verdict, str]:
    """The verdict on a class and its reason, from the census's verdict and from its round trips."""
    if verdict == "unknown":
        return "unknown", "kvtide doesn't know this class; SGLang's own copy is used"
    if verdict == "refused":
        return "refused", ""
    if verdict == "within":
        return "part", ""
    if verdict == "abstract":
        return "abstract", ""
    if wrong:
        return "wrong", f"not exact in {len(wrong)} of {count}: {'; '.join(wrong)}"
    return ("exact", "") if count else ("untried", "no pool of it can be built here")
