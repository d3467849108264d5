"""Whatever ends `kvtide run`, what was answered is kept, and `--resume` goes on from there."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtide.cli.answers.file import AnswerFile
from kvtide.cli.answers.part import PartFile
from kvtide.cli.interrupt import SIGNALS
from kvtide.cli.main import main
from kvtide.errors import KvtideError
from support.fake_serving import FakeEngine, FakeServing
from support.results import read_part, read_report, read_rows

IDS = ["a", "b", "c", "d", "e"]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Five prompts of two tokens each, of which the fake engine answers two at a time."""
    return _write(tmp_path, IDS)


def _write(folder: Path, ids: list[str], prompt: str = "x") -> str:
    path = folder / "prompts.jsonl"
    rows = [{"id": name, "prompt": prompt, "max_new_tokens": 2} for name in ids]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _at_step(step: int, act: Callable[[], None]) -> FakeServing:
    """A library in which something happens as a step begins, counted from 1."""

    def prepare(engine: FakeEngine, _number: int) -> None:
        calls = iter(range(1, 1000))
        engine.before_step = lambda: act() if next(calls) == step else None

    return FakeServing(prepare)


def _kill(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _ids(path: Path) -> list[str]:
    return [row["id"] for row in read_rows(path)]


def test_answers_reach_the_disk_while_the_next_ones_take_long(
    prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step the part is looked at, also if nothing ended in it."""
    happened: list[str] = []
    monkeypatch.setattr(AnswerFile, "sync_if_due", lambda _: happened.append("look"))

    def note_steps(engine: FakeEngine, _number: int) -> None:
        engine.before_step = lambda: happened.append("step")

    out = ["--out", str(tmp_path / "out")]
    assert main(["run", prompts, *out], serving=FakeServing(note_steps)) == 0
    assert ["step", "look"] * (len(happened) // 2) == happened != []


@pytest.mark.parametrize("failure", [KvtideError("the disk is gone"), None])
def test_kv_that_cannot_be_left_on_the_disk_costs_no_answer(
    prompts: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    failure: KvtideError | None,
) -> None:
    """If that fails, or if a second Ctrl-C doesn't wait for it: the end is said, and reported."""

    def suspend() -> int:
        if failure is not None:
            raise failure
        _kill(signal.SIGINT)()
        raise AssertionError("the second Ctrl-C is for this")

    def prepare(engine: FakeEngine, _number: int) -> None:
        calls = iter(range(1, 1000))
        engine.before_step = lambda: _kill(signal.SIGINT)() if next(calls) == 3 else None
        engine.suspend = suspend  # type: ignore[method-assign]

    out, report = tmp_path / "out", tmp_path / "report"
    options = ["--out", str(out), "--report", str(report)]
    code = 130 if failure is None else 1
    assert code == main(["run", prompts, *options], serving=FakeServing(prepare))
    assert ["a", "b"] == read_part(out)
    assert 2 == read_report(report)["answered"]
    assert "answered: 2 of 5 prompts, kept in " in capsys.readouterr().err


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_run_in_good_order(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """The step is finished, the report written, and the exit code the signal's."""
    out, report = tmp_path / "out.jsonl", tmp_path / "report.json"
    serving = _at_step(3, _kill(number))
    files = ["--out", str(out), "--report", str(report)]
    assert main(["run", prompts, *files], serving=serving) == 128 + number
    assert ["a", "b"] == read_part(out)
    assert not out.exists()
    assert serving.engines[0].is_closed
    found = read_report(report)
    assert (5, 0, 2, number.name) == tuple(
        found[key] for key in ("requests", "kept", "answered", "ended_by")
    )
    said = capsys.readouterr().err.splitlines()[-2:]
    assert said[0].startswith(
        f"answered: 2 of 5 prompts, kept in {out}.part; the same command with"
    )
    last = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert f"kvtide: {last}" == said[1]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_the_model_loads_ends_at_once(
    prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """There is nothing to keep yet, and what was there is left alone."""
    out = tmp_path / "out.jsonl"
    assert main(["run", prompts, "--out", str(out)], serving=FakeServing()) == 0
    before = out.read_bytes()
    serving = FakeServing()
    monkeypatch.setattr(serving, "open_model", lambda *args, **options: _kill(number)())
    options = ["--out", str(out), "--overwrite"]
    assert main(["run", prompts, *options], serving=serving) == 128 + number
    assert before == out.read_bytes()
    assert not out.with_name("out.jsonl.part").exists()


def test_resume_answers_the_rest(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine gets only what has no answer; the file is that of an undisturbed run."""
    out, other, report = tmp_path / "out", tmp_path / "other", tmp_path / "report"
    assert main(["run", prompts, "--out", str(other)], serving=FakeServing()) == 0
    command = ["run", prompts, "--out", str(out), "--report", str(report), "--resume"]
    main(command, serving=_at_step(3, _kill(signal.SIGTERM)))
    capsys.readouterr()
    serving = FakeServing()
    assert main(command, serving=serving) == 0
    assert ["c", "d", "e"] == [request.id for request in serving.engines[0].requests]
    assert other.read_bytes() == out.read_bytes()
    captured = capsys.readouterr()
    assert "answered already: 2 of 5 prompts\n" in captured.err
    assert "requests: 5, 0 of them failed, 2 kept from earlier runs\n" in captured.err
    found = read_report(report)
    assert (5, 2, 5, None) == tuple(
        found[key] for key in ("requests", "kept", "answered", "ended_by")
    )


def test_resume_of_a_complete_run_needs_no_engine(prompts: str, tmp_path: Path) -> None:
    """The file stays as it is."""
    out = tmp_path / "out"
    assert main(["run", prompts, "--out", str(out)], serving=FakeServing()) == 0
    before, serving = out.read_bytes(), FakeServing()
    assert main(["run", prompts, "--out", str(out), "--resume"], serving=serving) == 0
    assert [] == serving.engines
    assert before == out.read_bytes()


def test_kept_answers_are_verified_by_their_lines(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line is compared with that of a run without retractions; no logits are left of it."""
    out, report = tmp_path / "out", tmp_path / "report"
    command = ["run", prompts, "--out", str(out), "--resume", "--verify", "--report", str(report)]
    main(command, serving=_at_step(3, _kill(signal.SIGTERM)))
    assert main(command, serving=FakeServing()) == 0
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("verified: true (3 requests: all tokens, and the logits of 6 steps ")
    assert "; 2 answers of earlier runs: the lines are the same" in said
    assert read_report(report)["verified"] is True
    lines = out.read_text(encoding="utf-8").replace("0 1 ", "0 9 ", 1)
    out.write_text(lines, encoding="utf-8")
    assert main(command, serving=FakeServing()) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("verified: false (request 'a', an answer of an earlier run: its 'text' ")


def test_changed_prompts_are_answered_again(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing else is. What belongs to a removed prompt stays in the file, and is said."""
    out = tmp_path / "out"
    assert main(["run", prompts, "--out", str(out)], serving=FakeServing()) == 0
    lines = Path(prompts).read_text(encoding="utf-8").splitlines()
    lines[1] = lines[1].replace('"x"', '"changed"')
    Path(prompts).write_text("\n".join(lines[:4]), encoding="utf-8")
    serving = FakeServing()
    assert main(["run", prompts, "--out", str(out), "--resume"], serving=serving) == 0
    assert ["b"] == [request.id for request in serving.engines[0].requests]
    assert IDS == _ids(out)
    expected = (
        "answered already: 3 of 4 prompts; 1 answer of other prompts or settings, computed again; "
        "1 answer of ids that no prompt has, left in the file\n"
    )
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--dtype", "float32"], 'dtype is "float32" here and "bfloat16" there'),
        (["--fast"], "exact is false here and true there"),
        (["--model", "other"], 'model is "other" here and "smollm2" there'),
        (["--temperature", "0.5"], "temperature is 0.5 here and 0.0 there"),
        (["--chunk-tokens", "32"], "chunk_tokens is 32 here and 256 there"),
        (["--device", "npu", "--simulate"], 'device is "npu" here and "cpu" there'),
    ],
)
def test_answers_by_other_settings_are_not_mixed(
    prompts: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    reason: str,
) -> None:
    """They are refused with what differs, and stay as they are."""
    out = tmp_path / "out"
    main(["run", prompts, "--out", str(out)], serving=_at_step(3, _kill(signal.SIGTERM)))
    before, serving = out.with_name("out.part").read_bytes(), FakeServing()
    command = ["run", prompts, "--out", str(out), "--resume", *options]
    assert main(command, serving=serving) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"kvtide: --resume: none of the 2 answers of {out} fits (")
    assert reason in said
    assert before == out.with_name("out.part").read_bytes()
    assert [] == serving.engines


def test_where_all_requests_fail_the_exit_code_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """4: a script doesn't take a file of errors for answers. There is nothing to verify."""
    prompts = _write(tmp_path, ["large 1", "large 2"])
    out, report = tmp_path / "out", tmp_path / "report"
    files = ["--out", str(out), "--report", str(report), "--verify", "--kv-memory", "1MiB"]
    serving = FakeServing()
    assert main(["run", prompts, *files], serving=serving) == 4
    found = read_report(report)
    assert (2, 0, None, None) == tuple(
        found[key] for key in ("failed", "answered", "exact", "verified")
    )
    assert [True, True] == [row["error"] is not None for row in read_rows(out)]
    assert 1 == len(serving.engines)
    assert "exact: null (nothing was answered)\n" in capsys.readouterr().err


def test_one_answer_is_enough_for_success(tmp_path: Path) -> None:
    """The others fail alone."""
    prompts, out = _write(tmp_path, ["large", "small"]), tmp_path / "out"
    command = ["run", prompts, "--kv-memory", "1MiB", "--out", str(out)]
    assert main(command, serving=FakeServing()) == 0
    assert main([*command, "--resume"], serving=FakeServing()) == 0


def test_resume_answers_what_failed_before(tmp_path: Path) -> None:
    """The reason may be mended by then, such as too little memory."""
    prompts, out = _write(tmp_path, ["large", "small"]), tmp_path / "out"
    command = ["run", prompts, "--out", str(out), "--resume"]
    assert main([*command, "--kv-memory", "1MiB"], serving=FakeServing()) == 0
    assert [True, False] == [row["error"] is not None for row in read_rows(out)]
    assert main(command, serving=FakeServing()) == 0
    assert [("large", None), ("small", None)] == [
        (row["id"], row["error"]) for row in read_rows(out)
    ]


def test_full_disk_ends_the_run_with_what_is_there(
    prompts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 1, the reason and how to go on; the answers before that are kept."""
    append, out, report = PartFile.append, tmp_path / "out", tmp_path / "report"
    room = iter([True, True, True, False])  # a header and two answers

    def append_if_room(part: PartFile, line: bytes) -> None:
        if not next(room):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(part, line)

    monkeypatch.setattr(PartFile, "append", append_if_room)
    files = ["--out", str(out), "--report", str(report)]
    assert main(["run", prompts, *files], serving=FakeServing()) == 1
    monkeypatch.undo()
    assert ["a", "b"] == read_part(out)
    said = capsys.readouterr().err.splitlines()[-2:]
    assert said[0].startswith(f"answered: 2 of 5 prompts, kept in {out}.part; ")
    assert (
        f"kvtide: cannot write {out}.part: No space left on device; once that is mended, the same "
        "command with --resume goes on with what is kept"
    ) == said[1]
    assert "No space left on device" in str(read_report(report)["ended_by"])
    assert main(["run", prompts, *files, "--resume"], serving=FakeServing()) == 0
    assert IDS == _ids(out)


def test_report_that_has_no_room_hides_nothing(
    prompts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The disk is full for it too; the last line is still what ended the run."""

    def fail() -> None:
        monkeypatch.setattr("os.fsync", refuse)
        raise RuntimeError("out of memory")

    def refuse(_file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files = ["--out", str(tmp_path / "out"), "--report", str(tmp_path / "report")]
    with pytest.raises(RuntimeError, match="out of memory"):
        main(["run", prompts, *files], serving=_at_step(3, fail))
    monkeypatch.undo()
    said = capsys.readouterr().err
    assert f"cannot write {tmp_path / 'report'}: No space left on device\n" in said
    assert ["a", "b"] == read_part(tmp_path / "out")


def test_an_old_file_is_refused_before_the_model_is_opened(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with both remedies; `--overwrite` then answers everything anew."""
    out = tmp_path / "out"
    assert main(["run", prompts, "--out", str(out)], serving=FakeServing()) == 0
    capsys.readouterr()
    serving = FakeServing()
    assert main(["run", prompts, "--out", str(out)], serving=serving) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kvtide: --out: {out} holds 5 answers; add --resume")
    assert 1 == said.count("\n")
    assert [] == serving.opened
    assert main(["run", prompts, "--out", str(out), "--overwrite"], serving=serving) == 0
    assert 5 == len(serving.engines[0].requests)


def test_two_runs_do_not_write_one_file(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second is told which process is at it, and leaves the first alone."""
    out, codes = tmp_path / "out", []

    def start_another() -> None:
        codes.append(main(["run", prompts, "--out", str(out), "--resume"], serving=FakeServing()))

    assert main(["run", prompts, "--out", str(out)], serving=_at_step(3, start_another)) == 0
    assert [2] == codes
    assert f"kvtide: process {os.getpid()} is writing its answers to {out}.part" in (
        capsys.readouterr().err
    )
    assert IDS == _ids(out)


_IN_A_TERMINAL = """
import os, signal, sys
from kvtide.cli.main import main
from support.fake_serving import FakeServing

master = int(sys.argv[1])

def prepare(engine, number):
    steps = iter(range(1, 100))
    engine.before_step = lambda: act() if next(steps) == 3 else None

def act():
    if sys.argv[2] == "closed":
        os.close(master)
    os.kill(os.getpid(), getattr(signal, sys.argv[3]))

sys.exit(main(["run", *sys.argv[4:]], serving=FakeServing(prepare)))
"""


def _in_a_terminal(state: str, number: str, *arguments: str) -> tuple[int, bytes]:
    """The exit code of a run in a terminal, `open` or `closed` by then, and what it shows."""
    master, slave = os.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _IN_A_TERMINAL, str(master), state, number, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=slave,
            pass_fds=[master],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TERM": "xterm"},
        )
        os.close(slave)
        if state == "closed":
            os.close(master)
            return process.wait(), b""
        code, shown = process.wait(), b""
        with contextlib.suppress(OSError):  # the end of a terminal is an error
            while data := os.read(master, 100_000):
                shown += data
        return code, shown
    finally:
        with contextlib.suppress(OSError):
            os.close(master)


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_the_cursor_comes_back(prompts: str, tmp_path: Path, number: str) -> None:
    """The live display hides it; nobody else would show it again."""
    code, shown = _in_a_terminal("open", number, prompts, "--out", str(tmp_path / "out"))
    assert 128 + getattr(signal, number) == code
    assert -1 < shown.rfind(b"\x1b[?25l") < shown.rfind(b"\x1b[?25h")


def test_a_terminal_that_is_closed_takes_no_answer_with_it(prompts: str, tmp_path: Path) -> None:
    """Nothing can be shown there any more; the answers are kept, and the report is written."""
    out, report = tmp_path / "out", tmp_path / "report"
    files = ["--out", str(out), "--report", str(report)]
    code, _ = _in_a_terminal("closed", "SIGHUP", prompts, *files)
    assert 129 == code
    assert ["a", "b"] == read_part(out)
    assert "SIGHUP" == read_report(report)["ended_by"]
