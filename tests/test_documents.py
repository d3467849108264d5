"""The files, functions, commands, options and make targets that the documents name exist."""

from __future__ import annotations

import ast
import html
import json
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import typer.main

from kvtide.cli.display import Event
from kvtide.cli.help import EXIT_CODES
from kvtide.cli.main import app, main
from kvtide.cli.verify import KeptLine, compare_runs
from kvtide.tier.counts import TierCounts
from support.fake_serving import FakeServing
from support.results import read_report, read_rows

ROOT = Path(__file__).parent.parent
DOCS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
)
NAMES = [str(path.relative_to(ROOT)) for path in DOCS]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
LARGEST_PICTURE_BYTES = 200_000
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
RUN, PROMPTS = ROOT / "docs" / "run.md", ROOT / "docs" / "prompts.md"
MOST_LINES = 5


def missing_targets(text: str, folder: Path) -> list[str]:
    """Lists a document's links to files or headings that don't exist."""
    targets = [target for _, target in LINK.findall(text) if not re.match(r"https?:", target)]
    return [target for target in targets if not leads_somewhere(target, text, folder)]


def leads_somewhere(target: str, text: str, folder: Path) -> bool:
    """Returns whether the file that a link of `text` names exists and has the heading."""
    name, _, heading = target.partition("#")
    path = folder / name
    if not path.exists():
        return False
    return not heading or heading in anchors(path.read_text("utf-8") if name else text)


def anchors(text: str) -> set[str]:
    """Returns the anchors of a document's headings, by GitHub's rule."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands() -> dict[str, set[str]]:
    """Returns the options of each command of kvtide; a subcommand's name is like `bench copy`."""

    def gather(command: Any, name: str) -> dict[str, set[str]]:
        found = {name: {flag for p in command.params for flag in [*p.opts, *p.secondary_opts]}}
        for verb, inner in getattr(command, "commands", {}).items():
            found |= gather(inner, f"{name} {verb}".strip())
        return found

    return gather(typer.main.get_command(app), "")


def undefined_names(text: str, folder: Path) -> list[str]:
    """Lists links of the form [`Class.method`](file.py) whose file doesn't define that name."""
    found: list[str] = []
    for label, target in LINK.findall(text):
        name = re.fullmatch(r"`([\w.]+)`", label)
        if name is None or not target.endswith(".py") or target.endswith(name[1]):
            continue
        if name[1] not in defined_in(ast.parse((folder / target).read_text("utf-8")).body):
            found.append(f"{name[1]} in {target}")
    return found


def defined_in(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """Returns functions, classes, methods (as `Class.method`) and constants of a module."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            names |= defined_in(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.Assign):
            names |= {prefix + target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def unknown_in_commands(text: str) -> list[str]:
    """Lists commands, options and targets in a document's code that don't exist."""
    known, targets = commands(), set(re.findall(r"^([\w-]+):", makefile(), re.MULTILINE))
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    code = [block for language, block in blocks if not language]
    code += re.findall(r"`([^`\n]+)`", text)
    unknown: list[str] = []
    for line in "\n".join(code).splitlines():
        words = line.split()
        if words[:1] == ["make"]:
            unknown += [word for word in words[1:2] if word not in targets]
        if words[:1] == ["kvtide"] and words[1:]:
            verb = " ".join(words[1:3]) if " ".join(words[1:3]) in known else words[1]
            verb = "" if verb.startswith("--") else verb
            flags = {word for word in words if word.startswith("--")} - {"--help"}
            if verb not in known:
                unknown.append(line)
            unknown += sorted(flags - known.get(verb, flags))
    return unknown


def makefile() -> str:
    """Reads the Makefile."""
    return (ROOT / "Makefile").read_text("utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files_and_headings(name: str) -> None:
    """Links outside this repository aren't followed."""
    path = ROOT / name
    assert [] == missing_targets(path.read_text("utf-8"), path.parent)


@pytest.mark.parametrize("name", NAMES)
def test_linked_files_define_what_the_link_names(name: str) -> None:
    """The name may be a function, a class, a method or a constant."""
    path = ROOT / name
    assert [] == undefined_names(path.read_text("utf-8"), path.parent)


@pytest.mark.parametrize("name", NAMES)
def test_commands_options_and_targets_exist(name: str) -> None:
    """The check covers `kvtide` and `make`, in code blocks and in backticks."""
    assert [] == unknown_in_commands((ROOT / name).read_text("utf-8"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](nowhere.md)", ["nowhere.md"]),
        ("[a](#nowhere)\n# Here", ["#nowhere"]),
        ("[a](#here-it-is)\n# Here it is", []),
    ],
)
def test_broken_link_is_found(text: str, expected: list[str]) -> None:
    """A missing file and a missing heading are found."""
    assert expected == missing_targets(text, ROOT)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Tide.retract", []),
        ("Tide", []),
        ("retract", ["retract in src/kvtide/tide.py"]),
        ("Tide.fly", ["Tide.fly in src/kvtide/tide.py"]),
    ],
)
def test_name_that_a_file_does_not_define_is_found(name: str, expected: list[str]) -> None:
    """A method must be named with its class."""
    assert expected == undefined_names(f"[`{name}`](src/kvtide/tide.py)", ROOT)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`kvtide fly`", ["kvtide fly"]),
        ("`kvtide run P --wings`", ["--wings"]),
        ("```\nkvtide bench copy --wings\n```", ["--wings"]),
        ("`make wings`", ["wings"]),
        ("`make test` `kvtide bench copy --json`", []),
    ],
)
def test_unknown_command_is_found(text: str, expected: list[str]) -> None:
    """An unknown command, option and target are found."""
    assert expected == unknown_in_commands(text)


