"""The workload of `kvtide bench copy` and of the doctor: sizes of rows and pages, order of slots.

It is like a few layers of an 8B model: a row (the k or v of a token in one layer) is 2 KiB.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from kvtide.errors import UsageError
from kvtide.sizes import format_size, parse_size

LAYERS = 4
HEADS = 8
HEAD_DIM = 128
PAGE_SIZE = 64
TOKEN_BYTES = 2 * LAYERS * HEADS * HEAD_DIM * 2
PAGE_BYTES = PAGE_SIZE * TOKEN_BYTES
POOL_SHARE = 4
"""How many times larger the pool is than the moved bytes, so that random slots are far apart."""


def check_size(text: str) -> int:
    """`--size` in bytes, in whole pages of 1 MiB. UsageError for less than one or too many."""
    size_bytes = parse_size(text, name="--size") // PAGE_BYTES * PAGE_BYTES
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    largest_bytes = memory_bytes // (2 * POOL_SHARE + 2)
    if not PAGE_BYTES <= size_bytes <= largest_bytes:
        raise UsageError(
            f"--size: {text} isn't from {format_size(PAGE_BYTES)}, a page, to "
            f"{format_size(largest_bytes)}, a tenth of this machine's memory"
        )
    return size_bytes


def make_slots(token_count: int, slot_count: int) -> dict[str, NDArray[np.int64]]:
    """The slots of each case, int64 [token_count]; the same at each call."""
    random = np.random.default_rng(0)
    pages = random.permutation(slot_count // PAGE_SIZE)[: token_count // PAGE_SIZE]
    return {
        "contiguous": np.arange(PAGE_SIZE, PAGE_SIZE + token_count),
        "pages": (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1),
        "random": random.permutation(slot_count)[:token_count],
    }
