"""Answers that go to a pipe, a terminal or a device: standard output, for one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from kvtide.cli.answers.base import Answers, Kept
from kvtide.cli.answers.saved import encoded
from kvtide.cli.files import reason_of, write_all
from kvtide.errors import KvtideError


class AnswerStream(Answers):
    """Writes each answer as it comes, and keeps nothing. Owns the descriptor from here on."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name
        self.is_terminal = os.isatty(descriptor)

    def keep(self, _keys: Mapping[str, str], _header: Mapping[str, Any]) -> Kept:
        return Kept()

    def begin(self) -> None:
        pass

    def write(self, _prompt_id: str, row: Mapping[str, Any], key: str | None) -> None:
        try:
            write_all(self._descriptor, encoded(row, key))
        except OSError as error:
            raise KvtideError(
                f"cannot write answers to {self._name}: {reason_of(error)}"
            ) from error

    def sync(self) -> None:
        pass

    def sync_if_due(self) -> None:
        pass

    def finish(self, _prompt_ids: Sequence[str]) -> None:
        pass

    def place(self) -> str:
        return f"written to {self._name}"

    def close(self) -> None:
        os.close(self._descriptor)
