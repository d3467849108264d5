"""`kvtide run --mooncake` with the real engine, over an imitation of the store."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from kvtide.cli.main import main
from support.results import read_report, read_rows
from tier.fake_mooncake import FakeStore

IDS = [f"request-{number}" for number in range(8)]
# Each request takes 2 to 5 pages of 8 KiB, and a block of 64 KiB in the arena, which has just one.
RUN = ["--model", "tiny-random", "--max-new-tokens", "24", "--kv-memory", "64KiB"]
RUN += ["--host-memory", "64KiB", "--mooncake", "127.0.0.1:50051"]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    """The store that the runs join."""
    store = FakeStore()
    monkeypatch.setattr("kvtide.tier.mooncake_connect.check_mooncake", lambda settings: None)
    monkeypatch.setattr("kvtide.tier.mooncake.connect", lambda settings: store.open_client)
    return store


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Eight prompts of 10 to 40 bytes. Each byte is a token; the chat template adds more."""
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": name, "prompt": "ab" * (5 + 2 * i)} for i, name in enumerate(IDS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def assert_only_beginnings_are_left(store: FakeStore) -> None:
    """What prompts begin with stays for others; nothing that a request alone had does."""
    assert all(b'"key":"shared/' in content[:4096] for content in store.objects.values())


def test_answers_are_those_of_a_run_with_room_for_all(
    store: FakeStore, prompts: str, tmp_path: Path
) -> None:
    """What host memory has no room for goes to the store and back; nothing is computed again."""
    report = tmp_path / "report.json"
    assert main(["run", prompts, *RUN, "--verify", "--report", str(report)]) == 0
    found = read_report(report)
    assert (True, 0) == (found["verified"], found["recomputed_tokens"])
    assert 0 < found["restored_bytes"] <= found["offloaded_bytes"]
    assert_only_beginnings_are_left(store)


def test_a_run_that_was_ended_goes_on_from_the_store(
    store: FakeStore,
    prompts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run says where its KV is, and `--resume` computes no token twice."""
    out, report = tmp_path / "out.jsonl", tmp_path / "report.json"
    files = ["--out", str(out), "--report", str(report)]
    assert main(["run", prompts, *RUN, "--out", str(tmp_path / "expected")]) == 0
    with monkeypatch.context() as patch:
        steps = iter(range(40))

        def end_at_the_last(answers: object) -> None:
            if next(steps, None) is None:
                signal.raise_signal(signal.SIGTERM)

        patch.setattr("kvtide.cli.answers.file.AnswerFile.sync_if_due", end_at_the_last)
        assert main(["run", prompts, *RUN, *files]) == 143
    said = capsys.readouterr().err
    assert "requests is in the store of 127.0.0.1:50051" in said
    first = read_report(report)
    assert 0 < len(store.objects)
    assert main(["run", prompts, *RUN, *files, "--resume"]) == 0
    second = read_report(report)
    expected = {row["id"]: row["token_ids"] for row in read_rows(tmp_path / "expected")}
    assert expected == {row["id"]: row["token_ids"] for row in read_rows(out)}
    assert sum(map(len, expected.values())) == first["new_tokens"] + second["new_tokens"]
    assert_only_beginnings_are_left(store)
