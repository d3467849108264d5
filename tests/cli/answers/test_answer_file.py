from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.answers import open_answers
from kvtide.cli.answers.base import Answers, Kept
from kvtide.errors import KvtideError, UsageError
from support.results import read_rows

KEYS = {"a": "ka", "b": "kb", "c": "kc"}
HEADER = {"model": "m", "settings": {"seed": 0}}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where `--out` is."""
    return tmp_path / "out.jsonl"


def _part(out: Path) -> Path:
    return out.with_name(out.name + ".part")


def _open(out: Path, *, resume: bool = False, overwrite: bool = False) -> Answers:
    return open_answers(out, resume=resume, overwrite=overwrite)


def _write(answers: Answers, *ids: str, failed: str = "") -> None:
    for answer_id in ids:
        row = {"id": answer_id, "error": "bad" if answer_id == failed else None}
        answers.write(answer_id, row, None if answer_id == failed else KEYS[answer_id])


def _run(out: Path, *ids: str, finish: bool = True, failed: str = "", **how: bool) -> Kept:
    """A run that answers these prompts and then ends, complete or not."""
    with closing(_open(out, **how)) as answers:
        kept = answers.keep(KEYS, HEADER)
        answers.begin()
        _write(answers, *ids, failed=failed)
        if finish:
            answers.finish(sorted({*ids, *kept.lines}))
    return kept


def _ids(path: Path) -> list[str]:
    return [json.loads(line).get("id") for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_answer_is_in_the_part_at_once(out: Path) -> None:
    """Whole lines as the file will have them, after a header; the file comes at the end."""
    with closing(_open(out)) as answers:
        assert {} == answers.keep(KEYS, HEADER).lines
        answers.begin()
        _write(answers, "b", "a")
        header, first, second = _part(out).read_text(encoding="utf-8").splitlines()
        assert {"kvtide": 1, **HEADER} == json.loads(header)
        assert ['{"id": "b", "error": null, "key": "kb"}', "a"] == [first, json.loads(second)["id"]]
        assert not out.exists()
        assert f"kept in {_part(out)}; the same command with --resume answers the rest" == (
            answers.place()
        )
        answers.finish(["a", "b"])
        assert f"kept in {out}" == answers.place()
    assert ["a", "b"] == _ids(out)
    assert [out] == list(out.parent.iterdir())


def test_a_run_that_ends_early_leaves_the_file_and_the_part(out: Path) -> None:
    """A fuller file isn't replaced by an emptier one."""
    _run(out, "a", "b", "c")
    _run(out, "a", finish=False, overwrite=True)
    assert ["a", "b", "c"] == _ids(out)
    assert [None, "a"] == _ids(_part(out))


def test_a_part_without_answers_is_not_left_lying_about(out: Path) -> None:
    """There is nothing to go on from."""
    _run(out, finish=False)
    _run(out, "a", failed="a", finish=False)
    assert [] == list(out.parent.iterdir())


@pytest.mark.parametrize("where", ["file", "part", "both"])
def test_answers_are_not_replaced_unasked(out: Path, where: str) -> None:
    """The refusal counts them and has both remedies."""
    if where != "part":
        _run(out, "a", "b")
    if where != "file":
        _run(out, "c", finish=False, resume=where == "both")
    before = {path: path.read_bytes() for path in out.parent.iterdir()}
    with pytest.raises(UsageError) as refusal:
        _open(out)
    counts = {"file": f"{out} holds 2 answers", "part": f"{_part(out)} holds 1 answer"}
    counts["both"] = f"{counts['file']} and {counts['part']}"
    assert (
        f"--out: {counts[where]}; add --resume to keep them and to answer the rest, or --overwrite "
        "to answer everything anew"
    ) == str(refusal.value)
    assert before == {path: path.read_bytes() for path in out.parent.iterdir() if path in before}


def test_failed_prompts_alone_are_nothing_to_lose(out: Path) -> None:
    """The same command runs again once the reason is mended."""
    _run(out, "a", "b", failed="a")
    out.write_bytes(out.read_bytes().splitlines(keepends=True)[0])
    _run(out, "a")
    assert ["a"] == _ids(out)


