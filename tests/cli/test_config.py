from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.main import main
from support.fake_serving import FakeServing
from support.results import read_report

PROMPTS = '{"id": "a", "prompt": "Hi"}\n'


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Runs with a configuration and further options; returns the exit code and what was used."""
    (tmp_path / "prompts").write_text(PROMPTS, encoding="utf-8")

    def call(text: str, *options: str) -> tuple[int, FakeServing]:
        (tmp_path / "night.toml").write_text(text, encoding="utf-8")
        serving = FakeServing()
        words = ["run", str(tmp_path / "prompts"), "--config", str(tmp_path / "night.toml")]
        return main([*words, *options], serving=serving), serving

    return call


def test_options_come_from_the_file(run: Any) -> None:
    """Names are those of the command line, with either kind of dash."""
    code, serving = run(
        """
        [run]
        model = "tiny-random"
        kv-memory = "24MiB"
        host_memory = 1048576
        max_new_tokens = 5
        temperature = 0.5
        stop = ["END", "##"]
        fast = true
        verify = true
        """
    )
    assert 0 == code
    first, second = serving.engines
    assert [("tiny-random", "bfloat16")] == serving.opened
    assert (25_165_824, 1_048_576) == (
        first.options.kv_memory_bytes,
        first.options.host_memory_bytes,
    )
    assert not first.options.exact
    params = first.requests[0].params
    assert (5, 0.5, ("END", "##")) == (params.max_new_tokens, params.temperature, params.stop)
    assert second.requests


def test_the_command_line_wins(run: Any) -> None:
    """It replaces what the file says, repeated options and switches too."""
    code, serving = run(
        """
        [run]
        max-new-tokens = 5
        stop = ["END"]
        exact = false
        """,
        *("--max-new-tokens", "7", "--stop", "##", "--exact"),
    )
    assert 0 == code
    (engine,) = serving.engines
    params = engine.requests[0].params
    assert (7, ("##",), True) == (params.max_new_tokens, params.stop, engine.options.exact)


def test_a_switch_has_two_names(run: Any) -> None:
    """`fast = false` is `exact = true`."""
    for text, expected in (("fast = false", True), ("exact = false", False), ("", True)):
        code, serving = run(f"[run]\n{text}\n")
        assert (0, expected) == (code, serving.engines[0].options.exact)


def test_output_options_come_from_the_file(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files' names are as on the command line; --log-format holds for errors too."""
    settings = f"[run]\nreport = '{tmp_path}/report'\nlog-format = 'json'\n"
    code, _ = run(settings)
    assert 0 == code
    assert 1 == read_report(tmp_path / "report")["requests"]
    assert all(json.loads(line)["event"] for line in capsys.readouterr().err.splitlines())
    code, _ = run(settings, "--kv-memory", "lots")
    (line,) = capsys.readouterr().err.splitlines()
    assert (2, "error", 2) == (code, json.loads(line)["event"], json.loads(line)["exit_code"])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[run]\nmax-new-token = 5", "no option 'max-new-token'; did you mean max-new-tokens?"),
        ("[run]\nxyz = 5", "no option 'xyz'; known are input-format, "),
        ("[run]\nconfig = 'other.toml'", "no option 'config'"),
        ("[run]\nprompt = 'Hi'", "no option 'prompt'"),
        ("model = 'x'", "has 'model' outside of [run]; write all settings below [run]"),
        ("[plan]\ntp = 2", "has 'plan' outside of [run]"),
        ("run = 5", "run is not a table; write [run]"),
        ("[run]\nverify = 1", "verify is '1'; write true or false"),
        ("[run]\nverify = 'no'", "verify is 'no'; write true or false"),
        ("[run]\ntop-k = true", "top-k is 'True'; write a number or a text"),
        ("[run]\ntop-k = [1]", "top-k is '[1]'; write a number or a text"),
        ("[run]\nstop = [1979-05-27]", "stop is '1979-05-27'; write a number or a text"),
        ("[run]\nfast = true\nexact = true", "'exact' was set before; keep one of them"),
        ("[run]\ntop_k = 1\ntop-k = 2", "'top-k' was set before; keep one of them"),
        ("[run]\nmax-new-tokens = 'x'", "night.toml; it must be a whole number"),
        ("[run]\nmax-new-tokens = 0", "night.toml; it must be 1 or more"),
        ("[run]\ntemperature = nan", "--temperature is nan"),
        ("[run", "night.toml is not TOML: "),
        ("x = " + "[" * 100_000, "night.toml is not TOML: "),
        ("#" * (1 << 20) + "#", "night.toml is larger than 1 MiB"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(
    run: Any, text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what is wrong before the model is opened."""
    code, serving = run(text)
    error = capsys.readouterr().err
    assert (2, []) == (code, serving.opened)
    assert error.startswith("kvtide: ")
    assert complaint in error
    assert 1 == error.count("\n")


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The same holds for a folder."""
    for name, reason in (("/no/such.toml", "No such file or directory"), ("/", "Is a directory")):
        assert 2 == main(["run", "-p", "Hi", "--config", name], serving=FakeServing())
        assert f"kvtide: --config: cannot read {name}: {reason}\n" == capsys.readouterr().err
