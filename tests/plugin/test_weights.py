"""Weights are known by what is in their files, and not at all if these may have changed."""

from __future__ import annotations

import hashlib
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
WHOLE = b"weights"
SAMPLED = 3 << 20
"""The size of a file that is too large to be read whole where samples are enough."""


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


def grow(folder: Path) -> None:
    """Adds zeros to the large file, which has nothing else."""
    with (folder / "model.safetensors").open("ab") as file:
        file.write(bytes(1 << 20))
    age(folder / "model.safetensors")


def add(folder: Path) -> None:
    """Adds a file."""
    (folder / "more.bin").write_bytes(b"")
    age(folder / "more.bin")


def rename(folder: Path) -> None:
    """Gives a file another name."""
    (folder / "config.json").rename(folder / "other.json")


@pytest.mark.parametrize(
    "change", [change_config, change_start, change_end, touch, grow, add, rename]
)
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


@pytest.mark.parametrize("by_samples", [False, True])
def test_files_that_change_names_are_others(by_samples: bool, tmp_path: Path) -> None:
    """A name tells a loader what to do with a file. So it is in the hub's cache."""
    found = set()
    for name in ("one.bin", "other.bin"):
        (tmp_path / name).write_bytes(WHOLE)
        age(tmp_path / name)
        found.add(digest_of([tmp_path / name], inf, by_samples=by_samples))
        link = cached(tmp_path / name[:3], large_name)
        found.add(digest_of([link.rename(link.parent / name)], inf, by_samples=by_samples))

    assert 4 == len(found)


def test_files_that_move_to_the_next_path_are_others(tmp_path: Path) -> None:
    """So an adapter's file isn't taken for one of the model's."""
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    for file in (model / "1.bin", model / "2.bin", adapter / "3.bin"):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(WHOLE)
    found = [digest_of([model, adapter], inf)]
    (model / "2.bin").rename(adapter / "2.bin")
    found.append(digest_of([model, adapter], inf))

    assert found[0] != found[1]


@pytest.mark.parametrize("by_samples", [False, True])
def test_a_time_in_the_future_tells_nothing(by_samples: bool, folder: Path) -> None:
    """A clock was set back, and so nobody knows when the file was changed."""
    os.utime(folder / "config.json", (time.time() + 600, time.time() + 600))
    with pytest.raises(WeightsUnknown, match="was changed after this server was started"):
        digest_of([folder], time.time() + 60, by_samples=by_samples)


def test_a_folder_in_the_folder_is_left_out_where_all_files_count(folder: Path) -> None:
    """No server reads adapters or samples from there."""
    before = digest_of([folder], inf)
    (folder / "notes").mkdir()
    (folder / "notes" / "more.bin").write_bytes(WHOLE)

    assert before == digest_of([folder], inf)


def test_the_order_in_which_the_system_lists_files_decides_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another system has another order."""
    found = set()
    for listed in (sorted(folder.iterdir()), sorted(folder.iterdir(), reverse=True)):
        monkeypatch.setattr(Path, "iterdir", lambda _, listed=listed: iter(listed))
        found.add(digest_of([folder], inf))
        monkeypatch.undo()
    assert 1 == len(found)


def test_a_folder_may_have_none_of_the_files_if_the_caller_says_so(folder: Path) -> None:
    """A model needn't have code of its own."""
    none = digest_of([folder], inf, suffixes=[".py"], may_be_none=True)
    (folder / "modeling.py").write_text("")

    assert none != digest_of([folder], inf, suffixes=[".py"])


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


def large_name(contents: bytes) -> str:
    """The name of a large file in the hub's cache."""
    return hashlib.sha256(contents).hexdigest()


def small_name(contents: bytes) -> str:
    """The name of a small file in the hub's cache, as `git hash-object` gives it."""
    return hashlib.sha1(b"blob %d\0" % len(contents) + contents).hexdigest()


