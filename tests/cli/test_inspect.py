"""`kvtide inspect`: what it prints, what it removes, and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvtide.cli.main import main
from kvtide.seal import Seal
from kvtide.tier import DiskTier
from kvtide.tier.names import name_of

SIZE = 4096


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """A tier with two snapshots without bytes, one of which is damaged, and a foreign file."""
    with closing(DiskTier(tmp_path / "kv", limit_bytes=1 << 20)) as tier:
        for key in ("a\n\33[31m", "b"):
            tier.put(key, Seal('{"groups":[]}', "", 3, (), (), 64, ()), [])
        damaged = tmp_path / "kv" / name_of("b")[:2] / f"{name_of('b')}.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
        (tmp_path / "kv" / "notes.txt").write_text("mine")
        yield tier


def test_lists_and_adds_up(
    tier: DiskTier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each file and each state. A hostile key can't move the cursor."""
    assert 1 == main(["inspect", str(tmp_path / "kv")])
    lines = capsys.readouterr().out.splitlines()
    (whole,) = (line for line in lines if line.startswith("whole: ") and "/" in line)
    assert whole.endswith(r": 4.0 KiB: 3 tokens, 'a\n\x1b[31m'")
    assert ["whole: 1 file, 4.0 KiB", "damaged: 1 file, 4.0 KiB", "orphan: 0 files, 0 B",
            "foreign: 1 file, 4 B", "in use by a process: yes"] == lines[-5:]  # fmt: skip


def test_json_has_the_same(
    tier: DiskTier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One object, with a reason for each file that isn't whole."""
    assert 1 == main(["inspect", str(tmp_path / "kv"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert {"folder", "in_use", "files", "totals"} == set(report)
    assert {"files": 1, "bytes": SIZE} == report["totals"]["damaged"]
    assert {"a\n\33[31m", None} == {file["key"] for file in report["files"]}
    assert [True, True, False] == sorted(
        (bool(file["reason"]) for file in report["files"]), reverse=True
    )


def test_removes_on_request_alone(
    tier: DiskTier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each option removes its files; not while a process uses the folder."""
    folder = tmp_path / "kv"
    assert 2 == main(["inspect", str(folder), "--remove-damaged"])
    assert "another process uses the folder" in capsys.readouterr().err
    tier.close()
    assert 0 == main(["inspect", str(folder), "--remove-damaged"])
    assert "removed: 1 file, 4.0 KiB" in capsys.readouterr().out
    assert (folder / "notes.txt").exists()
    assert 0 == main(["inspect", str(folder), "--remove-foreign", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [["notes.txt"], ["a\n\33[31m"]] == [
        [file[key] for file in report["files"] if file["removed"] is is_removed]
        for key, is_removed in (("path", True), ("key", False))
    ]
    assert not (folder / "notes.txt").exists()


def test_folder_of_others_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is listed, and nothing removed."""
    (tmp_path / "letter").write_text("dear")
    assert 2 == main(["inspect", str(tmp_path), "--remove-foreign"])
    assert "is no folder of a disk tier" in capsys.readouterr().err
    assert (tmp_path / "letter").exists()
    assert not (tmp_path / "kvtide.lock").exists()


def test_works_without_torch(tier: DiskTier, tmp_path: Path) -> None:
    """A machine that only keeps the files needn't have torch."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvtide.cli.main import main; sys.exit(main(['inspect', sys.argv[1]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "kv")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (1, "") == (done.returncode, done.stderr)
