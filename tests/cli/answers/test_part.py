from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvtide.cli.answers.part import PartFile
from kvtide.errors import UsageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the part is."""
    return tmp_path / "out.jsonl.part"


def test_lines_are_in_the_file_at_once(path: Path) -> None:
    """A process that is killed takes nothing with it that it has appended."""
    with closing(PartFile(path)) as part:
        part.append(b"one\n")
        part.append(b"two\n")
        assert b"one\ntwo\n" == path.read_bytes()


def test_half_a_line_is_cut_off(path: Path) -> None:
    """What a killed process left of a line doesn't become the beginning of the next."""
    path.write_bytes(b"one\ntw")
    with closing(PartFile(path)) as part:
        part.cut_half_line()
        part.append(b"three\n")
    assert b"one\nthree\n" == path.read_bytes()


def test_full_disk_leaves_whole_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk takes half a line and no more, that half is removed again."""
    write = os.write
    room = iter([5, 0])

    def write_what_fits(descriptor: int, data: memoryview) -> int:
        count = next(room)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:count])

    with closing(PartFile(path)) as part:
        part.append(b"one\n")
        monkeypatch.setattr("os.write", write_what_fits)
        with pytest.raises(OSError, match="No space left on device"):
            part.append(b"a long line\n")
        monkeypatch.undo()
        assert b"one\n" == path.read_bytes()
        part.append(b"two\n")
    assert b"one\ntwo\n" == path.read_bytes()


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of the file at each time that it was brought to the disk."""
    sizes: list[int] = []
    monkeypatch.setattr("os.fdatasync", lambda file: sizes.append(os.fstat(file).st_size))
    return sizes


def test_lines_reach_the_disk_once_a_second(path: Path, syncs: list[int]) -> None:
    """Not for each line, which would be slow; not only at the end, when the power may be gone."""
    times = iter([0.0, 0.1, 0.5, 1.1, 1.1, 1.2, 2.2, 2.2, 2.3, 9.9])
    with closing(PartFile(path, clock=times.__next__)) as part:
        for _ in range(5):
            part.append(b"x\n")
        assert [6, 10] == syncs
        part.append(b"x\n")
        part.sync()
        assert [6, 10, 12] == syncs


def test_the_last_line_reaches_the_disk_too(path: Path, syncs: list[int]) -> None:
    """However long the next answer takes; nothing is brought there twice."""
    times = iter([0.0, 0.5, 0.9, 1.0, 1.0, 9.0])
    with closing(PartFile(path, clock=times.__next__)) as part:
        part.append(b"x\n")
        part.sync_if_due()
        assert [] == syncs
        part.sync_if_due()
        assert [2] == syncs
        part.sync_if_due()
        assert [2] == syncs


def test_a_second_process_is_told_who_is_first(path: Path) -> None:
    """The second process changes nothing."""
    with closing(PartFile(path)) as part:
        part.append(b"one\n")
        code = (
            "import sys, pathlib; from kvtide.cli.answers.part import PartFile; "
            "PartFile(pathlib.Path(sys.argv[1]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
        )
    assert 1 == done.returncode
    assert f"UsageError: process {os.getpid()} is writing its answers to {path}" in done.stderr
    assert b"one\n" == path.read_bytes()
    PartFile(path).close()  # free again


def test_a_part_that_its_run_has_removed_is_not_written_to(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run opens the part; the first ends and removes it; then the second locks it."""
    first = PartFile(path)
    lock = fcntl.flock

    def end_first_then_lock(descriptor: int, how: int) -> None:
        monkeypatch.undo()
        first.remove()
        first.close()
        lock(descriptor, how)

    monkeypatch.setattr("fcntl.flock", end_first_then_lock)
    with closing(PartFile(path)) as second:
        second.append(b"kept\n")
    assert b"kept\n" == path.read_bytes()


def test_a_planted_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    """A link that somebody put there doesn't have answers appended to another file."""
    victim = tmp_path / "victim"
    victim.write_text("precious", encoding="utf-8")
    path.symlink_to(victim)
    with pytest.raises(UsageError, match=r"cannot open .*out\.jsonl\.part for answers"):
        PartFile(path)
    assert "precious" == victim.read_text(encoding="utf-8")


def test_a_pipe_is_no_part(path: Path) -> None:
    """Answers couldn't be read again from there."""
    os.mkfifo(path)
    with pytest.raises(UsageError, match="isn't a file, so answers can't be kept there"):
        PartFile(path)
