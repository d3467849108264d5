"""Real servers with kvtide's storage: pages outlive a server; no fault changes an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from engine_case import EngineRun
from hicache_server import PAGES, cached, other_weights, outputs, prompts, run_hicache, step
from ordinary_case import make_model

ASKED = prompts(4)
LATER = prompts(3, new_tokens=60, seed=6)
NEW = prompts(2, seed=7)


@dataclass(frozen=True)
class Run:
    """A server that has ended, and the results of its named steps."""

    run: EngineRun
    results: Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """The folders of servers that share a storage, and their models."""

    root: Path
    model: Path
    other: Path

    @property
    def kv(self) -> Path:
        """The storage's folder."""
        return self.root / "kv"

    def run(self, name: str, steps: Mapping[str, Any], **more: Any) -> Run:
        """Runs a server through named steps."""
        model = more.pop("model", self.model)
        run = run_hicache(self.root / name, model, self.kv, list(steps.values()), **more)
        return Run(run, dict(zip(steps, run.results, strict=bool(run.results))))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Two models of the same sizes."""
    root = tmp_path_factory.mktemp("hicache")
    make_model(root / "model", "llama")
    return Place(root, root / "model", other_weights(root / "model", root / "other"))


def damage(place: Place, number: int, how: str, *pages: int) -> Any:
    """Returns a step that damages pages of a prompt."""
    tokens = ASKED[number]["input_ids"]
    return step("damage", folder=str(place.kv), how=how, tokens=tokens, pages=pages)


@pytest.fixture(scope="module")
def killed(place: Place) -> Run:
    """A server that is killed while it writes its first pages."""
    die = step("die", folder=str(place.kv), count=3, requests=LATER)
    run = place.run("killed", {"die": die})
    assert run.run.exit_code == -SIGKILL, run.run.log[-8000:]
    return run


@pytest.fixture(scope="module")
def first(place: Place, killed: Run) -> Run:
    """The next server, whose pages are damaged and whose disk hangs."""
    kv, flag = str(place.kv), str(place.root / "first" / "fault")
    run = place.run(
        "first",
        {
            "after the kill": step("asked", requests=LATER),
            "computed": step("asked", requests=ASKED),
            "kept": step("kept", folder=kv, count=len(LATER + ASKED) * PAGES),
            "flipped": damage(place, 1, "flip", 3),
            "cut": damage(place, 2, "cut", 2),
            "lost": damage(place, 3, "lose", 4),
            "damaged": step("asked", requests=ASKED),
            "kept again": step("kept", folder=kv, count=len(LATER + ASKED) * PAGES),
            "repaired": step("asked", requests=ASKED),
            "hang": step("fault", flag=flag, kind="hang"),
            "hanging": step("asked", requests=ASKED),
            "go on": step("fault", flag=flag, kind=""),
            "rest": ("rest", 1.0),
            "answering": step("asked", requests=ASKED),
        },
        storage={"deadline_s": 4},
    )
    assert run.run.exit_code == 0, run.run.log[-8000:]
    return run


@pytest.fixture(scope="module")
def second(place: Place, first: Run) -> Run:
    """A server after that, whose weights change in place, and whose disk is full at last."""
    kv, flag = str(place.kv), str(place.root / "second" / "fault")
    run = place.run(
        "second",
        {
            "restarted": step("asked", requests=ASKED),
            "before": step("counted", folder=kv),
            "update": step("update", model=str(place.other)),
            "updated": step("asked", requests=ASKED),
            "rest": ("rest", 1.0),
            "updated again": step("asked", requests=ASKED),
            "after": step("counted", folder=kv),
            "full": step("fault", flag=flag, kind="full"),
            "new": step("asked", requests=NEW),
            "new again": step("asked", requests=NEW),
        },
    )
    assert run.run.exit_code == 0, run.run.log[-8000:]
    return run


@pytest.fixture(scope="module")
def with_other_weights(place: Place, second: Run) -> Run:
    """A server of the same name, which has the other weights from the start."""
    run = place.run(
        "other weights", {"computed": step("asked", requests=[*ASKED, *NEW])}, model=place.other
    )
    assert run.run.exit_code == 0, run.run.log[-8000:]
    return run


OTHERWISE: dict[str, dict[str, Any]] = {
    "layout": {"hicache_mem_layout": "page_first_direct"},
    "dtype": {"dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def otherwise(place: Place, second: Run) -> Mapping[str, Run]:
    """Servers that hold the same KV in another way."""
    steps = {"computed": step("asked", requests=[*ASKED, *LATER])}
    return {name: place.run(name, steps, server=server) for name, server in OTHERWISE.items()}


def test_a_killed_server_leaves_whole_pages(
    killed: Run, first: Run, otherwise: Mapping[str, Run]
) -> None:
    """The next server answers as one that computes everything, and gains from the pages."""
    answers = first.results["after the kill"]
    expected = otherwise["layout"].results["computed"][len(ASKED) :]
    assert outputs(expected) == outputs(answers)
    assert first.run.log_lines("storage keeps pages of kv: "), "the server says what it has"


@pytest.mark.parametrize(
    ("named", "pages"),
    [
        ("computed", [0, 0, 0, 0]),
        ("damaged", [7, 3, 2, 4]),
        ("repaired", [7, 7, 7, 7]),
        ("hanging", [0, 0, 0, 0]),
        ("answering", [7, 7, 7, 7]),
    ],
)
def test_a_fault_never_changes_an_answer(first: Run, named: str, pages: list[int]) -> None:
    """A bad page ends the prefix, and is written anew. A disk that hangs is a miss."""
    assert outputs(first.results["computed"]) == outputs(first.results[named])
    assert pages == cached(first.results[named])


def test_pages_outlive_their_server(first: Run, second: Run) -> None:
    """After a restart nothing is computed that a page has."""
    answers = second.results["restarted"]
    assert outputs(first.results["computed"]) == outputs(answers)
    assert [PAGES] * len(ASKED) == cached(answers)


def test_weights_that_change_in_place_get_pages_of_their_own(
    second: Run, with_other_weights: Run
) -> None:
    """The served name is the same before and after."""
    assert second.results["update"]["success"]
    expected = outputs(with_other_weights.results["computed"][: len(ASKED)])
    assert expected != outputs(second.results["restarted"])
    for named, pages in (("updated", 0), ("updated again", PAGES)):
        assert expected == outputs(second.results[named]), named
        assert [pages] * len(ASKED) == cached(second.results[named]), named
    assert len(ASKED) * PAGES <= second.results["after"] - second.results["before"]


def test_a_full_disk_costs_pages_alone(second: Run, with_other_weights: Run) -> None:
    """Answers are right, and nothing is kept."""
    expected = outputs(with_other_weights.results["computed"][len(ASKED) :])
    for named in ("new", "new again"):
        assert expected == outputs(second.results[named]), named
        assert [0] * len(NEW) == cached(second.results[named]), named
    assert len(second.run.log_lines("disk tier: the disk", "is full")) == 1, "it is said once"


def test_other_weights_of_the_same_name_find_nothing(with_other_weights: Run) -> None:
    """The files tell the weights apart, which have the same sizes."""
    answers = with_other_weights.results["computed"]
    assert [0] * len(answers) == cached(answers)


@pytest.mark.parametrize("name", OTHERWISE)
def test_pages_held_in_another_way_are_not_found(
    first: Run, otherwise: Mapping[str, Run], name: str
) -> None:
    """Their bytes lie in another order, or are of another type."""
    assert otherwise[name].run.exit_code == 0, otherwise[name].run.log[-8000:]
    answers = otherwise[name].results["computed"]
    assert [0] * len(answers) == cached(answers)
    if name != "dtype":
        assert outputs(first.results["computed"]) == outputs(answers[: len(ASKED)])
