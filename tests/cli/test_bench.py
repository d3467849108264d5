from __future__ import annotations

import json

import pytest
import torch

from kvtide.cli.main import main
from kvtide.conformance import SAMPLES

OPERATIONS = ["gather", "sealed_gather", "scatter", "engine_gather", "engine_scatter"]


def test_json_has_these_keys_for_these_cases(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints one JSON object and leaves the number of threads as it was."""
    before = torch.get_num_threads()
    assert (
        main(["bench", "copy", "--json", "--size", "1MiB", "--rounds", "1", "--threads", "1"]) == 0
    )
    printed = json.loads(capsys.readouterr().out)
    assert ["memcpy_gb_s", "cases"] == list(printed)
    assert printed["memcpy_gb_s"] > 0
    assert ["contiguous", "pages", "random"] == [case["name"] for case in printed["cases"]]
    for case in printed["cases"]:
        assert [
            "name",
            "gather_ratio",
            "scatter_ratio",
            "engine_gather_ratio",
            "engine_scatter_ratio",
            "seal_ratio",
        ] == list(case)
        assert all(ratio > 0 for key, ratio in case.items() if key != "name")
    assert before == torch.get_num_threads()


def test_table_names_each_operation_of_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    """The table shows times beside ratios, the size and the thread count."""
    assert main(["bench", "copy", "--size", "2MiB", "--rounds", "1", "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert "2.0 MiB each" in printed
    assert "1 thread, median of 1 round" in printed
    for operation in OPERATIONS:
        assert 3 == printed.count(f"  {operation.replace('_', ' ')}  ")


def test_people_see_a_line_for_each_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line has the layout's row sizes beside its ratios."""
    assert 0 == main(["bench", "copy", "--layouts", "--size", "1MiB", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "pages of 64 tokens, scattered" in printed
    for name in {sample.layout.name for sample in SAMPLES}:
        assert 1 == sum(line.startswith(f"{name} ") for line in printed.splitlines())


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("--size=lots", "--size: 'lots' is not a size"),
        ("--size=1023KiB", "--size: 1023KiB isn't from 1.0 MiB, a page, to "),
        ("--size=1000TiB", "a tenth of this machine's memory"),
        ("--rounds=0", "'--rounds'"),
        ("--threads=0", "'--threads'"),
    ],
)
def test_bad_option_is_one_line_and_exit_code_2(
    option: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is measured, and standard output stays empty."""
    assert main(["bench", "copy", option]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert (1, "") == (captured.err.count("\n"), captured.out)
