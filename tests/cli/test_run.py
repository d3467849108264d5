from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.files import replace_file
from kvtide.cli.main import main
from kvtide.cli.session import RunSettings
from kvtide.errors import KvtideError, UsageError
from kvtide.serve.seeds import derived_seed
from kvtide.tier import MooncakeSettings
from support.fake_serving import FOUND, FakeEngine, FakeServing, press_ctrl_c
from support.results import read_part, read_report, read_rows


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Four prompts: one never fits, one is retracted, and the last has its own settings."""
    path = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"id": "first", "prompt": "Hi"},
        {"id": "large", "prompt": "A long one"},
        {"id": "moved", "messages": [{"role": "user", "content": "Hello"}]},
        {"id": "last", "prompt": "x", "max_new_tokens": 2, "temperature": 0.5, "seed": 9},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def _at_step(step: int, act: Callable[[], None]) -> Callable[[], None]:
    """A function for `before_step` that acts before one step, counted from 1."""
    calls = iter(range(1, 1000))
    return lambda: act() if next(calls) == step else None


def test_run_answers_all_but_the_one_that_never_fits(prompts: str, tmp_path: Path) -> None:
    """One request fails alone; all others are answered in input order and reported."""
    out, report = tmp_path / "out.jsonl", tmp_path / "report.json"
    options = ["--kv-memory", "24MiB", "--max-new-tokens", "3"]
    files = ["--out", str(out), "--report", str(report)]
    assert main(["run", prompts, *options, *files], serving=FakeServing()) == 0
    rows = read_rows(out)
    assert ["first", "large", "moved", "last"] == [row["id"] for row in rows]
    assert [3, 0, 3, 2] == [row["new_tokens"] for row in rows]
    assert [0, 0, 1, 0] == [row["retractions"] for row in rows]
    assert "needs 99 tokens of KV, the pool holds 64" == rows[1]["error"]
    found = read_report(report)
    assert (4, 1, 8, 1) == tuple(
        found[key] for key in ("requests", "failed", "new_tokens", "retractions")
    )
    assert (True, None) == (found["exact"], found["verified"])
    assert ("2 to 4", 0.25) == (found["exact_rows"], found["selfcheck_seconds"])


def test_a_device_is_simulated_where_that_is_asked_for(prompts: str) -> None:
    """The schedule is the named one, or lazy; a real device has none."""
    for options, expected in (
        ("--device cpu", ("cpu", None)),
        ("--device npu --simulate", ("npu", "lazy")),
        ("--device npu --simulate --schedule random:7", ("npu", "random:7")),
    ):
        serving = FakeServing()
        assert 0 == main(["run", prompts, *options.split()], serving=serving)
        assert [expected] == serving.checked
        assert expected[0] == serving.engines[0].options.device


def test_options_reach_the_engine_and_the_requests(prompts: str) -> None:
    """Every option arrives, and a line's own settings win over the options."""
    serving = FakeServing()
    options = (
        "--model tiny-random --kv-memory 24MiB --host-memory 1.5GiB --on-pressure recompute "
        "--max-new-tokens 5 --temperature 0.7 --top-k 40 --top-p 0.9 --seed 3 --dtype float32 "
        "--page-size 8 --chunk-tokens 32 --threads 2 --fast"
    )
    assert main(["run", prompts, *options.split()], serving=serving) == 0
    (engine,) = serving.engines
    assert [("tiny-random", "float32")] == serving.opened
    made = engine.options
    assert (25_165_824, 1_610_612_736) == (made.kv_memory_bytes, made.host_memory_bytes)
    assert ("recompute", 8, 32, 2) == (
        made.on_pressure,
        made.page_size,
        made.chunk_tokens,
        made.threads,
    )
    assert (False, "cpu", False) == (made.exact, made.device, made.keep_logits)
    first, last = engine.requests[0].params, engine.requests[3].params
    assert (5, 0.7, 40, 0.9, derived_seed(3, 0)) == (
        first.max_new_tokens,
        first.temperature,
        first.top_k,
        first.top_p,
        first.seed,
    )
    assert (2, 0.5, 40, 0.9, 9) == (
        last.max_new_tokens,
        last.temperature,
        last.top_k,
        last.top_p,
        last.seed,
    )


