from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from kvtide.cli.files import check_writable, write_text
from kvtide.cli.report import write_report
from kvtide.errors import KvtideError, UsageError


def test_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    """Neither the rest of a longer old file nor a temporary file remains."""
    path = tmp_path / "report.json"
    path.write_text("x" * 1000, encoding="utf-8")
    path.chmod(0o640)
    write_report(path, {"requests": 1})
    assert {"requests": 1} == json.loads(path.read_text(encoding="utf-8"))
    assert 0o640 == stat.S_IMODE(path.stat().st_mode)
    assert [path] == list(tmp_path.iterdir())


def test_link_stays_a_link(tmp_path: Path) -> None:
    """The file that a symbolic link points to is replaced, and the link stays."""
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    write_report(link, {})
    assert link.is_symlink()
    assert "{}\n" == target.read_text(encoding="utf-8")


def test_planted_draft_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone who guesses the temporary file's name can't make kvtide overwrite another file."""
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
    """The reader of a named pipe gets the lines."""
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
    """If the folder vanishes during the run, the error is one line."""
    path = tmp_path / "gone" / "out.jsonl"
    with pytest.raises(KvtideError, match=r"cannot write .*gone/out\.jsonl: No such file"):
        write_text(path, "new")


def test_full_disk_leaves_the_old_file_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old file stays whole, and no temporary file remains."""
    path = tmp_path / "out.jsonl"
    path.write_text("old", encoding="utf-8")

    def fail(_file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(KvtideError, match=r"cannot write .*out\.jsonl: No space left on device"):
        write_text(path, "new")
    assert "old" == path.read_text(encoding="utf-8")
    assert [path] == list(tmp_path.iterdir())


def test_files_that_cannot_be_written_are_refused_before_the_run(tmp_path: Path) -> None:
    """The error names the option, for a folder and for a file in a missing folder."""
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
    """A file is replaced, so its folder must allow it; a device is written to directly."""
    monkeypatch.setattr("os.access", lambda _path, _mode: False)
    for path, target in ((tmp_path / "r.json", str(tmp_path)), (Path(os.devnull), os.devnull)):
        with pytest.raises(UsageError) as error:
            check_writable(path, option="--out")
        assert f"--out: no permission to write to {target}" == str(error.value)
