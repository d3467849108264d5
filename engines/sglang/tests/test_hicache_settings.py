"""A wrong setting of the storage ends the server's start with an error that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hicache_case import config, keys_values, storage
from sglang.srt.plugins.hook_registry import HookRegistry

from kvtide.errors import UsageError
from kvtide.plugin.sglang.hicache import hooks
from kvtide.plugin.sglang.hicache.settings import StorageSettings
from kvtide.tier.mooncake_settings import MooncakeSettings


def test_settings_are_read() -> None:
    """Sizes have units, and SGLang's own names are left to SGLang."""
    given = {
        "backend_name": "kvtide",
        "module_path": "kvtide.plugin.sglang.hicache",
        "class_name": "KvtideStorage",
        "interface_v1": 1,
        "disk_dir": "/data/kv",
        "disk_memory": "1GiB",
        "mooncake": "localhost:50051",
        "weights": "r5",
        "deadline_s": 2,
    }
    mooncake = MooncakeSettings("localhost:50051")
    expected = StorageSettings(Path("/data/kv"), 1 << 30, mooncake, "r5", 2.0, is_flat=False)
    assert expected == StorageSettings.read(given)
    assert StorageSettings(Path("d"), is_flat=True) == StorageSettings.read({"disk_dir": "d"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "'disk_dir', 'mooncake', or both"),
        ({"disk_dri": "d"}, r"no 'disk_dri' \(did you mean 'disk_dir'\?\)"),
        ({"disk_dir": 5}, "disk_dir is a int"),
        ({"disk_dir": "d", "disk_memory": "5 apples"}, "disk_memory: '5 apples' is not a size"),
        ({"disk_dir": "d", "disk_memory": "0GiB"}, "disk_memory: '0GiB' is no room"),
        ({"disk_dir": "d", "disk_memory": 1.5}, "disk_memory is a float"),
        ({"disk_dir": "d", "disk_memory": "24"}, "disk_memory: '24' has no unit"),
        ({"mooncake": "m:1", "disk_memory": "1GiB"}, "name it with disk_dir"),
        ({"mooncake": "nowhere"}, "mooncake: 'nowhere' isn't a master's address"),
        ({"disk_dir": "d", "weights": 5}, "weights is a int"),
        ({"disk_dir": "d", "deadline_s": 60}, "deadline_s is 60"),
        ({"disk_dir": "d", "deadline_s": 0}, "deadline_s is 0"),
        ({"disk_dir": "d", "deadline_s": True}, "deadline_s is True"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], words: str) -> None:
    """The error says which option it is of."""
    with pytest.raises(UsageError, match=words) as found:
        StorageSettings.read(given)
    assert "--hicache-storage-backend-extra-config" in str(found.value)


def test_a_folder_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator who asked for a disk wants to know."""
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "none" / "kv"):
        with pytest.raises(UsageError, match=str(folder)):
            storage(monkeypatch, config(folder), {"kv": keys_values("page_first")})


def test_a_pool_without_pages_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang has pools that can't be stored in some layouts."""
    pool = keys_values("page_first")

    def fail(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no pages here")

    for method in ("get_page_buffer_meta", "get_dummy_flat_data_page"):
        monkeypatch.setattr(pool, method, fail, raising=False)
    with pytest.raises(UsageError, match=r"pool 'kv'.*page_first.*no pages here"):
        storage(monkeypatch, config(tmp_path), {"kv": pool})


def test_a_storage_without_its_hooks_does_not_start() -> None:
    """It wouldn't learn that weights were changed in place."""
    with pytest.raises(UsageError, match=r"update_weights_from_disk.*as a plugin"):
        hooks.require_hooks()


def test_a_function_that_sglang_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without a storage has no use for it, and a storage names it."""
    registered: list[str] = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: registered.append(target))
    hooks.register_storage_hooks()
    assert len(registered) == len(hooks._HOOKS)
    gone = "sglang.srt.managers.cache_controller.HiCacheController.gone"
    monkeypatch.setitem(hooks._HOOKS, gone, hooks._reset)
    registered.clear()
    hooks.register_storage_hooks()
    assert len(registered) == len(hooks._HOOKS) - 1
    with pytest.raises(UsageError, match=r"HiCacheController\.gone"):
        hooks.require_hooks()