def test_options_of_input_and_output_reach_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the options is for the session."""
    seen: list[RunSettings] = []

    def keep(settings: RunSettings, _serving: object) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr("kvtide.cli.run.execute", keep)
    options = (
        "-p Hi --input-format openai --special-tokens --n 3 --stop END --stop ## --logprobs 2 "
        f"--max-running 5 --out {tmp_path}/o --resume --overwrite"
    )
    assert main(["run", *options.split()], serving=FakeServing()) == 0
    assert main(["run", "prompts.jsonl", "--out", "-"], serving=FakeServing()) == 0
    given, default = seen
    assert ("Hi", "openai", True, 3, 2) == (
        given.prompt,
        given.input_format,
        given.special_tokens,
        given.sample_count,
        given.sampling.logprobs,
    )
    assert (("END", "##"), 5) == (given.sampling.stop, given.engine.max_running)
    assert (tmp_path / "o", True, True) == (given.out, given.resume, given.overwrite)
    assert ("prompts.jsonl", None, None, 1) == (
        default.source,
        default.prompt,
        default.out,
        default.sample_count,
    )
    assert ((), 64) == (default.sampling.stop, default.engine.max_running)


def test_a_prompt_of_the_command_line_is_answered(tmp_path: Path) -> None:
    """It needs no file."""
    out = tmp_path / "o"
    assert main(["run", "-p", "Hi", "--out", str(out)], serving=FakeServing()) == 0
    assert [("1", 64)] == [(row["id"], row["new_tokens"]) for row in read_rows(out)]


def test_fast_is_reported_as_not_exact(prompts: str, tmp_path: Path) -> None:
    """The report of a run with `--fast` says that it isn't exact."""
    report = tmp_path / "r.json"
    assert main(["run", prompts, "--fast", "--report", str(report)], serving=FakeServing()) == 0
    found = read_report(report)
    assert [False, None, None] == [
        found[key] for key in ("exact", "exact_rows", "selfcheck_seconds")
    ]


