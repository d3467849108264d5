"""`kvtide doctor --sglang` with the real SGLang, and with one fault at a time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from kvtide.plugin.sglang.cases.all_cases import CASES
from kvtide.plugin.sglang.pools.known_classes import known_classes

SCRIPT = Path(__file__).parent / "doctor_runs.py"
Runs = dict[str, tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """The exit code, standard output and standard error of each run."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    kept = {name: value for name, value in os.environ.items() if "KVTIDE_" not in name}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=200, env=kept
    )
    assert 0 == result.returncode, result.stderr[-2000:]
    found: Runs = json.loads(result.stdout.splitlines()[-1])
    return found


def report(runs: Runs, name: str) -> tuple[int, dict[str, Any]]:
    """Returns a run's exit code and the JSON object that it printed."""
    code, out, _ = runs[name]
    return code, json.loads(out)


def test_this_sglang_is_sound(runs: Runs) -> None:
    """The hooks are in place, all round trips are exact, and no class is unknown."""
    code, found = report(runs, "whole")
    assert (0, True, True, []) == (code, found["active"], found["ok"], found["gone"])
    assert [case.name for case in CASES] == [trip["name"] for trip in found["round_trips"]]
    assert {"exact"} == {trip["kvtide"]["verdict"] for trip in found["round_trips"]}


def test_the_report_has_sglangs_own_results(runs: Runs) -> None:
    """Each pool has the result of SGLang's own copy."""
    _, found = report(runs, "whole")
    alone = {trip["name"]: trip["sglang"]["verdict"] for trip in found["round_trips"]}
    assert {case.name: case.alone for case in CASES} == alone
    reasons = {trip["name"]: (trip["reason"], trip["fails_on"]) for trip in found["round_trips"]}
    assert [] == [name for name, said in reasons.items() if all(said) == (alone[name] == "exact")]
    assert "CPU alone" == reasons["MHA beside state"][1]


def test_copies_that_fail_are_counted_by_machines(runs: Runs) -> None:
    """Operators with CUDA see how many copies fail there."""
    _, out, _ = runs["few"]
    said = "(those that aren't exact fail: 1 on CUDA machines too)"
    assert any(line.startswith("2 round trips: ") and said in line for line in out.splitlines())


def test_the_report_has_every_class_with_its_verdict(runs: Runs) -> None:
    """A class has round trips, or a reason why it has none."""
    _, found = report(runs, "whole")
    words = {"known": "exact", "refused": "refused", "within": "part", "abstract": "abstract"}
    expected = [(kind.name, words[kind.verdict]) for kind in known_classes()]
    assert expected == [(kind["name"], kind["verdict"]) for kind in found["classes"]]
    unsaid = [kind for kind in found["classes"] if not (kind["round_trips"] or kind["reason"])]
    assert [] == unsaid


def test_the_printed_report_has_both_copies_and_the_verdict(runs: Runs) -> None:
    """Each has a line, after the lines about SGLang; the last line is the verdict."""
    code, out, err = runs["few"]
    lines = out.splitlines()
    assert (0, "") == (code, err)
    assert "names that kvtide reads of SGLang: all there" in lines
    assert "MHA, page 1: exact" in lines
    assert "keys alone: exact; SGLang: no copy (CUDA too): the class has no copy" in lines
    assert "MHATokenToKOnlyPool: exact in 1 round trip" in lines
    assert "UnifiedMambaPool: no pool of it can be built here" in lines
    ordinary = "ordinary servers need KVTIDE_SGLANG_COLOCATED=1"
    assert f"SGLang {version('sglang')}: ok for decode servers; {ordinary}" == lines[-1]


def test_the_verdict_names_the_servers_that_the_settings_cover(runs: Runs) -> None:
    """An ordinary server does nothing through kvtide unless it is told to."""
    code, out, _ = runs["colocated"]
    assert 0 == code
    last = f"SGLang {version('sglang')}: ok for decode servers and for ordinary servers"
    assert last == out.splitlines()[-1]


