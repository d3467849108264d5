from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.cli.extras import EXTRAS, describe_missing
from kvtide.cli.help import EXIT_CODES, RUN_EXAMPLES, SERVE_EXIT_CODES
from kvtide.cli.main import main
from support.fake_serving import FakeEngine, FakeServing, press_ctrl_c
from test_documents import unknown_in_commands

ROOT = Path(__file__).parent.parent.parent


def _help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert 0 == main([*words])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [[], ["run"], ["doctor"], ["inspect"], ["plan"], ["bench"], ["bench", "copy"]],
    ids=" ".join,
)
def test_short_option_prints_the_same_help(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command knows `-h`."""
    assert _help_of(capsys, *words, "--help") == _help_of(capsys, *words, "-h") != ""


@pytest.mark.parametrize("words", [[], ["bench"]], ids=" ".join)
def test_a_command_that_needs_another_shows_its_help(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The help names the words that may follow."""
    assert _help_of(capsys, *words) == _help_of(capsys, *words, "--help")


@pytest.mark.parametrize(
    "words", [[], ["run"], ["serve"], ["doctor"], ["inspect"], ["plan"], ["vllm"]], ids=" ".join
)
def test_help_has_the_exit_codes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each that the command gives, and no other, stands in a line with what it means."""
    text = _help_of(capsys, *words, "-h").partition("Exit codes")[2]
    found = [line.strip().partition("  ") for line in text.splitlines() if line.strip()]
    expected = dict(EXIT_CODES) if words != ["serve"] else dict(SERVE_EXIT_CODES)
    if words in (["doctor"], ["inspect"], ["plan"], ["vllm"]):
        del expected["3"], expected["4"]  # of the requests of a run
    assert expected == {code: meaning.strip() for code, _, meaning in found}


@pytest.mark.parametrize("verb", ["run", "doctor", "inspect", "plan"])
def test_examples_of_the_help_have_options_that_exist(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """People copy the examples."""
    monkeypatch.setenv("COLUMNS", "140")
    found = re.findall(rf"^ +(kvtide {verb} .*?)(?:  #.*)?$", _help_of(capsys, verb, "-h"), re.M)
    assert len(found) >= 2
    assert [] == unknown_in_commands("```\n" + "\n".join(found) + "\n```")


@pytest.mark.parametrize("command", RUN_EXAMPLES)
def test_examples_of_run_s_help_run(command: str, tmp_path: Path) -> None:
    """A shell runs them, in a folder that has the files that they name."""
    prompt = b'{"id": "a", "prompt": "Hi"}\n'
    files = {"prompts.jsonl": prompt, "prompts.txt": b"Hi\n", "night.toml": b"[run]\nseed = 7\n"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    code = "import sys; from kvtide.cli.main import main; from support.fake_serving import *; "
    code += "sys.exit(main(sys.argv[1:], serving=FakeServing()))"
    function = f"kvtide() {{ '{sys.executable}' -c '{code}' \"$@\"; }}; jq() {{ cat; }}; "
    done = subprocess.run(
        ["bash", "-c", "set -o pipefail; " + function + command],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    assert "requests: 1, 0 of them failed" in done.stderr


def test_help_names_no_option_in_part(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 60 columns all names of options are whole."""
    monkeypatch.setenv("COLUMNS", "60")
    assert "…" not in _help_of(capsys, "run", "-h")


def test_no_file_gets_the_number_of_a_closed_standard_stream() -> None:
    """What a library writes to standard error must not end up among the answers."""
    code = "import os, sys, kvtide.cli as c, kvtide.cli.main as m; "
    code += "m.main = lambda: os.open(os.devnull, os.O_RDONLY); sys.exit(c.start())"
    done = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" 0<&- 1>&- 2>&-', sys.executable, code], check=False
    )
    assert 3 <= done.returncode < 100


