"""`kvtide vllm`: what it prints is what vLLM's side reads, and nonsense is refused before."""

from __future__ import annotations

import json

import pytest

from kvtide.cli.main import main
from kvtide.plugin.vllm.settings import read_settings


def test_prints_settings_that_vllm_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """One line of JSON, whose settings mean what the options say."""
    options = ["--host-memory", "8GiB", "--disk-dir", "kv", "--disk-memory", "50GiB"]
    options += ["--mooncake", "10.0.0.1:50051"]
    assert 0 == main(["vllm", *options])
    (line,) = capsys.readouterr().out.splitlines()
    printed = json.loads(line)
    assert ("KvtideConnector", "kv_both", "recompute") == (
        printed["kv_connector"],
        printed["kv_role"],
        printed["kv_load_failure_policy"],
    )
    found = read_settings(printed["kv_connector_extra_config"])
    assert (8 << 30, 50 << 30) == (found.host_memory_bytes, found.disk_memory_bytes)
    assert "kv" == str(found.disk_dir)
    assert found.mooncake is not None
    assert "10.0.0.1:50051" == found.mooncake.master


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host-memory", "lots"], "host_memory"),
        (["--host-memory", "0"], "no room for any block"),
        (["--disk-memory", "1GiB"], "disk_dir"),
        (["--disk-dir", ""], "disk_dir"),
        (["--mooncake", "nowhere"], "mooncake"),
    ],
)
def test_refuses_what_vllm_would_stumble_over(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the setting, in one line."""
    assert 2 == main(["vllm", *options])
    told = capsys.readouterr()
    assert "" == told.out
    assert said in told.err
    assert 1 == len(told.err.splitlines())
