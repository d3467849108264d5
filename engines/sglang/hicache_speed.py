"""Measures kvtide's storage beside SGLang's `file`: both keep and read the same pages, in turns.

    SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=engines/sglang/stand_ins:engines/sglang/tests \\
        .venv-sglang/bin/python engines/sglang/hicache_speed.py FOLDER

It prints a table for docs/sglang.md: medians of milliseconds for a batch of 128 pages, as SGLang
asks for them. Each storage is called in SGLang's way: `file` by flat pages, kvtide by
`interface_v1`. `read` finds the files as they were left, `read, cold` after the system's cache was
emptied of them. `keep` of kvtide ends when the files last; `file` doesn't wait for that.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hicache_case import buffers, config, names, rows_of, storage

BATCH = 128
ROUNDS = 5
SHAPES = ((16, 2, 8), (64, 4, 8), (64, 4, 16), (64, 8, 16))
"""Tokens of a page, heads of 128 bfloat16, and layers: pages of 128 KiB to 4 MiB."""


def pool_of(page: int, heads: int, layers: int) -> Any:
    """Makes a host pool for a batch of pages, with random bytes."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host import base
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    pool = MHATokenToKVPool(
        size=2 * page, page_size=page, dtype=torch.bfloat16, head_num=heads, head_dim=128,
        layer_num=layers, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    made = MHATokenToKVPoolHost(
        pool.get_device_pool_infos()[0].buffer_info, BATCH / 2, 0, page, "page_first",
        pin_memory=False, device_capacity_tokens=2 * page, start_layer=0, end_layer=layers,
    )  # fmt: skip
    for buffer in buffers(made):
        buffer.random_(0, 255)
    return made


def keep_flat(file: Any, pool: Any, keys: list[str], rows: list[int]) -> bool:
    """Keeps pages as SGLang does it with `file`."""
    return bool(file.batch_set(keys, [pool.get_data_page(row) for row in rows]))


def read_flat(file: Any, pool: Any, keys: list[str], rows: list[int]) -> bool:
    """Reads pages as SGLang does it with `file`."""
    pages = file.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
    for row, page in zip(rows, pages, strict=True):
        pool.set_from_flat_data_page(row, page)
    return True


def forget(folder: Path) -> None:
    """Empties the system's cache of a folder's files."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def measure(folder: Path, shape: tuple[int, int, int]) -> dict[str, float]:
    """Returns the median milliseconds of each call."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    pool, about = pool_of(*shape), config(folder / "kvtide", disk_memory="8GiB")
    rows = rows_of(pool, range(BATCH))
    firsts = rows[:: pool.page_size].tolist()
    folder.mkdir()
    file = HiCacheFile(about, str(folder / "file"))
    took: dict[str, list[float]] = {}

    def timed(what: str, call: Callable[[], Any]) -> None:
        started = time.perf_counter()
        result = call()
        took.setdefault(what, []).append(1e3 * (time.perf_counter() - started))
        assert result is True or all(result), what
        os.sync()

    with pytest.MonkeyPatch.context() as patch:
        ours = storage(patch, about, {"kv": pool})
        ours._moves._deadline_s = 600.0
        for number in range(ROUNDS):
            keys = names(BATCH, chain=number)
            timed("keep file", lambda: keep_flat(file, pool, keys, firsts))  # noqa: B023
            timed("keep kvtide", lambda: ours.batch_set_v1(keys, rows))  # noqa: B023
            for words in ("read", "read, cold"):
                for name in ("file", "kvtide"):
                    if words != "read":
                        forget(folder)
                    timed(
                        f"{words} {name}",
                        (lambda: read_flat(file, pool, keys, firsts))  # noqa: B023
                        if name == "file"
                        else (lambda: ours.batch_get_v1(keys, rows)),  # noqa: B023
                    )
        ours.close()
    shutil.rmtree(folder)
    return {what: statistics.median(times) for what, times in took.items()}


def table(folder: Path) -> Iterator[str]:
    """Yields the table's lines."""
    calls = ("keep", "read", "read, cold")
    yield f"| a page has | {' | '.join(f'{call}: `file`, kvtide' for call in calls)} |"
    yield f"|{'---|' * (1 + len(calls))}"
    for shape in SHAPES:
        took = measure(folder / "speed", shape)
        page, heads, layers = shape
        cells = (f"{took[f'{call} file']:.0f}, {took[f'{call} kvtide']:.0f}" for call in calls)
        yield f"| {page * heads * layers * 512 >> 10} KiB | {' | '.join(cells)} |"


if __name__ == "__main__":
    for line in table(Path(sys.argv[1])):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
