"""`kvtide run --mooncake` with a real store, which is there, is killed, or was never there."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from cluster import Cluster, free_port
from commands import begin_until_stored, run, write_prompts

# The pool has room for two requests that are nearly answered, and host memory for one of them.
ANSWER = ["run", "prompts.jsonl", "--model", "tiny-random", "--max-new-tokens", "200"]
ANSWER += ["--kv-memory", "256KiB", "--host-memory", "128KiB"]
FILES = ["--out", "answers.jsonl", "--report", "report.json"]
PROMPTS = 12
"""Each begins with one block, which stays in the store for others."""


def report_in(folder: Path) -> dict[str, Any]:
    """The report of the last run."""
    report: dict[str, Any] = json.loads((folder / "report.json").read_bytes())
    return report


def answers_in(path: Path) -> dict[str, list[int]]:
    """The tokens of each answer in a file."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return {row["id"]: row["token_ids"] for row in rows if "id" in row}


def test_kv_comes_back_from_the_store(cluster: Cluster, tmp_path: Path) -> None:
    """Nothing is computed again, answers are exact, and only what prompts begin with is left."""
    write_prompts(tmp_path, PROMPTS)
    done = run(tmp_path, *ANSWER, *FILES, "--mooncake", cluster.address, "--verify")
    assert 0 == done.returncode, done.stderr
    report = report_in(tmp_path)
    assert (True, 0) == (report["verified"], report["recomputed_tokens"]), report
    assert 0 < report["tiers"]["mooncake"]["up_bytes"]
    assert cluster.object_count() <= PROMPTS


def test_a_run_goes_on_from_the_store_after_sigkill(cluster: Cluster, tmp_path: Path) -> None:
    """The killed run has left what was in the store; the next one begins there."""
    write_prompts(tmp_path, PROMPTS)
    command = [*ANSWER, *FILES, "--mooncake", cluster.address, "--resume"]
    with begin_until_stored(tmp_path, *command) as process:
        process.kill()
    part = tmp_path / "answers.jsonl.part"
    before = answers_in(part) if part.exists() else {}
    done = run(tmp_path, *command)
    assert 0 == done.returncode, done.stderr
    found = answers_in(tmp_path / "answers.jsonl")
    assert report_in(tmp_path)["new_tokens"] < sum(
        len(found[name]) for name in found.keys() - before.keys()
    )
    roomy = tmp_path / "roomy"
    roomy.mkdir()
    write_prompts(roomy, PROMPTS)
    assert 0 == run(roomy, *ANSWER[:6], *FILES).returncode
    assert answers_in(roomy / "answers.jsonl") == found


def test_a_store_that_dies_costs_no_answer(cluster: Cluster, tmp_path: Path) -> None:
    """What it had is computed again, and the answers are exact."""
    write_prompts(tmp_path, PROMPTS)
    command = [*ANSWER, *FILES, "--mooncake", cluster.address, "--verify"]
    with begin_until_stored(tmp_path, *command) as process:
        for name in ("node0", "node1", "master"):
            cluster.kill(name)
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate()
    try:
        assert 0 == process.returncode, said
        report = report_in(tmp_path)
        assert report["verified"]
        assert 0 < report["recomputed_tokens"]
    finally:
        cluster.start_master()
        for number in range(2):
            cluster.start_node(number)
        cluster.wait_for_nodes(2)


def test_a_store_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    """The run ends before it loads a model, and says what to do."""
    write_prompts(tmp_path)
    done = run(tmp_path, *ANSWER, "--mooncake", f"127.0.0.1:{free_port()}")
    assert 2 == done.returncode
    (line,) = done.stderr.splitlines()
    assert "start the master first" in line