def test_a_run_says_by_which_passes_it_is_exact(
    prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says it before the answers; with `--fast` there is no such line."""
    line = "exact mode: passes of 2 to 4 rows agree (self-check: 0.2 s)\n"
    assert main(["run", prompts], serving=FakeServing()) == 0
    assert line in capsys.readouterr().err
    assert main(["run", prompts, "--fast"], serving=FakeServing()) == 0
    assert "exact mode" not in capsys.readouterr().err


def test_verify_measures_nothing_again(prompts: str) -> None:
    """The second engine is given the first engine's self-check."""
    serving = FakeServing()
    assert main(["run", prompts, "--verify"], serving=serving) == 0
    assert [None, FOUND] == serving.checks


def test_recomputed_request_is_reported_as_not_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One inexact request makes the run inexact, and the table counts such requests."""
    prompts, report = tmp_path / "p.jsonl", tmp_path / "r.json"
    prompts.write_text('{"id": "recomputed", "prompt": "x"}', encoding="utf-8")
    assert main(["run", str(prompts), "--report", str(report)], serving=FakeServing()) == 0
    assert read_report(report)["exact"] is False
    assert "exact: false (1 request recomputed in different steps)" in capsys.readouterr().err


def test_verify_runs_again_without_retractions_and_what_failed(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the second run requests wait; both engines keep digests, and both are closed."""
    serving, report = FakeServing(), tmp_path / "r.json"
    options = ["--kv-memory", "24MiB", "--verify", "--report", str(report)]
    assert main(["run", prompts, *options], serving=serving) == 0
    first, second = serving.engines
    assert (25_165_824, None) == (first.options.kv_memory_bytes, second.options.kv_memory_bytes)
    assert ("offload", "wait") == (first.options.on_pressure, second.options.on_pressure)
    assert first.options.keep_logits
    assert second.options.keep_logits
    assert ["first", "moved", "last"] == [request.id for request in second.requests]
    assert first.is_closed
    assert second.is_closed
    assert read_report(report)["verified"] is True
    assert capsys.readouterr().err.splitlines()[-1].startswith("verified: true (3 requests: ")


def test_verify_that_differs_exits_3_and_says_where(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A difference in one step's logits is enough, even if every token is equal."""

    def spoil_second(engine: FakeEngine, number: int) -> None:
        if number == 1:
            engine.digest_of = lambda request: (
                len(request.output_ids) * 31 + (request.id == "moved" and len(request.text) == 4)
            )

    report = tmp_path / "r.json"
    options = ["--kv-memory", "24MiB", "--verify", "--report", str(report)]
    assert main(["run", prompts, *options], serving=FakeServing(spoil_second)) == 3
    assert read_report(report)["verified"] is False
    expected = "verified: false (request 'moved', step 1: the right token 1, but from other logits)"
    assert expected == capsys.readouterr().err.splitlines()[-1]


def test_ctrl_c_keeps_the_answers_that_are_done(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step ends, the other requests are aborted, the engine is closed; exit code 130."""

    def interrupt_at_step_3(engine: FakeEngine, _number: int) -> None:
        engine.before_step = _at_step(3, press_ctrl_c)

    serving, out = FakeServing(interrupt_at_step_3), tmp_path / "out.jsonl"
    before = signal.getsignal(signal.SIGINT)
    options = ["--kv-memory", "24MiB", "--max-new-tokens", "3", "--out", str(out)]
    assert main(["run", prompts, *options], serving=serving) == 130
    assert ["large", "first"] == read_part(out)
    assert not out.exists()
    (engine,) = serving.engines
    assert ["moved", "last"] == engine.aborted
    assert engine.is_closed
    assert signal.getsignal(signal.SIGINT) is before
    captured = capsys.readouterr()
    assert (
        f"answered: 1 of 4 prompts (1 failed), kept in {out}.part; the same command with --resume "
        "answers the rest\nkvtide: interrupted\n"
    ) in captured.err
    assert captured.out == ""
    options += ["--overwrite", "--log-format", "json"]
    assert main(["run", prompts, *options], serving=FakeServing(interrupt_at_step_3)) == 130
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (ended,) = (event for event in events if event["event"] == "ended_early")
    assert (1, 4, 1) == (ended["answered"], ended["prompts"], ended["failed"])


def test_second_ctrl_c_does_not_wait_for_the_step(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second Ctrl-C ends the run at once, and the finished answers are still kept."""

    def press_twice(engine: FakeEngine, _number: int) -> None:
        def press() -> None:
            press_ctrl_c()
            press_ctrl_c()

        engine.before_step = _at_step(4, press)

    serving, out = FakeServing(press_twice), tmp_path / "out.jsonl"
    options = ["--kv-memory", "24MiB", "--max-new-tokens", "3", "--out", str(out)]
    assert main(["run", prompts, *options], serving=serving) == 130
    assert ["large", "first"] == read_part(out)
    assert serving.engines[0].is_closed
    assert capsys.readouterr().err.endswith("\nkvtide: interrupted\n")


def test_ctrl_c_while_loading_is_one_line(
    prompts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is answered yet, so nothing is kept."""
    serving = FakeServing()
    monkeypatch.setattr(serving, "open_model", lambda *args, **options: press_ctrl_c())
    assert main(["run", prompts], serving=serving) == 130
    assert capsys.readouterr().err.endswith("\nkvtide: interrupted\n")


@pytest.mark.parametrize("presses", [1, 3])
def test_ctrl_c_while_answers_are_written_waits_for_them(
    prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, presses: int
) -> None:
    """All answers are written, however often it is pressed, and also while the engine closes."""

    def press_in_close(engine: FakeEngine, _number: int) -> None:
        def close() -> None:
            press_ctrl_c()
            engine.is_closed = True

        monkeypatch.setattr(engine, "close", close)

    def press_and_replace(path: Path, parts: Iterable[bytes]) -> None:
        for _ in range(presses):
            press_ctrl_c()
        replace_file(path, parts)

    monkeypatch.setattr("kvtide.cli.answers.file.replace_file", press_and_replace)
    serving, out = FakeServing(press_in_close), tmp_path / "out.jsonl"
    assert main(["run", prompts, "--out", str(out)], serving=serving) == 130
    assert len(read_rows(out)) == 4
    assert serving.engines[0].is_closed


def test_ctrl_c_while_verifying_keeps_answers_and_report(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers and report are written before the run is verified."""

    def interrupt_second(engine: FakeEngine, number: int) -> None:
        if number == 1:
            engine.before_step = press_ctrl_c

    serving, out, report = FakeServing(interrupt_second), tmp_path / "o", tmp_path / "r"
    files = ["--out", str(out), "--report", str(report)]
    assert main(["run", prompts, "--verify", *files], serving=serving) == 130
    assert len(read_rows(out)) == 4
    assert (4, None) == (read_report(report)["requests"], read_report(report)["verified"])
    assert serving.engines[1].is_closed
    assert capsys.readouterr().err.endswith("\nkvtide: interrupted\n")


def test_verify_that_gets_no_pool_leaves_answers_and_report(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answers are complete; `verified: null` says that nothing verified them."""

    def refuse_second(_engine: FakeEngine, number: int) -> None:
        if number == 1:
            raise UsageError("the KV pool takes more than is free")

    serving, out, report = FakeServing(refuse_second), tmp_path / "o", tmp_path / "r"
    files = ["--out", str(out), "--report", str(report)]
    assert main(["run", prompts, "--verify", *files], serving=serving) == 2
    assert capsys.readouterr().err.endswith("kvtide: the KV pool takes more than is free\n")
    assert len(read_rows(out)) == 4
    assert read_report(report)["verified"] is None


def test_failure_of_the_engine_keeps_the_answers_that_are_done(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of kvtide is one line and exit code 1, and the engine is closed."""

    def fail_at_step_4(engine: FakeEngine, _number: int) -> None:
        def fail() -> None:
            raise KvtideError("the device is gone")

        engine.before_step = _at_step(4, fail)

    serving, out = FakeServing(fail_at_step_4), tmp_path / "out.jsonl"
    options = ["--kv-memory", "24MiB", "--max-new-tokens", "3", "--out", str(out)]
    assert main(["run", prompts, *options], serving=serving) == 1
    assert ["large", "first"] == read_part(out)
    assert serving.engines[0].is_closed
    assert capsys.readouterr().err.endswith("kvtide: the device is gone\n")


def test_unknown_device_is_refused_before_the_model_is_loaded(
    prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only torch knows the devices, so the line about loading it comes first."""
    serving = FakeServing()
    assert main(["run", prompts, "--device", "abacus"], serving=serving) == 2
    assert [] == serving.opened
    expected = "loading torch\nkvtide: there is no device 'abacus'\n"
    assert expected == capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("run", "there are no prompts; name a file of them (PROMPTS), - for standard input, or"),
        ("run PROMPTS -p Hi", "and --prompt is given too; give the one or the other"),
        ("run --prompt=", "--prompt: 'prompt' is empty"),
        ("run PROMPTS --max-running 0", "--max-running is '0'; it must be 1 or more"),
        ("run PROMPTS --n 0", "--n is '0'; it must be 1 or more"),
        ("run PROMPTS --stop=", "--stop is empty; an empty text is in every answer"),
        ("run PROMPTS --logprobs 21", "--logprobs is '21'; it must be 20 or less"),
        ("run PROMPTS --input-format xml", "it must be one of auto, jsonl, openai, text"),
        ("rum PROMPTS", "No such command 'rum'"),
        ("run PROMPTS --colour", "No such option"),
        ("run PROMPTS extra", "unexpected extra argument"),
        ("run PROMPTS --dtype int8", "--dtype is 'int8'; it must be one of bfloat16, float32"),
        ("run PROMPTS --threads x", "--threads is 'x'; it must be a whole number"),
        ("run PROMPTS --seed 1.5", "--seed is '1.5'; it must be a whole number"),
        ("run PROMPTS --temperature x", "--temperature is 'x'; it must be a number"),
        ("run PROMPTS --on-pressure drop", "it must be one of offload, recompute"),
        ("run PROMPTS --schedule eager", "--schedule is for a simulated device; add --simulate"),
        ("run PROMPTS --kv-memory 12parsecs", "--kv-memory: '12parsecs' is not a size"),
        ("run PROMPTS --kv-memory 0", "--kv-memory: 0 is too small"),
        ("run PROMPTS --host-memory 24", "--host-memory: '24' has no unit, so it is 24 bytes"),
        ("run PROMPTS --host-memory lots", "--host-memory: 'lots' is not a size"),
        ("run PROMPTS --max-new-tokens 0", "--max-new-tokens is '0'; it must be 1 or more"),
        ("run PROMPTS --temperature nan", "--temperature is nan"),
        ("run PROMPTS --temperature -1", "--temperature is -1.0"),
        ("run PROMPTS --top-p 0", "--top-p is 0.0"),
        ("run PROMPTS --top-p nan", "--top-p is nan"),
        ("run PROMPTS --top-k -1", "--top-k is '-1'; it must be 0 or more"),
        ("run PROMPTS --seed 9223372036854775808", "--seed is 9223372036854775808"),
        ("run PROMPTS --page-size 0", "--page-size is '0'; it must be 1 or more"),
        ("run PROMPTS --chunk-tokens 0", "--chunk-tokens is '0'; it must be 1 or more"),
        ("run PROMPTS --threads 0", "--threads is '0'; it must be 1 or more"),
        ("run PROMPTS --out PROMPTS", "is also PROMPTS"),
        ("run PROMPTS --out FOLDER", "--out: "),
        ("run PROMPTS --out FOLDER/r --report FOLDER/r", "is also --out"),
        ("run PROMPTS --out FOLDER/r --report FOLDER/r.part", "is also the part of --out"),
        ("run FOLDER/r.part --out FOLDER/r", "is also PROMPTS"),
        ("run FOLDER/nowhere", "cannot read prompts from "),
        ("run FOLDER/loop", "cannot read prompts from "),
        ("run PROMPTS --out FOLDER/loop", "--out: cannot write "),
        ("run PROMPTS --report FOLDER/loop/r", "--report: cannot write "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, complaint: str
) -> None:
    """The command refuses it before it opens the model, and standard output stays empty."""
    serving = FakeServing()
    (tmp_path / "loop").symlink_to("loop")
    words = [
        word.replace("FOLDER", str(tmp_path)) if word != "PROMPTS" else prompts
        for word in arguments.split()
    ]
    assert main(words, serving=serving) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("kvtide: ")
    assert complaint in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert [] == serving.opened


@pytest.mark.parametrize("name", ["answers", "part"])
def test_a_report_takes_no_answers_place(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """`--report` where `--out` was meant costs nobody a night's answers."""
    path = tmp_path / name
    answer = b'{"id": "a", "key": "k"}\n'
    path.write_bytes(b'{"kvtide": 1}\n' + answer if name == "part" else answer)
    before, serving = path.read_bytes(), FakeServing()
    assert main(["run", prompts, "--report", str(path)], serving=serving) == 2
    assert f"--report: {path} holds answers; give another name" in capsys.readouterr().err
    assert before == path.read_bytes()
    assert [] == serving.opened


def test_a_report_takes_the_place_of_a_report(prompts: str, tmp_path: Path) -> None:
    """The same command may run again."""
    path = tmp_path / "report.json"
    for _ in range(2):
        assert main(["run", prompts, "--report", str(path)], serving=FakeServing()) == 0
    assert 4 == read_report(path)["requests"]


def test_pool_too_small_for_a_page_leaves_the_old_answers_alone(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the model tells the bytes of a page, so this bad input is found late."""
    error = UsageError("--kv-memory: 1 byte is less than a page\nof 360 KiB")
    serving, out = FakeServing(build_error=error), tmp_path / "out.jsonl"
    out.write_text("old", encoding="utf-8")
    options = ["--kv-memory", "1", "--out", str(out), "--overwrite"]
    assert main(["run", prompts, *options], serving=serving) == 2
    assert capsys.readouterr().err.endswith("less than a page of 360 KiB\n")
    assert "old" == out.read_text(encoding="utf-8")


def test_prompts_come_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` reads the prompts from standard input."""
    path, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"id": "a", "prompt": "Hi"}', encoding="utf-8")
    with path.open(encoding="utf-8") as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["run", "-", "--out", str(out)], serving=FakeServing()) == 0
    assert ["a"] == [row["id"] for row in read_rows(out)]


def test_closed_standard_input_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python sets sys.stdin to None if it is closed."""
    monkeypatch.setattr("sys.stdin", None)
    assert main(["run", "-"], serving=FakeServing()) == 2
    expected = "kvtide: cannot read prompts from -: standard input is closed; name a file\n"
    assert expected == capsys.readouterr().err


def test_terminal_that_knows_ascii_only_gets_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters that the terminal can't show become `?` and don't break a finished run."""
    (tmp_path / "p").write_text('{"id": "\u00fc", "prompt": "x"}', encoding="utf-8")
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(raw, encoding="ascii"))

    def tell_apart(engine: FakeEngine, number: int) -> None:
        engine.digest_of = lambda request: number

    files = [str(tmp_path / "p"), "--verify", "--out", str(tmp_path / "\u00e9")]
    assert main(["run", *files], serving=FakeServing(tell_apart)) == 3
    sys.stderr.flush()
    assert f"answers: kept in {tmp_path}/?\n".encode() in raw.getvalue()
    assert b"verified: false (request '?', step 0: " in raw.getvalue()


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_missing_package_is_one_line_with_the_remedy(package: str) -> None:
    """One line says how to install the missing package."""
    code = (
        f"import sys; sys.modules[{package!r}] = None; "
        "from kvtide.cli import start; sys.exit(start())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    remedy = "this command needs: pip install 'kvtide[cli]'"
    assert f"kvtide: {package} is not installed; {remedy}\n" == done.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run", "--help"], ["bench", "--help"]])
def test_help_is_there(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Help needs no library, no options and no terminal."""
    assert main(arguments) == 0
    assert "Usage: kvtide" in capsys.readouterr().out


def test_help_says_what_memory_is_taken_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are markup in a help text, and would vanish unless they are escaped."""
    assert main(["run", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for default in ("(room for what runs at once)", "(a quarter of what is free)", "(torch's)"):
        assert default in words


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints the version of the package."""
    from kvtide import __version__

    assert main(["--version"]) == 0
    assert f"kvtide {__version__}\n" == capsys.readouterr().out


@pytest.mark.parametrize("options", [["--kv-memory", "lots"], ["--kv-memory", "24MiB"]])
def test_input_errors_do_not_import_torch(options: list[str]) -> None:
    """torch takes seconds to import, so a bad size or a missing file is found before that."""
    code = (
        "import sys; from kvtide.cli.main import main; "
        f"code = main(['run', '/no/such/file', *{options!r}]); "
        "print(code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "2 False False\n" == done.stdout


def test_disk_below_host_memory_has_a_folder_and_a_limit(prompts: str, tmp_path: Path) -> None:
    """Both reach the engine; a limit without a folder, or without a unit, is bad input."""
    serving = FakeServing()
    disk = ["--disk-dir", str(tmp_path / "kv"), "--disk-memory", "1GiB"]
    assert main(["run", prompts, *disk], serving=serving) == 0
    options = serving.engines[0].options
    assert (tmp_path / "kv", 1 << 30) == (options.disk_dir, options.disk_memory_bytes)
    assert main(["run", prompts, *disk[2:]], serving=serving) == 2
    assert main(["run", prompts, *disk[:3], "24"], serving=serving) == 2


def test_mooncake_store_is_checked_and_reaches_the_engine(
    prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tenant's secret, which nobody else can read in the environment; or bad input."""
    monkeypatch.setenv("KVTIDE_SALT", "sesame\udcff")
    serving = FakeServing()
    assert main(["run", prompts, "--mooncake", "10.0.0.1:50051"], serving=serving) == 0
    options = serving.engines[0].options
    assert MooncakeSettings("10.0.0.1:50051") == options.mooncake
    assert [options.mooncake] == serving.joined
    assert b"sesame\xff" == options.salt
    assert main(["run", prompts, "--mooncake", "10.0.0.1"], serving=serving) == 2


def test_mooncake_store_may_stand_in_the_file_of_options(prompts: str, tmp_path: Path) -> None:
    """Under the name that the option has."""
    path, serving = tmp_path / "night.toml", FakeServing()
    path.write_text('[run]\nmooncake = "10.0.0.1:50051"\n')
    assert main(["run", prompts, "--config", str(path)], serving=serving) == 0
    assert MooncakeSettings("10.0.0.1:50051") == serving.engines[0].options.mooncake
