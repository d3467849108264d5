"""`kvtide doctor --vllm` without vLLM; engines/vllm/tests has the tests with it."""

from __future__ import annotations

import sys

import pytest

from kvtide.cli.main import main


def test_without_vllm_it_says_where_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the environment that the command looked into."""
    assert 2 == main(["doctor", "--vllm"])
    captured = capsys.readouterr()
    assert "" == captured.out
    assert [
        f"kvtide: --vllm: vLLM isn't installed in this environment ({sys.prefix}); install kvtide "
        "into vLLM's own environment (pip install kvtide) and run it there"
    ] == captured.err.splitlines()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--vllm", "--device", "npu"],
            "--vllm looks at vLLM, not at a device; leave out --device",
        ),
        (["--vllm", "--sglang"], "--sglang looks at SGLang, not at vLLM; leave out --vllm"),
        (["--model", "smollm2"], "unless you give --vllm; leave out --model"),
        (["--vllm", "--kv-transfer-config", "{"], "--kv-transfer-config isn't JSON"),
        (["--vllm", "--kv-transfer-config", "{}"], '"kv_connector" must be "KvtideConnector"'),
        (
            [
                *("--vllm", "--kv-transfer-config"),
                '{"kv_connector": "KvtideConnector", "kv_connector_extra_config": {"disk": "d"}}',
            ],
            "'disk' isn't known",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command refuses it before it looks at vLLM."""
    assert 2 == main(["doctor", *options])
    assert said in capsys.readouterr().err