def first_column(text: str, heading: str) -> list[str]:
    """The names in backticks that stand first in the rows of the first table below a heading."""
    rows = text.partition(f"{heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]


@pytest.fixture
def written(tmp_path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report and the answers of a run: the first prompt has one answer, the second two."""
    prompts, out, report = (tmp_path / name for name in ("prompts.jsonl", "out", "report"))
    lines = [{"id": "a", "prompt": "Hi", "logprobs": 1}, {"id": "b", "prompt": "Hi", "n": 2}]
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    files = ["--out", str(out), "--report", str(report)]
    assert 0 == main(["run", str(prompts), *files], serving=FakeServing())
    return read_report(report), read_rows(out)


def test_fields_of_the_report_are_documented(
    written: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    """docs/run.md has those that there are, in their order."""
    report, _ = written
    assert [*report] == first_column(RUN.read_text("utf-8"), "| Field")


def test_fields_of_a_tier_in_the_report_are_documented() -> None:
    """docs/run.md has those that there are, and each reason."""
    text = RUN.read_text("utf-8")
    assert [about.name for about in fields(TierCounts)] == first_column(text, "| Tier")
    table = text.partition("| Tier |")[2].partition("\n\n")[0]
    for reasons in (TierCounts().misses, TierCounts().refused_writes):
        assert [] == [reason for reason in reasons if f"(`{reason}`)" not in table]


def test_fields_of_the_answers_are_documented(
    written: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    """docs/prompts.md has those of a line with one answer, and of a line with several."""
    _, rows = written
    fields = {name for row in rows for name in row}
    text = PROMPTS.read_text("utf-8").partition("## The lines of")[2]
    assert sorted(fields) == sorted(first_column(text, "| Key"))


def test_exit_codes_are_documented() -> None:
    """docs/run.md says the same as the help."""
    text = RUN.read_text("utf-8").partition("| Code | Meaning |\n| --- | --- |\n")[2]
    rows = [row.strip("| ").split(" | ") for row in text.partition("\n\n")[0].splitlines()]
    assert EXIT_CODES == dict(rows)


def test_events_are_documented() -> None:
    """docs/run.md has each that there is."""
    assert [*get_args(Event)] == first_column(RUN.read_text("utf-8"), "| `event`")


def last_screen(picture: str) -> str:
    """Returns the text of a recording's last screen without spaces, as lines may break anywhere."""
    frames = re.findall(r'<g class="frame"[^>]*>(.*?)</g>', picture)
    lines = dict(re.findall(r'<g id="(l\d+)">(.*?)</g>', picture, re.DOTALL))
    drawn = [lines[name] for name in re.findall(r'href="#(\w+)"', frames[-1])]
    texts = ["".join(re.findall(r"<text[^>]*>(.*?)</text>", line)) for line in drawn]
    return "".join(html.unescape("".join(texts)).split())


def test_picture_ends_as_a_run_ends_today() -> None:
    """If this fails, docs/pictures/record.py says how to record the picture again."""
    screen = last_screen((ROOT / "docs" / "pictures" / "demo.svg").read_text("utf-8"))
    steps = int(re.findall(r"logitsof([\d,]+)steps", screen)[0].replace(",", ""))
    answered = int(re.findall(r"verified:true\((\d+)requests", screen)[0])
    counts = [1] * (answered - 1) + [steps - answered + 1]
    earlier = int(re.findall(r"(\d+)answersofearlierruns", screen)[0])
    kept = [KeptLine("", {}, {})] * earlier
    requests: list[Any] = [
        SimpleNamespace(
            id="",
            error=None,
            retractions=0,
            finish_reason="stop",
            output_ids=[0] * count,
            logit_digests=[0] * count,
        )
        for count in counts
    ]
    assert f"verified: {compare_runs(requests, requests, kept)}".replace(" ", "") in screen


def test_pictures_are_small() -> None:
    """Small pictures keep a clone fast."""
    folder = ROOT / "docs" / "pictures"
    pictures = [path for path in folder.iterdir() if path.suffix != ".py"]
    assert {".svg", ".webp"} == {path.suffix for path in pictures}
    assert [] == [path.name for path in pictures if path.stat().st_size > LARGEST_PICTURE_BYTES]


def paths_in_tree(text: str) -> list[str]:
    """Lists the files and folders that a document's first block draws as a tree, by indentation.

    A line may name several; two or more spaces come before the description.
    """
    block = text.split("```")[1].strip("\n")
    folders: list[str] = []
    paths: list[str] = []
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split(r" {2,}", line.strip())[0].split()
        paths += ["".join([*folders[:depth], name]) for name in names]
        folders[depth:] = names[:1]
    return paths


def test_tree_names_existing_files() -> None:
    """A file that was moved must be moved in the tree, too."""
    paths = paths_in_tree(ARCHITECTURE.read_text("utf-8"))
    assert [] == [path for path in paths if not (ROOT / path).exists()]


def test_tree_has_all_parts_of_the_package() -> None:
    """The tree has each module and each folder beside `kvtide/__init__.py`."""
    package = ROOT / "src" / "kvtide"
    parts = [*package.glob("*.py"), *(path.parent for path in package.glob("*/__init__.py"))]
    named = {path.rstrip("/") for path in paths_in_tree(ARCHITECTURE.read_text("utf-8"))}
    assert [] == sorted({str(path.relative_to(ROOT)) for path in parts} - named)


def test_each_decision_is_short() -> None:
    """A decision is a heading that states it, and at most five lines of reasons."""
    decisions = re.split(r"^### ", ARCHITECTURE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    lines = {
        text.splitlines()[0]: [line for line in text.partition("\n## ")[0].splitlines()[1:] if line]
        for text in decisions
    }
    assert len(lines) > 20
    assert [] == [heading for heading, why in lines.items() if len(why) > MOST_LINES]


def test_tree_is_read_by_its_indentation() -> None:
    """Lines below a folder that are indented more are in the folder."""
    text = "```\na/\n  b/      what b is\n    c.py d.py  two\n  e.py\n```"
    assert ["a/", "a/b/", "a/b/c.py", "a/b/d.py", "a/e.py"] == paths_in_tree(text)


def test_no_fault_under_vllm_ends_in_a_wrong_answer_with_kvtide() -> None:
    """The table is made from real engines; in its last column no row may be bold."""
    text = (ROOT / "docs" / "vllm.md").read_text("utf-8")
    table = text.partition("faults_table.py -->")[2].partition("<!--")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    (_, alone, ours), *faults = rows
    assert ("vLLM alone", "with kvtide", 11) == (alone, ours, len(faults))
    assert any("**" in found for _, found, _ in faults)
    assert [] == [row for row in faults if "**" in row[2] or "right" not in row[2]]
