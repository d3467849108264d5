"""Makes the table of faults in docs/sglang.md from real servers: SGLang's storage and kvtide's.

    SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=engines/sglang/stand_ins:engines/sglang/tests \\
        .venv-sglang/bin/python engines/sglang/hicache_table.py

Both storages get the same faults, in files of the same pages, and are asked the same. It takes
minutes, and rewrites the lines between the markers there.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hicache_server import PAGES, cached, other_weights, outputs, prompts, run_hicache, step
from ordinary_case import make_model

from kvtide.plugin.sglang.package import SGLANG

DOCS = Path(__file__).parents[2] / "docs" / "sglang.md"
BEGIN, END = (
    "<!-- made by engines/sglang/hicache_table.py -->",
    "<!-- end of what hicache_table.py made -->",
)
FILE, KVTIDE = "SGLang's `file`", "kvtide"
STORAGES: Mapping[str, Mapping[str, Any]] = {
    FILE: {"hicache_storage_backend": "file", "disk_dir": None, "disk_memory": None},
    KVTIDE: {"deadline_s": 1.0},
}
FAULTS = {
    "nothing: the cache was flushed": "",
    "a bit flipped in the file of page 4": "flip",
    "the file of page 4 cut in half": "cut",
    "the file of page 4 lost": "lose",
    "the file of page 4 in place of page 3's": "swap",
}
DAMAGED = 3
ASKED = prompts(len(FAULTS))
LIMIT_S = 20.0
Answers = Sequence[Mapping[str, Any]]


class Servers:
    """Servers that share a storage's folder."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.kv = root / name.strip("SGLang's `") / "kv"
        self.kv.mkdir(parents=True)
        self.count = 0

    def run(self, model: str, steps: Sequence[Any], **server: Any) -> list[Any]:
        """Runs a server through steps; returns their results, fewer if the server ended before."""
        self.count += 1
        storage = {"file_storage_path": str(self.kv), **STORAGES[self.name]}
        if self.name == KVTIDE:
            del storage["file_storage_path"]
        folder = self.kv.parent / f"run{self.count}"
        run = run_hicache(folder, self.root / model, self.kv, steps, server=server, storage=storage)
        assert run.exit_code == 0, run.log[-8000:]
        return list(run.results)

    def fault(self, kind: str) -> Any:
        """Returns a step that makes the next server's disk fail."""
        return step("fault", flag=str(self.kv.parent / f"run{self.count + 1}" / "fault"), kind=kind)


def verdict(answers: Answers, expected: Answers) -> str:
    """Describes an answer beside the one that was computed."""
    if not answers:
        return f"no answer in {LIMIT_S:g} s"
    found = cached(answers)[0]
    pages = "all pages" if found == PAGES else f"{found} of {PAGES} pages" if found else "no page"
    is_right = outputs(answers) == outputs(expected)
    return f"{pages}, right" if is_right else f"{pages}, **wrong answer**"


def rows_of(servers: Servers, right: Mapping[str, Answers]) -> Iterator[tuple[str, str]]:
    """Yields for each fault what became of the answers."""
    damages = [
        step(
            "damage", folder=str(servers.kv), how=how, tokens=request["input_ids"], pages=[DAMAGED]
        )
        for how, request in zip(FAULTS.values(), ASKED, strict=True)
        if how
    ]
    asked = step("asked", requests=ASKED)
    update = step("update", model=str(servers.root / "other"))
    results = servers.run("model", [asked, *damages, asked, asked, update, asked])
    computed, damaged, again, updated = (
        results[0], results[1 + len(damages)], results[2 + len(damages)], results[-1],
    )  # fmt: skip
    for place, fault in enumerate(FAULTS):
        one = slice(place, place + 1)
        words = verdict(damaged[one], computed[one])
        if FAULTS[fault]:
            words += f"; then {verdict(again[one], computed[one])}"
        yield fault, words
    yield "the weights updated in place", verdict(updated, right["other"])
    one_asked = step("asked", requests=ASKED[:1])
    yield "the server restarted", verdict(servers.run("model", [one_asked])[0], computed[:1])
    yield (
        "restarted with other weights, the same served name",
        verdict(servers.run("other", [one_asked])[0], right["other"][:1]),
    )
    yield (
        "restarted with another `--hicache-mem-layout`",
        verdict(servers.run("model", [one_asked], **PAGE_FIRST)[0], computed[:1]),
    )
    hang = [servers.fault("hang"), step("asked", requests=ASKED[:1], limit_s=LIMIT_S)]
    yield "the disk hangs", verdict(servers.run("model", hang)[1], computed[:1])
    half = Servers(servers.root / "half", servers.name)
    half.root = servers.root
    half.run("model", [one_asked], dtype="float16")
    yield (
        "written as float16, read as bfloat16",
        verdict(half.run("model", [one_asked], dtype="bfloat16")[0], right["bfloat16"]),
    )


PAGE_FIRST = {"hicache_mem_layout": "page_first", "hicache_io_backend": "kernel"}


def computed_answers(root: Path) -> dict[str, Answers]:
    """Returns the answers without any page: of the other weights, and in bfloat16."""
    fresh = Servers(root / "fresh", KVTIDE)
    fresh.root = root
    asked = step("asked", requests=ASKED)
    other = fresh.run("other", [asked])[0]
    half = fresh.run("model", [step("asked", requests=ASKED[:1])], dtype="bfloat16")[0]
    assert not any(cached([*other, *half]))
    return {"other": other, "bfloat16": half}


def table(root: Path) -> Iterator[str]:
    """Yields the lines between the markers."""
    make_model(root / "model", "llama")
    other_weights(root / "model", root / "other")
    right = computed_answers(root)
    columns = {name: dict(rows_of(Servers(root, name), right)) for name in STORAGES}
    yield f"SGLang {SGLANG.version} on a CPU, a prompt of {PAGES} pages for each fault."
    yield ""
    yield f"| what happened | {' | '.join(columns)} |"
    yield f"|{'---|' * (1 + len(columns))}"
    for fault in columns[FILE]:
        yield f"| {fault} | {' | '.join(column[fault] for column in columns.values())} |"


def rewritten(text: str, lines: Sequence[str]) -> str:
    """Returns the document with these lines between its markers."""
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    assert tail, f"the document lacks {BEGIN} or {END}"
    return "\n".join([head + BEGIN, *lines, END]) + tail


def main() -> None:
    """Rewrites the document."""
    with tempfile.TemporaryDirectory() as root:
        lines = list(table(Path(root)))
    sys.stdout.writelines(f"{line}\n" for line in lines)
    DOCS.write_text(rewritten(DOCS.read_text("utf-8"), lines), "utf-8")


if __name__ == "__main__":
    main()
