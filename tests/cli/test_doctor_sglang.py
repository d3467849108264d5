"""`kvtide doctor --sglang` without SGLang; engines/sglang/tests has the tests with it."""

from __future__ import annotations

import sys

import pytest

from kvtide.cli.main import main


def test_without_sglang_it_says_where_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the environment that the command looked into."""
    assert 2 == main(["doctor", "--sglang"])
    captured = capsys.readouterr()
    assert "" == captured.out
    assert [
        f"kvtide: --sglang: SGLang isn't installed in this environment ({sys.prefix}); install "
        "kvtide into SGLang's own environment (pip install kvtide) and run it there"
    ] == captured.err.splitlines()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--device", "npu"], "--device"),
        (["--simulate"], "--simulate"),
        (["--schedule", "lazy", "--simulate"], "--simulate and --schedule"),
        (["--size", "1MiB"], "--size"),
    ],
)
def test_options_of_a_device_are_refused(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command refuses them before it looks at SGLang."""
    assert 2 == main(["doctor", "--sglang", *options])
    expected = f"kvtide: --sglang looks at SGLang, not at a device; leave out {named}\n"
    assert expected == capsys.readouterr().err