@pytest.mark.parametrize("how", [{}, {"resume": True}])
def test_a_file_of_something_else_is_not_replaced_unasked(out: Path, how: dict[str, bool]) -> None:
    """A misspelt name doesn't cost a person a file."""
    _run(out, "a")
    with out.open("a", encoding="utf-8") as file:
        file.write("Dear diary\n")
    with pytest.raises(UsageError) as refusal:
        _open(out, **how)
    assert (
        f"--out: line 2 of {out} isn't an answer of kvtide's; remove that line, name another file, "
        "or add --overwrite to replace the file"
    ) == str(refusal.value)
    assert out.read_text(encoding="utf-8").endswith("Dear diary\n")
    _run(out, "b", overwrite=True)
    assert ["b"] == _ids(out)


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}])
def test_a_part_of_something_else_is_never_replaced(out: Path, how: dict[str, bool]) -> None:
    """Other programs call their files so, too."""
    _part(out).write_text("half a download", encoding="utf-8")
    with pytest.raises(UsageError, match="isn't kvtide's; move it away, or name another file"):
        _open(out, **how)
    assert "half a download" == _part(out).read_text(encoding="utf-8")


@pytest.mark.parametrize("version", ["2", "null", '"1"', "true"])
def test_a_part_of_another_version_is_not_added_to(out: Path, version: str) -> None:
    """Its lines and keys may mean something else. To overwrite it is no loss that isn't wanted."""
    _run(out, "a", finish=False)
    part = _part(out).read_text(encoding="utf-8").replace(": 1,", f": {version},", 1)
    _part(out).write_text(part, encoding="utf-8")
    for how in ({}, {"resume": True}):
        with pytest.raises(UsageError, match=f"of version {version}, and this kvtide knows 1;"):
            _open(out, **how)
        assert part == _part(out).read_text(encoding="utf-8")
    _run(out, "b", overwrite=True)
    assert ["b"] == _ids(out)


def test_a_refusal_leaves_nothing_lying_about(out: Path) -> None:
    """No empty part stays of a run that hasn't begun."""
    _run(out, "a")
    with pytest.raises(UsageError, match="holds 1 answer"):
        _open(out)
    assert [out] == list(out.parent.iterdir())


def test_resume_and_overwrite_are_one_too_many(out: Path) -> None:
    """They say the opposite."""
    with pytest.raises(UsageError, match="give one of the two"):
        _open(out, resume=True, overwrite=True)


def test_resume_goes_on_from_the_part(out: Path) -> None:
    """Answers with the right key are kept, and the file has them all, once, in order."""
    _run(out, "c", "a", finish=False)
    kept = _run(out, "b", resume=True)
    assert "ac" == "".join(sorted(kept.lines))
    assert ["a", "b", "c"] == _ids(out)
    assert [out] == list(out.parent.iterdir())


def test_resume_goes_on_from_file_and_part(out: Path) -> None:
    """The file is a complete one to which prompts were added."""
    _run(out, "b")
    _run(out, "a", finish=False, resume=True)
    assert {"a", "b"} == {*_run(out, "c", resume=True).lines}
    assert ["a", "b", "c"] == _ids(out)


def test_where_the_answers_are_names_both_files(out: Path) -> None:
    """A person who moves the answers must know of both."""
    _run(out, "b")
    with closing(_open(out, resume=True)) as answers:
        answers.keep(KEYS, HEADER)
        answers.begin()
        _write(answers, "a")
        assert answers.place().startswith(f"kept in {out} and {_part(out)}; ")


def test_resume_cuts_half_a_line_off(out: Path) -> None:
    """SIGKILL or a failed disk left it; the next answer doesn't continue it."""
    _run(out, "a", finish=False)
    with _part(out).open("ab") as file:
        file.write(b'{"id": "b", "key": "kb", "te')
    kept = _run(out, "b", finish=False, resume=True)
    assert (["a"], 1) == ([*kept.lines], kept.broken)
    assert {"a", "b"} == {*_run(out, "c", resume=True).lines}


def test_resume_after_half_a_header_begins_anew(out: Path) -> None:
    """The process was killed before it had anything to keep."""
    _part(out).write_bytes(b'{"kvt')
    assert {} == _run(out, "a", resume=True).lines
    assert ["a"] == _ids(out)


def test_failed_prompts_are_answered_again(out: Path) -> None:
    """Only answers are kept."""
    _run(out, "a", "b", failed="b")
    assert ["a"] == [*_run(out, "b", resume=True).lines]
    assert [None, None] == [row["error"] for row in read_rows(out)]