def cached(cache: Path, name_of: Callable[[bytes], str], contents: bytes = WHOLE) -> Path:
    """The link to a file that the hub's client has put into its cache."""
    blob, link = cache / "blobs" / name_of(contents), cache / "snapshots" / "main" / "model.bin"
    for path in (blob, link):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(contents)
    link.symlink_to(blob)
    return link


def test_gits_name_of_a_small_file() -> None:
    """The example is from git's own documentation of its objects."""
    assert "bd9dbf5aae1a3862dd1526723246b20206e5fc37" == small_name(b"what is up, doc?")


@pytest.mark.parametrize("name_of", [large_name, small_name])
@pytest.mark.parametrize("by_samples", [False, True])
def test_a_file_of_the_hubs_cache_is_known_by_its_hash(
    by_samples: bool, name_of: Callable[[bytes], str], tmp_path: Path
) -> None:
    """A copy is the same. It may have come while the server started, which loaded no other then."""
    digests = set()
    for number in range(2):
        link = cached(tmp_path / str(number), name_of)
        os.utime(link.resolve(), (number, number))
        digests.add(digest_of([link.parent], HOUR_AGO, by_samples=by_samples))
    assert len(digests) == 1
    assert digests != {digest_of([cached(tmp_path / "2", name_of, b"others")], inf)}


@pytest.mark.parametrize("name_of", [large_name, small_name])
@pytest.mark.parametrize("by_samples", [False, True])
@pytest.mark.parametrize("place", [0, SAMPLED // 2 + 1, SAMPLED - 1])
def test_a_file_of_the_hubs_cache_that_was_overwritten_is_known_by_its_contents(
    place: int, by_samples: bool, name_of: Callable[[bytes], str], tmp_path: Path
) -> None:
    """Who writes to its link changes the file, and not its name. Times may be set back."""
    contents = bytes(SAMPLED)
    link = cached(tmp_path, name_of, contents)
    before = digest_of([link.parent], inf, by_samples=by_samples)
    about = link.stat()
    link.write_bytes(contents[:place] + b"x" + contents[place + 1 :])
    while link.stat().st_ctime_ns <= link.lstat().st_ctime_ns:  # the system's clock has ticks
        os.utime(link, ns=(about.st_atime_ns, about.st_mtime_ns))

    assert before != digest_of([link.parent], inf, by_samples=by_samples)
    with pytest.raises(WeightsUnknown, match="was changed after this server was started"):
        digest_of([link.parent], HOUR_AGO, by_samples=by_samples)


def test_samples_tell_a_file_of_the_hubs_cache_that_was_linked_again(tmp_path: Path) -> None:
    """The file looks older than its link then, and isn't read whole."""
    link = cached(tmp_path, large_name)
    before = digest_of([link], inf, by_samples=True)
    link.write_bytes(b"others")
    blob = link.resolve()
    link.unlink()
    link.symlink_to(blob)

    assert before != digest_of([link], inf, by_samples=True)


def test_a_file_that_is_older_than_its_link_is_believed_where_samples_are_enough(
    tmp_path: Path,
) -> None:
    """It isn't read whole: this one's name would be found out to be another file's."""
    link = cached(tmp_path, lambda _: "ab" * 32)

    assert digest_of([link], HOUR_AGO, by_samples=True)
    for path, by_samples in ((link, False), (link.resolve(), True)):
        with pytest.raises(WeightsUnknown, match="was changed after this server was started"):
            digest_of([path], HOUR_AGO, by_samples=by_samples)


@pytest.mark.parametrize("by_samples", [False, True])
def test_a_link_to_elsewhere_says_nothing_whatever_the_file_is_called(
    by_samples: bool, tmp_path: Path
) -> None:
    """Only the hub's client names files so, and only in `blobs`."""
    link = cached(tmp_path, large_name)
    blob = link.resolve()
    link.unlink()
    link.symlink_to(blob.rename(tmp_path / blob.name))

    with pytest.raises(WeightsUnknown, match="was changed after this server was started"):
        digest_of([link], HOUR_AGO, by_samples=by_samples)


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
