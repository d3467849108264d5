"""What `kvtide serve` says before a model is loaded, and what it logs."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from kvtide.cli.live import LiveDisplay
from kvtide.cli.main import main
from support.fake_serving import FakeServing
from support.terminal import Terminal

KEY = "a-key-of-this-test"


def _complaint(capfd: pytest.CaptureFixture[str], *options: str) -> str:
    """Runs the command, which must refuse its options without asking for a model."""
    serving = FakeServing()
    assert 2 == main(["serve", "nothing", *options], serving=serving)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("kvtide: ")
    return line


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.com", ""])
def test_other_machines_need_a_key(host: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The error has both ways to give one."""
    line = _complaint(capfd, "--host", host)
    assert "--api-key-file" in line
    assert "KVTIDE_API_KEY" in line


def test_a_bad_key_in_the_environment_is_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one would be known to everybody. The key isn't told."""
    monkeypatch.setenv("KVTIDE_API_KEY", "tiny-k")
    assert "tiny-k" not in _complaint(capfd)


def test_a_port_in_use_is_told_before_a_model_is_loaded(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The line has the port, and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = _complaint(capfd, "--port", str(port))
    assert f"port {port}" in line
    assert "--port" in line


@pytest.mark.parametrize(
    ("option", "value"), [("--max-body", "much"), ("--kv-memory", "0"), ("--schedule", "lazy")]
)
def test_invalid_options_are_refused(
    option: str, value: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Options of the engine are refused as `kvtide run` does."""
    assert option in _complaint(capfd, option, value)


def test_its_table_of_a_file_has_options(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The table has the command's name."""
    path = tmp_path / "kvtide.toml"
    path.write_text('[serve]\nhost = "10.1.2.3"\n')
    assert "10.1.2.3" in _complaint(capfd, "--config", str(path))
    path.write_text("[run]\nn = 2\n")
    assert "[serve]" in _complaint(capfd, "--config", str(path))


def test_what_is_loaded_is_gone_from_the_terminal_when_the_server_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody thinks that it still loads."""
    terminal = Terminal(100)
    shown: list[str] = []
    console = Console(file=terminal, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    monkeypatch.setattr("kvtide.cli.serve.make_console", lambda: console)

    def serve(*_: object) -> None:
        shown.extend(terminal.lines)

    monkeypatch.setattr("kvtide.cli.serve._serve", serve)
    engine = SimpleNamespace(exact_check=None)
    monkeypatch.setattr("kvtide.cli.serve._build_engine", lambda *_: engine)
    load = LiveDisplay.load
    loaded: list[str] = []

    def note(display: LiveDisplay, what: str, done: int, total: int | None) -> None:
        load(display, what, done, total)
        loaded.append("\n".join(terminal.lines))

    monkeypatch.setattr(LiveDisplay, "load", note)
    assert 0 == main(["serve", "tiny-random", "--port", "0"], serving=FakeServing())
    assert "making the pool" in loaded[-1]
    assert "making the pool" not in "\n".join(shown)