def test_a_wrong_describer_is_found(runs: Runs) -> None:
    """The forgotten bytes are named, and the exit code is 1."""
    code, found = report(runs, "wrong describer")
    assert (1, 1) == (code, found["failed"])
    wrong = {trip["name"]: trip["kvtide"] for trip in found["round_trips"]}
    assert {"verdict": "wrong", "detail": "v0, v1, v2"} == wrong["MHA, page 1"]
    verdicts = {kind["name"]: kind["verdict"] for kind in found["classes"]}
    assert ("wrong", "exact") == (verdicts["MHATokenToKVPool"], verdicts["MHATokenToKOnlyPool"])
    code, out, _ = runs["wrong describer, in words"]
    assert 1 == code
    assert "MHA, page 1: FAILED: wrong: v0, v1, v2" in out.splitlines()


def test_an_unknown_class_is_found(runs: Runs) -> None:
    """The report names the class, and the case that can't be moved any more."""
    code, found = report(runs, "unknown class")
    assert (1, 2) == (code, found["failed"])
    assert ["MHATokenToKOnlyPool"] == [
        kind["name"] for kind in found["classes"] if kind["verdict"] == "unknown"
    ]


def test_attributes_that_sglang_no_longer_has_are_found(runs: Runs) -> None:
    """They are named; with an untested version kvtide isn't active either."""
    names = ["ModelRunner.renamed", "class OncePool"]
    code, found = report(runs, "moved reads")
    assert (1, 1, names, True) == (code, found["failed"], found["gone"], found["active"])
    code, found = report(runs, "moved reads of another version")
    assert (1, 1, names, False) == (code, found["failed"], found["gone"], found["active"])
    code, out, _ = runs["moved reads of another version, in words"]
    assert 1 == code
    assert (
        "names that kvtide reads of SGLang: FAILED: gone: ModelRunner.renamed, class OncePool; so "
        "all pools are left to SGLang"
    ) in out.splitlines()


def test_hooks_that_are_missing_are_found(runs: Runs) -> None:
    """The report names SGLang's functions."""
    code, found = report(runs, "hooks missing")
    assert (1, False, 1) == (code, found["active"], found["failed"])
    assert "get_new_batch_prefill" in found["hooks"][-1]["reason"]


def test_a_plugin_that_is_turned_off_is_not_ok(runs: Runs) -> None:
    """The setting is named; hooks that nobody wants aren't missed."""
    code, found = report(runs, "off")
    assert (1, False, False, 1) == (code, found["active"], found["ok"], found["failed"])
    assert "off" == found["settings"]["mode"]
    (finding,) = found["hooks"]
    assert "KVTIDE_SGLANG=0 turns it off; to turn it on, unset KVTIDE_SGLANG" == finding["reason"]
    code, out, _ = runs["off, in words"]
    assert 1 == code
    assert re.fullmatch(r"SGLang \S+: 1 of \d+ checks failed", out.splitlines()[-1])


def test_a_plugin_that_is_not_registered_is_not_ok(runs: Runs) -> None:
    """This happens where kvtide's source is on the path and kvtide isn't installed."""
    code, out, _ = runs["not registered"]
    lines = out.splitlines()
    assert 1 == code
    assert any("SGLang loads kvtide's plugin: FAILED: no package in" in line for line in lines)
    assert re.fullmatch(r"SGLang \S+: 1 of \d+ checks failed", lines[-1])


def test_unknown_variables_are_named(runs: Runs) -> None:
    """The report suggests a known name where one resembles the unknown one."""
    code, found = report(runs, "a misspelt variable")
    said = "KVTIDE_HOST_MEMROY (did you mean KVTIDE_HOST_MEMORY?)"
    assert (1, 1, [said]) == (code, found["failed"], found["unknown_variables"])
    code, out, _ = runs["a misspelt variable, in words"]
    line = f"variables of kvtide: FAILED: kvtide knows no variable {said}; so it has no effect"
    assert (1, True) == (code, line in out.splitlines())


