"""Weights are known by what is in their files, and not at all if these may have changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest

import kvtide.plugin.weights
from kvtide.plugin.weights import WeightsUnknown, digest_of, folder_of

HOUR_AGO = time.time() - 3600
WEIGHTS = (".safetensors", ".bin")


def age(path: Path) -> None:
    """Sets a file's times to the same moment, an hour ago."""
    os.utime(path, (HOUR_AGO, HOUR_AGO))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with a large file and two small ones, changed an hour ago."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "model.safetensors").write_bytes(bytes(3 << 20))
    (made / "config.json").write_text('{"a": 1}')
    (made / "model.safetensors.index.json").write_text("{}")
    for path in made.iterdir():
        age(path)
    return made


def change_config(folder: Path) -> None:
    """Changes a small file, and neither its length nor its time."""
    (folder / "config.json").write_text('{"a": 2}')
    age(folder / "config.json")


def change_at(folder: Path, place: int) -> None:
    """Changes a byte of the large file, and neither its length nor its time."""
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(place)
        file.write(b"x")
    age(folder / "model.safetensors")


def change_start(folder: Path) -> None:
    """Changes the first byte of the large file."""
    change_at(folder, 0)


def change_end(folder: Path) -> None:
    """Changes the last byte of the large file."""
    change_at(folder, (3 << 20) - 1)


def touch(folder: Path) -> None:
    """Changes a time alone: what was written may be between the samples."""
    os.utime(folder / "model.safetensors", (HOUR_AGO + 1, HOUR_AGO + 1))


def add(folder: Path) -> None:
    """Adds a file."""
    (folder / "more.bin").write_bytes(b"")
    age(folder / "more.bin")


def rename(folder: Path) -> None:
    """Gives a file another name."""
    (folder / "config.json").rename(folder / "other.json")


@pytest.mark.parametrize("change", [change_config, change_start, change_end, touch, add, rename])
def test_samples_tell_other_files(change: Callable[[Path], None], folder: Path) -> None:
    """The digest has every file's name, length, time and samples of its contents."""
    before = digest_of([folder], inf, by_samples=True)
    assert before == digest_of([folder], inf, by_samples=True)
    change(folder)
    assert before != digest_of([folder], inf, by_samples=True)


@pytest.mark.parametrize("piece_bytes", [1 << 20, 64 << 20])
def test_all_contents_tell_other_weights_wherever_they_differ(
    piece_bytes: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that have changed their places are other contents, too."""
    monkeypatch.setattr(kvtide.plugin.weights, "_PIECE_BYTES", piece_bytes)
    found = [digest_of([folder], inf, suffixes=WEIGHTS)]
    for place in ((1 << 20) - 1, 1 << 20, (2 << 20) + 77):
        change_at(folder, place)
        found.append(digest_of([folder], inf, suffixes=WEIGHTS))
    content = (folder / "model.safetensors").read_bytes()
    first, second = content[: 1 << 20], content[1 << 20 : 2 << 20]
    (folder / "model.safetensors").write_bytes(second + first + content[2 << 20 :])
    found.append(digest_of([folder], inf, suffixes=WEIGHTS))

    assert len(found) == len({*found})


def test_what_is_no_weights_and_the_time_count_for_nothing_where_contents_do(folder: Path) -> None:
    """A copy elsewhere is the same; so is one with other notes."""
    before = digest_of([folder], inf, suffixes=WEIGHTS)
    change_config(folder)
    touch(folder)

    assert before == digest_of([folder], inf, suffixes=WEIGHTS)


def test_weights_in_a_folder_of_the_folder_count(folder: Path) -> None:
    """Some loaders read these."""
    before = digest_of([folder], inf, suffixes=WEIGHTS)
    (folder / "original").mkdir()
    (folder / "original" / "more.bin").write_bytes(b"more")

    assert before != digest_of([folder], inf, suffixes=WEIGHTS)


@pytest.mark.parametrize("by_samples", [False, True])
def test_files_that_changed_since_the_start_tell_nothing(folder: Path, by_samples: bool) -> None:
    """The server may have loaded what was there before: a copy may keep the old times."""
    assert digest_of([folder], time.time() + 60, by_samples=by_samples)
    with pytest.raises(WeightsUnknown, match="was changed after this server was started"):
        digest_of([folder], HOUR_AGO + 60, by_samples=by_samples)


def test_what_isnt_there_tells_nothing(tmp_path: Path) -> None:
    """Neither does a folder without weights."""
    with pytest.raises(WeightsUnknown, match="No such file"):
        digest_of([tmp_path / "none"], inf)
    (tmp_path / "notes.txt").write_text("no weights")
    with pytest.raises(WeightsUnknown, match="no files of weights"):
        digest_of([tmp_path], inf, suffixes=WEIGHTS)


def test_a_file_of_the_hubs_cache_is_known_by_its_hash(tmp_path: Path) -> None:
    """Its name there is a hash of all its contents, and its time is of no account."""
    digests = set()
    for number in range(2):
        blobs, folder = tmp_path / f"{number}/blobs", tmp_path / f"{number}/snapshots/main"
        blobs.mkdir(parents=True)
        folder.mkdir(parents=True)
        (blobs / ("ab" * 32)).write_bytes(b"weights")
        (folder / "model.safetensors").symlink_to(blobs / ("ab" * 32))
        os.utime(blobs / ("ab" * 32), (number, number))
        digests.add(digest_of([folder], HOUR_AGO))
    assert len(digests) == 1


def test_a_model_of_the_hub_is_where_the_engine_has_put_it(tmp_path: Path) -> None:
    """A branch is looked up there, and a path is taken as it is."""
    cache = tmp_path / "models--org--name"
    for revision in ("a" * 40, "b" * 40):
        (cache / "snapshots" / revision).mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)

    assert ["a" * 40, "b" * 40] == [
        folder_of("org/name", revision, str(tmp_path)).name for revision in (None, "b" * 40)
    ]
    assert tmp_path == folder_of(str(tmp_path), None, None)
    with pytest.raises(WeightsUnknown, match="org/other isn't a folder"):
        folder_of("org/other", None, str(tmp_path))
