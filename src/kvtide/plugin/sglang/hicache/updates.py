"""Counts how often the weights of this process have changed since SGLang loaded them.

SGLang may change the weights while it runs, and no call of a storage says so: the hooks count that.
Weights that were changed are in no file, so pages of them belong to this run of the server alone.
"""

from __future__ import annotations

import threading
from typing import final


@final
class Updates:
    """What has happened to this process's weights since SGLang loaded them."""

    def __init__(self) -> None:
        self._change = threading.Lock()
        self.count = 0
        """How often the weights were changed."""
        self.are_mixed = False
        """Whether SGLang's cache may have KV of weights before the last change."""

    def note_update(self) -> None:
        """The weights are changing, or have changed."""
        with self._change:
            self.count += 1
            self.are_mixed = True

    def note_flush(self) -> None:
        """SGLang has forgotten all KV."""
        with self._change:
            self.are_mixed = False


UPDATES = Updates()
"""This process's, which the hooks note."""
