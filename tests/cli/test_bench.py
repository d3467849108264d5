from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from kvtide.cli.main import main
from kvtide.conformance import SAMPLES
from kvtide.machine import machine_name

OPERATIONS = ["gather", "sealed_gather", "scatter", "engine_gather", "engine_scatter"]


def test_json_has_these_keys_for_these_cases(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints one JSON object and leaves the number of threads as it was."""
    before = torch.get_num_threads()
    assert (
        main(["bench", "copy", "--json", "--size", "1MiB", "--rounds", "1", "--threads", "1"]) == 0
    )
    printed = json.loads(capsys.readouterr().out)
    check_circumstances(printed)
    assert printed["memcpy_gb_s"] > 0
    assert [printed["memcpy_gb_s"]] * 2 == printed["memcpy_gb_s_quartiles"]
    assert ["contiguous", "pages", "random"] == [case["name"] for case in printed["cases"]]
    for case in printed["cases"]:
        ratios = [f"{name}_ratio" for name in (*OPERATIONS[:1], *OPERATIONS[2:], "seal")]
        assert ["name", *(f"{key}{end}" for key in ratios for end in ("", "_quartiles"))] == list(
            case
        )
        assert all(case[key] > 0 for key in ratios)
        assert all([case[key]] * 2 == case[f"{key}_quartiles"] for key in ratios)
    assert before == torch.get_num_threads()


def check_circumstances(printed: dict[str, Any]) -> None:
    """The object says on which machine how much was moved how often, before the figures."""
    assert ["machine", "rounds", "size_bytes"] == list(printed)[:3]
    assert (1, 1 << 20) == (printed["rounds"], printed["size_bytes"])
    machine = printed["machine"]
    assert (1, torch.__version__) == (machine["threads"], machine["torch"])
    assert machine["processor"]


def test_json_of_layouts_has_sizes_and_quartiles(capsys: pytest.CaptureFixture[str]) -> None:
    """Each layout has its size, since it moves whole pages, and the quartiles of each ratio."""
    options = ["--json", "--size", "1MiB", "--rounds", "1", "--threads", "1"]
    assert 0 == main(["bench", "copy", "--layouts", *options])
    printed = json.loads(capsys.readouterr().out)
    check_circumstances(printed)
    for entry in printed["layouts"]:
        assert entry["size_bytes"] > 0
        assert {"memcpy_gb_s_quartiles", "gather_ratio_quartiles"} <= {*entry}


def test_table_names_each_operation_of_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    """The table shows times beside ratios, the size and the thread count."""
    assert main(["bench", "copy", "--size", "2MiB", "--rounds", "1", "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert "2.0 MiB each" in printed
    assert f"{machine_name()}, 1 thread, median (and quartiles) of 1 round" in printed
    assert re.search(r"memcpy ([\d.]+) \(\1…\1\) GB/s", printed)
    for operation in OPERATIONS:
        name = operation.replace("_", " ")
        assert 3 == len(re.findall(rf"  {name} +([\d.]+) \(\1…\1\) +[\d.]+ ", printed))


def test_people_see_a_line_for_each_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line has the layout's row sizes beside its ratios."""
    assert 0 == main(["bench", "copy", "--layouts", "--size", "1MiB", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "pages of 64 tokens, scattered" in printed
    assert f"{machine_name()}, " in printed
    for name in {sample.layout.name for sample in SAMPLES}:
        (line,) = (line for line in printed.splitlines() if line.startswith(f"{name} "))
        assert 3 == len(re.findall(r" ([\d.]+) \(\1…\1\)", line))


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("--size=lots", "--size: 'lots' is not a size"),
        ("--size=1023KiB", "--size: 1023KiB isn't from 1.0 MiB, a page, to "),
        ("--size=1000TiB", "a tenth of this machine's memory"),
        ("--rounds=0", "--rounds is '0'; it must be 1 or more"),
        ("--threads=0", "--threads is '0'; it must be 1 or more"),
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
