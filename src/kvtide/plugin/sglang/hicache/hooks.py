"""Hooks in SGLang that tell a storage what no call of a storage tells.

WeightUpdater.*                    the weights are changed in place
HiCacheController.reset            all KV is forgotten: the cache was flushed
HiCacheController._stop_storage_threads    waits 10 seconds for a storage, then ends the server
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from kvtide.errors import UsageError
from kvtide.plugin.sglang.hicache.updates import UPDATES

Hook = Callable[..., Any]

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"


def register_storage_hooks() -> None:
    """Registers the hooks with SGLang, which applies them when it loads its plugins.

    A function that this SGLang doesn't have matters only to a storage: see require_hooks.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in _HOOKS.items():
        if _function(target) is not None:
            HookRegistry.register(target, hook, HookType.AROUND)


def require_hooks() -> None:
    """Raises UsageError unless SGLang calls all hooks."""
    loose = [target for target, hook in _HOOKS.items() if not _is_in_place(target, hook)]
    if loose:
        raise UsageError(
            f"kvtide isn't told of {', '.join(loose)}, so it can't know which weights a page is "
            "of; SGLang loads kvtide as a plugin unless SGLANG_PLUGINS leaves it out"
        )


def _function(target: str) -> Any:
    """The function of that name, or None if this SGLang has none."""
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None


def _is_in_place(target: str, hook: Hook) -> bool:
    function = _function(target)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _change_weights(original: Hook, *args: Any, **kwargs: Any) -> Any:
    """Counts a change before it begins and when it has ended, however it ends."""
    UPDATES.note_update()
    try:
        return original(*args, **kwargs)
    finally:
        UPDATES.note_update()


def _end_update(original: Hook, updater: Any, *, run_post_load: bool) -> Any:
    """Ends a session of updates. Without a load others wrote to the weights' memory meanwhile."""
    if not run_post_load:
        return original(updater, run_post_load=run_post_load)
    return _change_weights(original, updater, run_post_load=run_post_load)


def _reset(original: Hook, controller: Any) -> Any:
    result = original(controller)
    UPDATES.note_flush()
    return result


def _stop_threads(original: Hook, controller: Any) -> Any:
    """Stops SGLang's threads, which may be in a call of the storage."""
    hurrying = getattr(getattr(controller, "storage_backend", None), "hurrying", None)
    if hurrying is None:
        return original(controller)
    with hurrying():
        return original(controller)


_HOOKS: dict[str, Hook] = {
    f"{_UPDATER}.update_weights_from_disk": _change_weights,
    f"{_UPDATER}.load_weights_from_distributed": _change_weights,
    f"{_UPDATER}.update_weights_from_tensor": _change_weights,
    f"{_UPDATER}.update_weights_from_ipc": _change_weights,
    f"{_UPDATER}.end_weight_update": _end_update,
    f"{_CONTROLLER}.reset": _reset,
    f"{_CONTROLLER}._stop_storage_threads": _stop_threads,
}
