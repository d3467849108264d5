"""`kvtide run` in a pipeline: standard output has answers and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.cli.main import main
from support.fake_serving import FakeEngine, FakeServing, press_ctrl_c
from support.results import read_part

IDS_AS_THEY_END = ["first", "second", "short", "last"]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Four prompts, of which the fake engine answers two at a time; the last but one overtakes."""
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"id": "first", "prompt": "a", "max_new_tokens": 2},
        {"id": "second", "prompt": "b", "max_new_tokens": 2},
        {"id": "last", "prompt": "c", "max_new_tokens": 2},
        {"id": "short", "prompt": "d", "max_new_tokens": 1},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


@contextlib.contextmanager
def _standard_output_to(descriptor: int) -> Iterator[None]:
    """What a shell does for `> file` and `|`. Takes the descriptor over."""
    kept = os.dup(1)
    try:
        os.dup2(descriptor, 1)
        os.close(descriptor)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _ids(text: str) -> list[str]:
    return [json.loads(line)["id"] for line in text.split("\n")[:-1]]


@pytest.mark.parametrize("out", [[], ["--out", "-"], ["--out", "/dev/stdout"]])
@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_standard_output_has_the_answers_alone(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: list[str], kind: str
) -> None:
    """They come as the prompts end, with and without a name for it; all else is elsewhere."""
    reader, writer = os.pipe()
    if kind == "file":
        writer = os.open(tmp_path / "all", os.O_WRONLY | os.O_CREAT)
    with _standard_output_to(writer):
        assert main(["run", prompts, *out, "--verify"], serving=FakeServing()) == 0
    text = os.read(reader, 100_000) if kind == "pipe" else (tmp_path / "all").read_bytes()
    assert IDS_AS_THEY_END == _ids(text.decode())
    captured = capsys.readouterr()
    assert "" == captured.out
    assert "requests: 4, 0 of them failed" in captured.err
    assert "verified: true" in captured.err
    assert [] == [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_samples_that_end_in_one_step_are_one_line(prompts: str, tmp_path: Path) -> None:
    """A prompt is answered once, whichever of its samples ends last: on a stream, and in a part."""
    with _standard_output_to(os.open(tmp_path / "all", os.O_WRONLY | os.O_CREAT)):
        assert main(["run", prompts, "--n", "2"], serving=FakeServing()) == 0
    assert ["first", "second", "last", "short"] == _ids((tmp_path / "all").read_text("utf-8"))

    def end_in_step_5(engine: FakeEngine, _number: int) -> None:
        calls = iter(range(1, 1000))
        engine.before_step = lambda: press_ctrl_c() if next(calls) == 5 else None

    options = ["--n", "2", "--out", str(tmp_path / "out")]
    assert main(["run", prompts, *options], serving=FakeServing(end_in_step_5)) == 130
    assert ["first", "second"] == read_part(tmp_path / "out")


def test_a_redirected_output_is_added_to(prompts: str, tmp_path: Path) -> None:
    """`>> file` keeps what the file has: no file takes its place."""
    (tmp_path / "all").write_text("before\n", encoding="utf-8")
    with _standard_output_to(os.open(tmp_path / "all", os.O_WRONLY | os.O_APPEND)):
        assert main(["run", prompts, "--out", "/dev/stdout"], serving=FakeServing()) == 0
    assert (tmp_path / "all").read_text(encoding="utf-8").startswith('before\n{"id": "first"')


def test_a_report_is_added_to_a_redirected_output(prompts: str, tmp_path: Path) -> None:
    """It comes after the answers there, those of earlier runs too."""
    for _ in range(2):
        with _standard_output_to(os.open(tmp_path / "all", os.O_WRONLY | os.O_APPEND | os.O_CREAT)):
            assert main(["run", prompts, "--report=/dev/stdout"], serving=FakeServing()) == 0
    text = (tmp_path / "all").read_text(encoding="utf-8")
    assert (8, 2) == (text.count('{"id": '), text.count('"requests": 4'))


def test_each_answer_comes_as_it_ends(prompts: str) -> None:
    """A reader has the first answers before the engine makes its next step."""
    reader, writer = os.pipe()
    seen: list[list[str]] = []

    def look(engine: FakeEngine, _number: int) -> None:
        steps = iter(range(1, 100))
        engine.before_step = lambda: (
            seen.append(_ids(os.read(reader, 100_000).decode())) if next(steps) == 3 else None
        )

    with _standard_output_to(writer):
        assert main(["run", prompts], serving=FakeServing(look)) == 0
    assert [["first", "second"]] == seen


def test_answers_are_whole_in_a_pipe_that_does_not_wait(tmp_path: Path) -> None:
    """A full pipe of another program's, opened so that a write takes only what has room."""
    path = tmp_path / "prompts"
    path.write_text(json.dumps({"id": "i" * 300_000, "prompt": "x"}), encoding="utf-8")
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    found: list[bytes] = []

    def read_all() -> None:
        with os.fdopen(reader, "rb") as file:
            found.append(file.read())

    thread = threading.Thread(target=read_all)
    thread.start()
    with _standard_output_to(writer):
        code = main(["run", str(path)], serving=FakeServing())
    thread.join()
    assert 0 == code
    assert ["i" * 300_000] == _ids(found[0].decode())


def test_reader_that_is_gone_ends_the_run(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`| head -1`: one line says so, and no step is made for answers that nobody gets."""
    reader, writer = os.pipe()
    os.close(reader)
    serving = FakeServing()
    with _standard_output_to(writer):
        assert main(["run", prompts], serving=serving) == 1
    assert capsys.readouterr().err.endswith(
        "kvtide: cannot write answers to standard output: Broken pipe\n"
    )
    assert serving.engines[0].is_closed
    assert ["", ""] == [request.text for request in serving.engines[0].requests[2:]]


def test_closed_standard_output_is_bad_input(
    prompts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its descriptor may be that of another file; so nothing is written there."""
    monkeypatch.setattr("sys.stdout", None)
    assert main(["run", prompts], serving=FakeServing()) == 2
    message = "kvtide: standard output is closed; name a file with --out\n"
    assert message == capsys.readouterr().err


@pytest.mark.parametrize("out", [[], ["--out", "/dev/null"]])
def test_a_stream_has_nothing_to_resume(
    prompts: str, capsys: pytest.CaptureFixture[str], out: list[str]
) -> None:
    """There are no earlier answers to read."""
    assert main(["run", prompts, *out, "--resume"], serving=FakeServing()) == 2
    assert "--resume reads earlier answers, which " in capsys.readouterr().err


def test_a_terminal_shows_each_answer_once(prompts: str) -> None:
    """Where answers and progress share a terminal, the whole line is there, and no excerpt."""
    master, slave = os.openpty()
    code = "import sys; from kvtide.cli.main import main; from support.fake_serving import *; "
    code += "sys.exit(main(sys.argv[1:], serving=FakeServing()))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", prompts],
        stdout=slave,
        stderr=slave,
        env={**environment, "TERM": "xterm"},
    )
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while data := os.read(master, 100_000):
            shown += data
    os.close(master)
    assert 0 == process.wait()
    for name in IDS_AS_THEY_END:
        assert 1 == shown.count(b'{"id": "%s"' % name.encode())
        assert b"%s: " % name.encode() not in shown


def test_a_display_that_is_gone_ends_nothing(prompts: str, tmp_path: Path) -> None:
    """`2>&1 | head`: progress has no reader any more, the answers have."""
    code = "import sys; from kvtide.cli.main import main; from support.fake_serving import *; "
    code += "sys.exit(main(sys.argv[1:], serving=FakeServing()))"
    reader, writer = os.pipe()
    os.close(reader)
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", prompts, "--out", str(out)],
        stderr=writer,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        check=False,
    )
    os.close(writer)
    assert 0 == done.returncode
    assert ["first", "second", "last", "short"] == _ids(out.read_text(encoding="utf-8"))