def test_python_m_kvtide_is_kvtide() -> None:
    """It is the same command, under the same name."""
    done = subprocess.run(
        [sys.executable, "-m", "kvtide", "run", "--kv-memory", "lots", "-p", "Hi"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (2, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith("kvtide: --kv-memory: 'lots' is not a size")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kvtide do", ["doctor"]),
        ("kvtide run --log-f", ["--log-format"]),
        ("kvtide run --log-format j", ["json"]),
        ("kvtide run --model s", ["smollm2"]),
        ("kvtide run --model ./s", []),
    ],
)
def test_a_shell_completes_names(line: str, expected: list[str]) -> None:
    """Commands, options, and values that are known; for the rest a shell offers files."""
    code = "import sys; from kvtide.cli import start; sys.exit(start())"
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | words | {"_KVTIDE_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (expected, "") == (done.stdout.split(), done.stderr)


def test_completion_can_be_installed(capsys: pytest.CaptureFixture[str]) -> None:
    """The help has the two options for it that all programs with typer have."""
    found = _help_of(capsys, "-h")
    assert "--install-completion" in found
    assert "--show-completion" in found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--log-format", "json", "-p", "Hi", "--kv-memory", "lots"], "--kv-memory: 'lots'"),
        (["run", "--log-format=json", "--colour"], "No such option: --colour"),
        (["run", "-p", "Hi", "--top-k", "x", "--log-format", "json"], "--top-k is 'x'"),
        (["run", "/no/such/file", "--log-format", "json"], "cannot read prompts from /no/such"),
    ],
)
def test_errors_are_events_too(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--log-format json` holds for every error, wherever it is found."""
    assert 2 == main(words, serving=FakeServing())
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    found = json.loads(line)
    assert ("error", 2, "") == (found["event"], found["exit_code"], captured.out)
    assert message in found["message"]


def test_ctrl_c_is_an_event_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The event of the interruption comes last."""
    serving = FakeServing()
    monkeypatch.setattr(serving, "open_model", lambda *args, **options: press_ctrl_c())
    assert 130 == main(["run", "-p", "Hi", "--log-format", "json"], serving=serving)
    found = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {"event": "error", "message": "interrupted", "exit_code": 130} == found[-1]


def test_a_bug_is_an_event_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python prints the traceback only without `--log-format json`."""
    serving = FakeServing()
    monkeypatch.setattr(serving, "open_model", lambda *args, **options: 1 / 0)
    assert 1 == main(["run", "-p", "Hi", "--log-format", "json"], serving=serving)
    found = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert ("error", "ZeroDivisionError: division by zero") == (found["event"], found["message"])
    assert "1 / 0" in found["traceback"]
    with pytest.raises(ZeroDivisionError):
        main(["run", "-p", "Hi"], serving=serving)


def test_quiet_run_says_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A run that succeeds writes nothing to standard output and standard error."""
    words = ["run", "-p", "Hi", "--out", str(tmp_path / "o"), "--quiet", "--verify"]
    assert 0 == main(words, serving=FakeServing())
    assert ("", "") == capsys.readouterr()


def test_quiet_run_tells_of_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """An error is one line, as it is without `--quiet`."""
    assert 2 == main(["run", "-p", "Hi", "--quiet", "--device", "abacus"], serving=FakeServing())
    assert "kvtide: there is no device 'abacus'\n" == capsys.readouterr().err


def test_quiet_run_tells_of_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict of `--verify` is shown if it is a bad one."""

    def tell_apart(engine: FakeEngine, number: int) -> None:
        engine.digest_of = lambda request: number

    words = ["run", "-p", "Hi", "--quiet", "--verify"]
    assert 3 == main(words, serving=FakeServing(tell_apart))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("verified: false (request '1', step 0: ")


@pytest.mark.parametrize(
    ("package", "remedy"),
    [
        ("rich.console", "pip install 'kvtide[cli]'"),
        ("transformers", "pip install 'kvtide[serve]'"),
        ("tokenizers.models", "pip install 'kvtide[serve]'"),
        ("abacus", "pip install abacus"),
    ],
)
def test_missing_package_is_told_with_its_extra(package: str, remedy: str) -> None:
    """A package of no extra is told by itself."""
    error = ModuleNotFoundError(f"No module named '{package}'", name=package)
    name = package.partition(".")[0]
    assert f"{name} is not installed; this command needs: {remedy}" == describe_missing(error)


def test_old_python_is_told_that_serve_needs_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation of the extra would fail there."""
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    error = ModuleNotFoundError("No module named 'transformers'", name="transformers")
    assert describe_missing(error).endswith(
        "pip install 'kvtide[serve]' in Python 3.11 or later; this is 3.10"
    )


def test_package_that_is_missing_while_a_command_runs_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This happens to `kvtide run` where only the extra `cli` is installed."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "kvtide.serve.adapter", raising=False)

    def open_model(*_args: object, **_options: object) -> None:
        import transformers  # noqa: F401

    serving = FakeServing()
    monkeypatch.setattr(serving, "open_model", open_model)
    assert 2 == main(["run", "-p", "Hi"], serving=serving)
    expected = "transformers is not installed; this command needs: pip install 'kvtide[serve]'"
    assert f"kvtide: {expected}" == capsys.readouterr().err.splitlines()[-1]


def test_doctor_plan_and_bench_need_the_extra_cli_alone() -> None:
    """These commands run where packages that only `serve` needs are missing."""
    brought = {"filelock", "jinja2"}  # by the hub's client and by torch
    missing = sorted(set(EXTRAS["serve"]) - brought)
    commands = ["doctor --device cpu --size 1MiB", "plan smollm2", "bench copy --size 1MiB"]
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({missing}))\n"
        "from kvtide.cli.main import main\n"
        f"codes = [main(command.split()) for command in {commands}]\n"
        "print(codes, main(['run', '-p', 'Hi', '--model', 'tiny-random']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (0, "[0, 0, 0] 2") == (done.returncode, done.stdout.splitlines()[-1]), done.stderr
    assert "this command needs: pip install 'kvtide[serve]'" in done.stderr


def test_a_module_of_kvtide_that_is_missing_is_a_bug() -> None:
    """No installation would help."""
    error = ModuleNotFoundError("No module named 'kvtide.abacus'", name="kvtide.abacus")
    with pytest.raises(ModuleNotFoundError, match="abacus"):
        describe_missing(error)


def test_extras_have_the_packages_that_errors_name_for_them() -> None:
    """The extras are those of pyproject.toml; `serve` has all of `cli`."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    for extra, packages in EXTRAS.items():
        (block,) = re.findall(rf"^{extra} = \[\n(.*?)^\]", text, re.M | re.S)
        names = re.findall(r'^    "([\w\[\]-]+)', block, re.M)
        expected = [*packages, *(["kvtide[cli]"] if extra == "serve" else [])]
        assert sorted(expected) == sorted(name.replace("-", "_") for name in names)
