from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from kvtide.cli.results import (
    check_writable,
    make_report,
    summarize,
    write_answers,
    write_report,
)
from kvtide.errors import KvtideError, UsageError
from support.fake_serving import FOUND, make_request, make_stats

ANSWERED = {"output_ids": [5, 6], "text": "hé\n", "finish_reason": "stop", "retractions": 2}


def test_answer_line_has_these_keys_in_this_order(tmp_path: Path) -> None:
    """A line is what other programs read: keys, their order and their values are fixed."""
    count = write_answers(tmp_path / "out.jsonl", [make_request("b", **ANSWERED)])
    assert count == 1
    assert (
        '{"id": "b", "text": "hé\\n", "token_ids": [5, 6], "prompt_tokens": 3, "new_tokens": 2, '
        '"finish_reason": "stop", "retractions": 2, "error": null}\n'
    ) == (tmp_path / "out.jsonl").read_text(encoding="utf-8")


def test_only_what_is_answered_or_failed_is_written_in_order(tmp_path: Path) -> None:
    """Requests that never finished or were given up have no line; a failed one has."""
    requests = [
        make_request("z", finish_reason="length"),
        make_request("unfinished"),
        make_request("y", finish_reason="error", error="too large"),
        make_request("given up", finish_reason="abort"),
        make_request("a", finish_reason="stop"),
    ]
    write_answers(tmp_path / "out.jsonl", requests)
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [("z", None), ("y", "too large"), ("a", None)] == [
        (row["id"], row["error"]) for row in map(json.loads, lines)
    ]


def test_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    """An older, longer file leaves nothing behind, nor does the draft."""
    path = tmp_path / "report.json"
    path.write_text("x" * 1000, encoding="utf-8")
    path.chmod(0o640)
    write_report(path, {"requests": 1})
    assert {"requests": 1} == json.loads(path.read_text(encoding="utf-8"))
    assert 0o640 == stat.S_IMODE(path.stat().st_mode)
    assert [path] == list(tmp_path.iterdir())


def test_link_stays_a_link(tmp_path: Path) -> None:
    """What a symbolic link points to is replaced, not the link."""
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    write_report(link, {})
    assert link.is_symlink()
    assert "{}\n" == target.read_text(encoding="utf-8")


def test_planted_draft_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write to the folder, and guesses the draft's name, can't have it overwrite."""
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
    write_report(tmp_path / "r.json", {})
    victim, planted = tmp_path / "victim", tmp_path / ".kvtide-0000000000000000.part"
    victim.write_text("precious", encoding="utf-8")
    planted.symlink_to(victim)
    with pytest.raises(KvtideError, match="cannot write"):
        write_report(tmp_path / "r.json", {"requests": 1})
    assert "precious" == victim.read_text(encoding="utf-8")
    assert planted.is_symlink()


def test_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """Who reads a named pipe gets the lines."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_report(path, {})
        assert b"{}\n" == os.read(reader, 100)
    finally:
        os.close(reader)
    assert path.is_fifo()


def test_failure_to_write_names_file_and_reason(tmp_path: Path) -> None:
    """A folder that went away during the run is an error in one line."""
    path = tmp_path / "gone" / "out.jsonl"
    with pytest.raises(KvtideError, match=r"cannot write .*gone/out\.jsonl: No such file"):
        write_answers(path, [])


def test_full_disk_leaves_the_old_file_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there stays whole, and nothing else is left lying about."""
    path = tmp_path / "out.jsonl"
    path.write_text("old", encoding="utf-8")

    def fail(_file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(KvtideError, match=r"cannot write .*out\.jsonl: No space left on device"):
        write_answers(path, [])
    assert "old" == path.read_text(encoding="utf-8")
    assert [path] == list(tmp_path.iterdir())


def test_files_that_cannot_be_written_are_refused_before_the_run(tmp_path: Path) -> None:
    """A folder, and a file in a folder that isn't there, by the option's name."""
    with pytest.raises(UsageError, match=r"--out: .* is a folder"):
        check_writable(tmp_path, option="--out")
    with pytest.raises(UsageError, match=r"--report: there is no folder .*nowhere for r\.json"):
        check_writable(tmp_path / "nowhere" / "r.json", option="--report")
    with pytest.raises(UsageError, match=r"--out: cannot write .*: File name too long"):
        check_writable(tmp_path / ("x" * 300) / "y", option="--out")
    check_writable(tmp_path / "new.json", option="--out")
    check_writable(Path(os.devnull), option="--out")


def test_permission_is_needed_for_the_folder_or_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is replaced, which its folder must allow; a device is written to itself."""
    monkeypatch.setattr("os.access", lambda _path, _mode: False)
    for path, target in ((tmp_path / "r.json", str(tmp_path)), (Path(os.devnull), os.devnull)):
        with pytest.raises(UsageError) as error:
            check_writable(path, option="--out")
        assert f"--out: no permission to write to {target}" == str(error.value)


def test_report_has_exactly_these_keys() -> None:
    """The keys are an interface; each comes from the count of the same name."""
    stats = make_stats(
        prompt_tokens=10,
        new_tokens=6,
        retractions=3,
        resumes=2,
        offloaded_bytes=4096,
        restored_bytes=2048,
        recomputed_tokens=5,
        pool_tokens=64,
        peak_pool_tokens=48,
        peak_host_bytes=8192,
        offload_seconds=0.25,
        restore_seconds=0.125,
    )
    requests = [make_request("a", **ANSWERED), make_request("b", error="too large")]
    expected = {
        "requests": 2,
        "failed": 1,
        "prompt_tokens": 10,
        "new_tokens": 6,
        "retractions": 3,
        "resumes": 2,
        "offloaded_bytes": 4096,
        "restored_bytes": 2048,
        "recomputed_tokens": 5,
        "pool_tokens": 64,
        "peak_pool_tokens": 48,
        "peak_host_bytes": 8192,
        "seconds": 1.5,
        "tokens_per_second": 4.0,
        "offload_seconds": 0.25,
        "restore_seconds": 0.125,
        "exact": True,
        "exact_rows": "2 to 4",
        "selfcheck_seconds": 0.25,
        "verified": None,
    }
    report = make_report(requests, stats, seconds=1.5, exact=True, check=FOUND, verified=None)
    assert expected == report
    assert list(expected) == list(report)


def test_table_says_what_was_recomputed() -> None:
    """The tokens are counted, and how many requests are no longer exact for it."""
    requests = [make_request("a", exact=False), make_request("b")]
    stats = make_stats(recomputed_tokens=7)
    report = make_report(requests, stats, seconds=1.0, exact=False, check=None, verified=None)
    rows = dict(summarize(requests, report))
    assert "the KV of 7 tokens" == rows["recomputed"]
    assert "false (1 request recomputed in different steps)" == rows["exact"]


def test_table_of_a_fast_run_says_so() -> None:
    """`--fast` is the reason when nothing was recomputed."""
    report = make_report([], make_stats(), seconds=0.0, exact=False, check=None, verified=None)
    rows = dict(summarize([], report))
    assert "false (--fast)" == rows["exact"]
    assert "recomputed" not in rows
