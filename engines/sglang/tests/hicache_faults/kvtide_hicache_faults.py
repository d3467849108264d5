"""A plugin of SGLang that makes a storage's disk fail, as the file KVTIDE_FAULT says.

`hang`: no read and no write ends before the file says something else. `full`: the disk is full.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def register() -> None:
    """SGLang calls this to load the plugin."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    from kvtide.tier.folder import Folder

    for owner, method in ((Folder, "open"), (HiCacheFile, "get"), (HiCacheFile, "set")):
        setattr(owner, method, _failing(getattr(owner, method), writes=False))
    setattr(Folder, "write", _failing(Folder.write, writes=True))  # noqa: B010


def _failing(original: Callable[..., Any], *, writes: bool) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        while _fault() == "hang":
            time.sleep(0.01)
        if _fault() == "full" and writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments)

    return call


def _fault() -> str:
    path = Path(os.environ["KVTIDE_FAULT"])
    return path.read_text() if path.exists() else ""
