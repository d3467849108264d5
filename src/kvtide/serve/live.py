"""Live: a request that has not ended, and what belongs to it."""

from __future__ import annotations

from typing import final

import torch

from kvtide.serve.request import Request
from kvtide.serve.sampling import Sampler
from kvtide.serve.text import TextStream
from kvtide.tide import Tide


@final
class Live:
    """A request that has not ended, with its sampler, its text and its slots."""

    def __init__(self, request: Request, sampler: Sampler, text: TextStream) -> None:
        self.request = request
        self.sampler = sampler
        self.text = text
        self._pages: list[int] = []
        self._slots = torch.empty(0, dtype=torch.int64)

    def slots(self, tide: Tide) -> torch.Tensor:
        """The slots of the request's pages, int64; computed again only when its pages change."""
        if self._pages != self.request.pages:
            self._pages = list(self.request.pages)
            self._slots = torch.from_numpy(tide.pool.slots_of(self._pages))
        return self._slots