def test_answers_to_other_prompts_are_counted(out: Path) -> None:
    """A changed prompt is answered again; the answer to a removed prompt stays in the file."""
    _run(out, "a", "b", "c")
    with closing(_open(out, resume=True)) as answers:
        kept = answers.keep({"a": "ka", "b": "changed"}, HEADER)
        answers.begin()
        answers.write("b", {"id": "b", "new": True}, "changed")
        answers.finish(["a", "b"])
    assert (["a"], 1, 1) == ([*kept.lines], kept.changed, kept.others)
    assert ["a", "b", "c"] == _ids(out)
    assert '"new": true' in out.read_text(encoding="utf-8").splitlines()[1]


@pytest.mark.parametrize("finish", [True, False])
def test_answers_of_which_none_fits_are_left_alone(out: Path, finish: bool) -> None:
    """The refusal says what differs, as far as the part's header tells it."""
    _run(out, "a", finish=finish)
    before = {path: path.read_bytes() for path in out.parent.iterdir()}
    with closing(_open(out, resume=True)) as answers, pytest.raises(UsageError) as refusal:
        answers.keep({"a": "other"}, {"model": "m", "settings": {"seed": 5}})
    reason = "they are of other prompts, of another model or by other settings"
    if not finish:
        reason = "seed is 5 here and 0 there"
    assert f"none of the 1 answer of {out} fits ({reason}); name another" in str(refusal.value)
    assert before == {path: path.read_bytes() for path in out.parent.iterdir() if path in before}


def test_the_part_of_a_private_file_is_private(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else may read the answers, at any moment."""
    _run(out, "a")
    out.chmod(0o600)
    with closing(_open(out, resume=True)) as answers:
        assert 0o600 == stat.S_IMODE(_part(out).stat().st_mode)
        answers.keep(KEYS, HEADER)
        answers.begin()
        _write(answers, "b")
        sync, modes = os.fsync, []

        def note_mode(descriptor: int) -> None:
            modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
            sync(descriptor)

        monkeypatch.setattr("os.fsync", note_mode)
        answers.finish(["a", "b"])
    assert 0o600 == modes[0]
    assert 0o600 == stat.S_IMODE(out.stat().st_mode)


def test_a_link_stays_a_link(out: Path, tmp_path: Path) -> None:
    """The part is beside the file itself, on its disk."""
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "real.jsonl"
    out.symlink_to(target)
    _run(out, "a", finish=False)
    assert [None, "a"] == _ids(_part(target))
    _run(out, "b", resume=True)
    assert ["a", "b"] == _ids(target)
    assert out.is_symlink()


def test_the_part_goes_after_the_file_is_safe(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that loses power at any moment has the one or the other on its disk."""
    done: list[str] = []

    def note(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            done.append(name)
            return call(*arguments, **options)

        return noted

    with closing(_open(out)) as answers:
        answers.keep(KEYS, HEADER)
        answers.begin()
        _write(answers, "a")
        monkeypatch.setattr("os.fsync", note("sync", os.fsync))
        monkeypatch.setattr(Path, "replace", note("rename", Path.replace))
        monkeypatch.setattr(Path, "unlink", note("remove", Path.unlink))
        answers.finish(["a"])
        monkeypatch.undo()
    # The last but one looks for the draft, which has its name by then.
    assert ["sync", "rename", "sync", "remove", "remove"] == done


def test_a_disk_that_is_full_at_the_end_leaves_the_part(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old file is there too; the message says how to go on."""
    _run(out, "a", "b")

    def fail(_file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with closing(_open(out, overwrite=True)) as answers:
        answers.keep(KEYS, HEADER)
        answers.begin()
        _write(answers, "c")
        monkeypatch.setattr("os.fsync", fail)
        with pytest.raises(KvtideError) as error:
            answers.finish(["c"])
        monkeypatch.undo()
    assert (
        f"cannot write {out}: No space left on device; once that is mended, the same command with "
        "--resume goes on with what is kept"
    ) == str(error.value)
    assert (["a", "b"], [None, "c"]) == (_ids(out), _ids(_part(out)))


def test_a_part_is_not_taken_from_the_next_run(out: Path) -> None:
    """A run that has put its file in place has no part, whoever begins one there by then."""
    first = _open(out)
    first.keep(KEYS, HEADER)
    first.begin()
    _write(first, "a", failed="a")
    first.finish(["a"])
    with closing(_open(out)) as second:
        second.keep(KEYS, HEADER)
        second.begin()
        first.close()
        _write(second, "b")
        assert [None, "b"] == _ids(_part(out))
