"""Large pages, on systems that have none."""

from __future__ import annotations

import mmap
from contextlib import closing
from typing import Any

import pytest
import torch

from kvtide.device.pages import LargePages


class RefusedPages:
    """Pages of a system whose kernel was built without large ones: `madvise` says EINVAL."""

    def madvise(self, advice: int) -> None:
        raise OSError(22, "Invalid argument")


def test_memory_is_used_as_it_is_where_the_kernel_has_no_large_pages() -> None:
    """A container may forbid them, too."""
    pages: Any = RefusedPages()
    with closing(LargePages()) as large:
        large.give_to(pages, torch.zeros(8, dtype=torch.uint8))


def test_memory_is_used_as_it_is_where_python_knows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other systems than Linux have none."""
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    with closing(LargePages()) as large, mmap.mmap(-1, 8) as pages:
        large.give_to(pages, torch.zeros(8, dtype=torch.uint8))