def test_what_is_below_host_memory_is_named(runs: Runs) -> None:
    """The report says how much fits, and how long a step waits."""
    code, found = report(runs, "a disk")
    settings = found["settings"]
    assert (0, "/tmp/kv", 3 << 20, None) == (
        code,
        *(settings[name] for name in ("disk_dir", "disk_memory_bytes", "mooncake")),
    )
    assert [("the disk below host memory", True)] == [
        (finding["name"], finding["ok"]) for finding in found["below"]
    ]
    code, out, _ = runs["a disk, in words"]
    assert 0 == code
    assert "the disk below host memory: ok" in out.splitlines()
    assert re.search(
        "^KVTIDE_DISK_MEMORY: +3.0 MiB for all ranks on this host, with .* free", out, re.M
    )
    assert re.search("^KVTIDE_MOONCAKE: +not set", out, re.M)
    assert re.search("^KVTIDE_TIER_SECONDS: +a step waits 5 s at most", out, re.M)
    _, found = report(runs, "whole")
    assert [] == found["below"]


def test_a_tier_that_cannot_be_used_is_not_ok(runs: Runs) -> None:
    """Each is named, with the reason and what follows."""
    code, found = report(runs, "nothing that can be used")
    disk, store = found["below"]
    assert (1, 2) == (code, found["failed"])
    assert "/dev/null isn't a folder" == disk["reason"]
    assert "mooncake tier: " in store["reason"]
    assert "what has no room in host memory doesn't go there" == store["consequence"]


def test_a_size_without_its_unit_is_one_line(runs: Runs) -> None:
    """24 bytes were surely not meant."""
    code, out, err = runs["no unit"]
    assert (2, "", 1) == (code, out, len(err.splitlines()))
    assert "KVTIDE_HOST_MEMORY: '24' has no unit, so it is 24 bytes" in err


def test_a_plugin_that_sglang_was_told_to_leave_out_is_found(runs: Runs) -> None:
    """The report names the variable."""
    code, found = report(runs, "left out")
    assert (1, False) == (code, found["active"])
    assert found["hooks"][0]["reason"].startswith("SGLANG_PLUGINS=this,that leaves it out")


def test_an_invalid_setting_is_one_line(runs: Runs) -> None:
    """The line is the error with which the server would end."""
    code, out, err = runs["an invalid setting"]
    assert (2, "", 1) == (code, out, len(err.splitlines()))
    assert "KVTIDE_SGLANG: 'yes' is none of 0, 1, strict" in err


def test_a_pool_that_cannot_be_built_here_is_no_failure(runs: Runs) -> None:
    """The report has the first line of the error."""
    code, found = report(runs, "unbuilt")
    assert 0 == code
    assert "RuntimeError: no kernel for this machine" == found["round_trips"][0]["unbuilt"]
    assert {"untried"} == {
        kind["verdict"] for kind in found["classes"] if kind["name"] == "MHATokenToKVPool"
    }


def test_cases_that_cannot_be_imported_are_a_failure(runs: Runs) -> None:
    """The classes are still listed, since they come from the source."""
    code, found = report(runs, "moved")
    assert 1 == code
    assert "no module of that name" in found["lost"]
    assert len(known_classes()) == len(found["classes"])


def test_the_doctor_does_not_import_the_reference_engine(runs: Runs) -> None:
    """SGLang's environment lacks the reference engine's packages."""
    assert "[]" == runs["modules"][1]


def test_sglang_that_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    """A machine may lack a package that SGLang needs; orjson is imported early."""
    (tmp_path / "orjson.py").write_text("""raise ModuleNotFoundError("No module named 'orjson'")""")
    kept = {name: value for name, value in os.environ.items() if name != "SGLANG_USE_CPU_ENGINE"}
    kept["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-W", "ignore", "-c", "import sys; from kvtide.cli import start; "
               "sys.argv = ['kvtide', 'doctor', '--sglang']; sys.exit(start())"]  # fmt: skip
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, env=kept
    )
    assert (2, "") == (result.returncode, result.stdout)
    said = result.stderr.splitlines()[-1]
    reason = "ModuleNotFoundError: No module named 'orjson'"
    assert f"SGLang is installed here, but can't be imported: {reason}" in said
