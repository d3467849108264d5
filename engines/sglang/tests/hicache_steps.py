"""Steps of engine_run.py for servers with a storage: what a test does between two questions."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvtide.errors import SnapshotDamaged
from kvtide.tier.file_check import read_seal
from kvtide.tier.file_form import ALIGNMENT

PAGE = 16
_WAIT_S = 60.0
_GLANCE_S = 0.02


async def asked(
    engine: Any, requests: list[dict[str, Any]], limit_s: float = _WAIT_S
) -> list[dict[str, Any]]:
    """Asks one request after the other, and returns the answers; fewer if one takes too long.

    After each the cache is flushed, so that only the storage has pages. SGLang refuses that until
    all pages were offered to the storage.
    """
    answers: list[dict[str, Any]] = []
    for request in requests:
        try:
            answer = await asyncio.wait_for(engine.async_generate(**request), limit_s)
        except asyncio.TimeoutError:
            return answers
        answers.append(dict(answer))
        for _ in range(int(_WAIT_S / _GLANCE_S)):
            if (await engine.tokenizer_manager.flush_cache()).success:
                break
            await asyncio.sleep(_GLANCE_S)
        else:
            raise TimeoutError(f"SGLang's cache wasn't flushed in {_WAIT_S} s")
    return answers


async def kept(engine: Any, folder: str, count: int) -> int:
    """Waits until a folder has that many pages; returns how many it has."""
    for _ in range(int(_WAIT_S / _GLANCE_S)):
        found = len(_files(folder))
        if found >= count:
            return found
        await asyncio.sleep(_GLANCE_S)
    raise TimeoutError(f"{folder} has {len(_files(folder))} pages after {_WAIT_S} s, not {count}")


async def counted(engine: Any, folder: str) -> int:
    """Returns how many pages a folder has."""
    return len(_files(folder))


async def damage(
    engine: Any, folder: str, how: str, tokens: Sequence[int], pages: Sequence[int]
) -> None:
    """Damages the files of a prompt's pages.

    `how` is `flip` a bit, `cut` in half, `lose`, or `swap`: copy it over that of the page before.
    """
    for number in pages:
        path = _file_of(folder, tokens, number)
        content = bytearray(path.read_bytes())
        if how == "flip":  # an exponent bit of a number of float32, which gets much larger
            content[_start_of(path) + 3] ^= 0x40
            path.write_bytes(content)
        elif how == "cut":
            path.write_bytes(content[: len(content) // 2])
        elif how == "swap":
            _file_of(folder, tokens, number - 1).write_bytes(content)
        else:
            path.unlink()


async def update(engine: Any, model: str) -> dict[str, Any]:
    """Changes the server's weights in place to those of another folder."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(model_path=model)
    success, message, _ = await engine.tokenizer_manager.update_weights_from_disk(request, None)
    return {"success": success, "message": message}


async def fault(engine: Any, flag: str, kind: str) -> None:
    """Sets the fault that the plugin hicache_faults makes, or none."""
    Path(flag).write_text(kind)


async def die(engine: Any, folder: str, count: int, requests: list[dict[str, Any]]) -> None:
    """Kills the server's processes while requests run, once a folder has that many pages."""
    tasks = [asyncio.create_task(engine.async_generate(**request)) for request in requests]
    await kept(engine, folder, count)
    os.killpg(os.getpgrp(), signal.SIGKILL)
    await asyncio.gather(*tasks)


def _files(folder: str) -> list[Path]:
    return [path for kind in ("*.safetensors", "*.bin") for path in Path(folder).rglob(kind)]


def _file_of(folder: str, tokens: Sequence[int], number: int) -> Path:
    """The file of a prompt's page: kvtide's, or one of SGLang's own storage `file`."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    name = get_storage_hash_str(list(tokens), None, page_size=PAGE)[number]
    return next(path for path in _files(folder) if _name_of(path) == name)


def _name_of(path: Path) -> str:
    """SGLang's name of the page in a file."""
    if path.suffix == ".bin":
        return path.name.partition("_")[0]
    with path.open("rb") as file, suppress(SnapshotDamaged):
        return read_seal(file.fileno())[1].key
    return ""


def _start_of(path: Path) -> int:
    """Where a file's first page byte is."""
    return 0 if path.suffix == ".bin" else ALIGNMENT
