"""How much code is there to read? Lines, functions, and the classes that a request's KV meets.

  python benchmarks/structure/figures.py [--json]

A function's length is counted from its `def` to its last line, with its docstring; functions within
functions count, too. Classes are counted by tracing (see classes.py).
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from classes import MetClasses, met_classes

PACKAGE = Path(__file__).parents[2] / "src" / "kvtide"
LONG_FUNCTION = 35
LONG_MODULE = 300


@dataclass(frozen=True)
class PartFigures:
    """Sizes of a part of the package; lengths in lines, `long` functions have more than 35."""

    part: str
    files: int
    lines: int
    functions: int
    median: float
    p90: int
    longest: int
    long: int


def part_figures(package: Path) -> list[PartFigures]:
    """Returns the figures of each part, which is a folder or a module, and then of all."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    parts: dict[str, list[str]] = {}
    for path, text in texts.items():
        parts.setdefault(path.relative_to(package).parts[0].removesuffix(".py"), []).append(text)
    figures = [_figures(part, texts) for part, texts in parts.items()]
    return [*figures, _figures("all", texts.values())]


def _figures(part: str, texts: Iterable[str]) -> PartFigures:
    texts = list(texts)
    lengths = sorted(length for text in texts for length in function_lengths(text))
    lines = sum(len(text.splitlines()) for text in texts)
    return PartFigures(
        part,
        files=len(texts),
        lines=lines,
        functions=len(lengths),
        median=statistics.median(lengths) if lengths else 0,
        p90=lengths[len(lengths) * 9 // 10] if lengths else 0,
        longest=max(lengths, default=0),
        long=sum(length > LONG_FUNCTION for length in lengths),
    )


def function_lengths(text: str) -> Iterator[int]:
    """Yields the length of each function in a module's text, in lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def long_modules(package: Path) -> dict[str, int]:
    """Returns the lines of each module with more than 300, the longest first."""
    counts = {
        path.relative_to(package).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in package.rglob("*.py")
    }
    ordered = sorted(counts.items(), key=lambda entry: -entry[1])
    return {name: count for name, count in ordered if count > LONG_MODULE}


def by_part(kinds: Iterable[type]) -> dict[str, list[str]]:
    """Returns names of classes, by the part of kvtide that defines them."""
    parts: dict[str, list[str]] = {}
    for kind in sorted(kinds, key=lambda kind: (kind.__module__, kind.__name__)):
        parts.setdefault(kind.__module__.split(".")[1], []).append(kind.__name__)
    return parts


def to_json(sizes: list[PartFigures], met: MetClasses) -> dict[str, object]:
    """Returns the object that `--json` prints."""
    return {
        "parts": [asdict(figures) for figures in sizes],
        "long_modules": long_modules(PACKAGE),
        "class_count": len(met.run),
        "classes": by_part(met.run),
        "passed": by_part(met.passed),
        "protocols": by_part(met.protocols),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    sizes, met = part_figures(PACKAGE), met_classes()
    if as_json:
        print(json.dumps(to_json(sizes, met)))
        return
    row = "{:<12} {:>6} {:>7} {:>10} {:>7} {:>4} {:>8} {:>8}"
    print(row.format("part", "files", "lines", "functions", "median", "p90", "longest", "over 35"))
    for figures in sizes:
        print(row.format(*(f"{value:,}" if value != figures.part else value
                           for value in asdict(figures).values())))  # fmt: skip
    print(f"\nmodules of more than {LONG_MODULE} lines:")
    print(", ".join(f"{name} {count}" for name, count in long_modules(PACKAGE).items()))
    print(f"\nclasses whose methods run from offload to restore on a CPU: {len(met.run)}")
    _print_classes(met.run)
    print(f"protocols that these have: {len(met.protocols)}")
    _print_classes(met.protocols)
    print(f"classes of arguments and results, without a method that runs: {len(met.passed)}")
    _print_classes(met.passed)


def _print_classes(kinds: Iterable[type]) -> None:
    for part, names in by_part(kinds).items():
        print(f"  {part}: {', '.join(names)}")


if __name__ == "__main__":
    main()
