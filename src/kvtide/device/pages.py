"""LargePages: gives memory pages of 2 MiB, and makes them ready in a thread before a move comes."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from functools import partial
from typing import final

import torch

from kvtide.device.threads import Threads

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: the pages are there afterwards, and no byte has changed."""
_STEP_BYTES = 2 << 20


@final
class LargePages:
    """A disk reads into large pages almost three times as fast, past the system's cache.

    The system may take a millisecond and more for each. Memory can be used at once all the same:
    what isn't ready yet is made ready as it is touched, as always.
    """

    def __init__(self) -> None:
        self._thread = Threads(1, "kvtide-pages")
        self._is_closed = False

    def give_to(self, pages: mmap.mmap, memory: torch.Tensor) -> None:
        """Gives large pages to `pages`, whose memory is `memory`, where the system has them."""
        with suppress(AttributeError, OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
            self._thread.put(partial(self._make_ready, memory))

    def close(self) -> None:
        """Ends the thread. Repeatable."""
        self._is_closed = True
        self._thread.close()

    def _make_ready(self, memory: torch.Tensor) -> None:
        """In the thread. The interpreter's lock is free meanwhile: ctypes gives it away."""
        populate = ctypes.CDLL(None).madvise
        for first in range(0, memory.numel(), _STEP_BYTES):
            place = ctypes.c_void_p(memory.data_ptr() + first)
            size = ctypes.c_size_t(min(_STEP_BYTES, memory.numel() - first))
            if self._is_closed or populate(place, size, _POPULATE_WRITE):
                return
