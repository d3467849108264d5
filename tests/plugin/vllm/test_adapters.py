"""KV of an adapter is bound to its weights, and isn't kept where nobody can tell them."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtide.plugin.vllm import adapters as adapters_of_vllm
from kvtide.plugin.vllm.adapters import CHANGES_ALLOWED, Adapters, changes_are_allowed

LATER = 4e9
"""After all files of the tests, in seconds since 1970."""
KEY = b"hash of tokens" + bytes(4)


def adapter_in(folder: Path, weights: bytes, number: int = 1, **more: bool) -> SimpleNamespace:
    """A request's adapter with these weights."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return SimpleNamespace(
        lora_name="a", lora_int_id=number, lora_path=str(folder), load_inplace=False, **more
    )


def test_other_weights_have_other_keys(tmp_path: Path) -> None:
    """The path decides nothing, and the group at the end of a key stays."""
    keys = [
        Adapters(lambda: LATER).of_request(adapter_in(tmp_path / name, weights)).key_of(KEY)
        for name, weights in (("one", b"x"), ("two", b"x"), ("one", b"y"))
    ]
    assert keys[0] == keys[1] != keys[2]
    assert KEY not in keys
    assert {KEY[-4:]} == {key[-4:] for key in keys}


def test_files_that_changed_after_the_start_are_unknown(tmp_path: Path) -> None:
    """vLLM may have read other contents. What is newer than the engine is unknown at once."""
    adapter = adapter_in(tmp_path / "a", b"x")
    assert not Adapters(lambda: 0.0).of_request(adapter).is_known

    adapters = Adapters(lambda: LATER)
    assert adapters.of_request(adapter).is_known
    change(tmp_path / "a")
    assert not adapters.of_request(adapter).is_known
    assert not adapters.of_request(adapter).is_known


def replace(file: Path) -> None:
    """Puts another file of the same size there."""
    (file.parent / "other").write_bytes(b"y")
    (file.parent / "other").rename(file)


@pytest.mark.parametrize("act", [replace, lambda file: file.write_bytes(b"longer")])
def test_another_file_is_seen_whose_time_is_the_same(
    act: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time lies in the future, as a copy may leave it. A warning says it once."""
    warned: list[str] = []
    monkeypatch.setattr(adapters_of_vllm, "_warn_of", warned.append)
    file = tmp_path / "a" / "adapter_model.safetensors"
    adapter, again = (adapter_in(tmp_path / "a", b"x", number) for number in (1, 2))
    os.utime(file, (LATER - 1, LATER - 1))
    adapters = Adapters(lambda: LATER)
    request = adapters.of_request(adapter)
    known = [request.is_known]
    (tmp_path / "kept").hardlink_to(file)
    act(file)
    os.utime(file, (LATER - 1, LATER - 1))
    adapters.look_again(adapter)
    assert [True, False] == [*known, request.is_known]
    assert [str(tmp_path / "a")] == warned

    (tmp_path / "kept").write_bytes(b"x")
    (tmp_path / "kept").rename(file)
    os.utime(file, (LATER - 1, LATER - 1))
    assert not adapters.of_request(again).is_known, "requests may have run in between"


def test_a_folder_in_an_adapters_folder_may_change(tmp_path: Path) -> None:
    """vLLM reads nothing from there."""
    adapter = adapter_in(tmp_path / "a", b"x")
    (tmp_path / "a" / "notes").mkdir()
    adapters = Adapters(lambda: LATER)
    request = adapters.of_request(adapter)
    os.utime(tmp_path / "a" / "notes", (LATER, LATER))
    adapters.look_again(adapter)

    assert request.is_known


def test_what_isnt_a_folder_with_files_is_unknown(tmp_path: Path) -> None:
    """So is a name on the hub."""
    adapters = Adapters(lambda: LATER)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nothing", tmp_path / "empty"):
        given = SimpleNamespace(lora_int_id=1, lora_path=str(path), load_inplace=False)
        assert not adapters.of_request(given).is_known


def test_new_weights_in_place_make_running_requests_unknown(tmp_path: Path) -> None:
    """They are computed with the new weights from then on. Another adapter stays known."""
    adapters = Adapters(lambda: LATER)
    running = adapters.of_request(adapter_in(tmp_path / "a", b"x"))
    other = adapters.of_request(adapter_in(tmp_path / "b", b"x", number=2))
    new = adapter_in(tmp_path / "c", b"y")
    new.load_inplace = True
    assert not adapters.of_request(new).is_known
    assert (False, True) == (running.is_known, other.is_known)
    new.load_inplace = False
    assert not adapters.of_request(new).is_known


@pytest.mark.parametrize(("text", "is_allowed"), [("1", True), (" True", True), ("0", False)])
def test_vllms_variable_is_read_as_vllm_does(
    text: str, is_allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lets weights change under running requests."""
    monkeypatch.setenv(CHANGES_ALLOWED, text)
    assert is_allowed == changes_are_allowed()


def change(folder: Path) -> None:
    """Writes other weights of the same size, and sets the file's time back."""
    path = folder / "adapter_model.safetensors"
    about = path.stat()
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def test_requests_become_unknown_with_the_files_that_vllm_has_yet_to_read(tmp_path: Path) -> None:
    """vLLM reads an adapter when a request begins to run. Another adapter stays known."""
    adapters = Adapters(lambda: LATER)
    adapter = adapter_in(tmp_path / "a", b"x")
    waiting = [adapters.of_request(adapter) for _ in range(2)]
    other = adapters.of_request(adapter_in(tmp_path / "b", b"x", number=2))
    adapters.look_again(adapter)
    assert all(request.is_known for request in waiting)
    change(tmp_path / "a")
    adapters.look_again(adapter)

    assert [False, False, True] == [request.is_known for request in (*waiting, other)]


def test_a_worker_can_tell_that_files_changed_before_a_save_ended(tmp_path: Path) -> None:
    """It gets what the files looked like with the save."""
    request = Adapters(lambda: LATER).of_request(adapter_in(tmp_path / "a", b"x"))
    assert request.files is not None
    files = deepcopy(request.files)
    assert files.are_unchanged()
    change(tmp_path / "a")
    assert not files.are_unchanged()
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    (tmp_path / "a").rmdir()
    assert not files.are_unchanged()
