"""Makes the tables in docs/sglang.md from a run of all cases against the installed SGLang.

    SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=engines/sglang/stand_ins \\
        .venv-sglang/bin/python engines/sglang/table.py [--check]

It rewrites the lines between the markers there. With --check it compares them instead, prints the
differences, and exits with 1 if there are any.
"""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path

from kvtide.doctor.sglang_checks import (
    WHERE,
    TriedCase,
    all_cases,
    make_trips,
    reachable,
)
from kvtide.plugin.sglang.cases.round_trips import Case, KvtideWay, Refusal, round_trip
from kvtide.plugin.sglang.ordinary.coverage import reasons
from kvtide.plugin.sglang.package import SGLANG
from kvtide.plugin.sglang.pools.known_classes import known_classes

DOCS = Path(__file__).parents[2] / "docs" / "sglang.md"
BEGIN, END = "<!-- made by engines/sglang/table.py -->", "<!-- end of what it made -->"
WORDS = ("exact", "wrong", "crash", "no copy")
DISAGGREGATED = "disaggregated serving"
"""Ordinary servers don't have these pools."""
Row = tuple[str, ...]


def tables() -> Iterator[str]:
    """Yields the lines between the markers."""
    all_cases()  # publishes what building a pool needs
    from kvtide.plugin.sglang.cases.all_cases import FAMILIES, REFUSED

    trips = [(title, list(make_trips(family.CASES))) for title, family in FAMILIES]
    yield from summary([trip for _, family in trips for trip in family])
    for title, family in trips:
        yield from ("", f"### {title}", "")
        yield from table(
            ("pool", "SGLang's own copy", "fails on", "with kvtide", "why"), map(cells, family)
        )
    yield from ("", "### Left to SGLang", "")
    refused = {found.name: found.reason for found in known_classes() if found.verdict == "refused"}
    rows = [("all", f"`{name}`", reason) for name, reason in refused.items()]
    yield from table(("pool", "class", "why"), [*rows, *refused_pools(REFUSED, refused)])
    left = ("an ordinary server", "a request of an ordinary server")
    for what, names in zip(left, reasons(), strict=True):
        yield from ("", f"### kvtide leaves {what} to SGLang if it has", "")
        yield from (f"- {name}" for name in names if name != DISAGGREGATED)


def summary(trips: Sequence[TriedCase]) -> Iterator[str]:
    """Yields how many trips had each result."""
    alone = Counter(trip.sglang_word for trip in trips)
    through = Counter(trip.by_kvtide.verdict for trip in trips if trip.by_kvtide is not None)
    yield f"SGLang {SGLANG.version}, {len(trips)} round trips of small pools on the CPU."
    yield f"With kvtide: {counts(through)}. SGLang's own copy: {counts(alone)}."
    yield ""
    failing = Counter((trip.only_on, trip.sglang_word) for trip in trips if trip.fails_on)
    rows = [
        (text, *(str(failing[kind, word]) for word in WORDS[1:])) for kind, text in WHERE.items()
    ]
    yield from table(("SGLang's own copy isn't exact", *WORDS[1:]), rows)


def counts(words: Counter[str]) -> str:
    """Describes counts, such as `3 exact, 1 wrong`; words that don't occur are left out."""
    assert set(words) <= set(WORDS), f"every case can be built here: {words}"
    return ", ".join(f"{words[word]} {word}" for word in WORDS if words[word])


def cells(trip: TriedCase) -> Row:
    """Returns a row of a family's table."""
    through = trip.by_kvtide.verdict if trip.by_kvtide is not None else trip.unbuilt
    return trip.name, trip.sglang_word, trip.fails_on, through, trip.reason


def refused_pools(refusals: Iterable[Refusal], never: Container[str]) -> Iterator[Row]:
    """Yields refusals of pools that a server can have, of classes that kvtide moves otherwise."""
    for refusal in refusals:
        built = refusal.build()
        name = type(built.pool).__name__
        made_up = any(type(part).__module__.startswith("kvtide") for part in reachable(built))
        built.undo()
        if name in never or made_up or built.allocator is None:
            continue
        outcome = round_trip(Case(refusal.name, refusal.build, alone=""), KvtideWay())
        said = outcome.detail.removeprefix(f"Refused: {name}: ")
        assert said != outcome.detail, f"{refusal.name}: {outcome}"
        yield refusal.name, f"`{name}`", said


def table(header: Row, rows: Iterable[Row]) -> Iterator[str]:
    """Yields a table in Markdown."""
    for row in (header, ("---",) * len(header), *rows):
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"


def rewritten(text: str, lines: Sequence[str]) -> str:
    """Returns the document with these lines between its markers."""
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    assert tail, f"the document lacks {BEGIN} or {END}"
    return "\n".join([head + BEGIN, *lines, END]) + tail


def differences(text: str, lines: Sequence[str]) -> list[str]:
    """Lists the changes that `rewritten` would make: lines that begin with - or +."""
    after = rewritten(text, lines).splitlines()
    return list(
        difflib.unified_diff(text.splitlines(), after, "docs", "this run", n=0, lineterm="")
    )


def main(arguments: Sequence[str]) -> int:
    """Rewrites or checks the document, and returns the exit code."""
    text, lines = DOCS.read_text("utf-8"), list(tables())
    if "--check" not in arguments:
        DOCS.write_text(rewritten(text, lines), "utf-8")
        return 0
    changes = differences(text, lines)
    sys.stdout.writelines(f"{line}\n" for line in changes)
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
