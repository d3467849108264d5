"""A simple terminal for tests, which breaks lines anew when its width changes."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

_TOKENS = re.compile(r"\x1b\[\??([0-9;]*)([a-zA-Z])|(.)", re.DOTALL)


@dataclass
class _Row:
    text: str = ""
    goes_on: bool = False
    """Whether the next row is the rest of the same line."""


class Terminal(io.StringIO):
    """A terminal that knows text, `\\r`, `\\n`, cursor up, erase below, colours, cursor on and off.

    Like tmux, VTE, kitty and others, `resize` joins the rows of a line and breaks it anew.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.has_cursor = True
        self._rows = [_Row()]
        self._row = self._column = 0

    @property
    def lines(self) -> list[str]:
        """The rows on the screen, without spaces at their ends and empty rows at the end."""
        rows = [row.text.rstrip() for row in self._rows]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def isatty(self) -> bool:
        """It is a terminal."""
        return True

    def write(self, text: str) -> int:
        """Shows the text."""
        for token in _TOKENS.finditer(text):
            number, command, character = token.groups()
            if command is not None:
                self._obey(command, number)
            elif character == "\n":
                self._row, self._column = self._row + 1, 0
                self._rows += [_Row()] * (self._row == len(self._rows))
            elif character == "\r":
                self._column = 0
            else:
                self._put(character)
        return len(text)

    def resize(self, width: int) -> None:
        """Breaks all lines anew; the cursor stays at the character that it was at."""
        rows, self._rows = self._rows, []
        cursor, self.width, start = (self._row, self._column), width, 0
        while start < len(rows):
            end = start
            while rows[end].goes_on:
                end += 1
            before = sum(len(row.text) for row in rows[start : cursor[0]])
            if start <= cursor[0] <= end:
                down, self._column = divmod(before + cursor[1], width)
                self._row = len(self._rows) + down
            line = "".join(row.text for row in rows[start : end + 1])
            pieces = [line[first : first + width] for first in range(0, max(len(line), 1), width)]
            self._rows += [_Row(piece, goes_on=True) for piece in pieces]
            self._rows[-1].goes_on = False
            start = end + 1
        self._rows += [_Row() for _ in range(self._row + 1 - len(self._rows))]

    def _put(self, character: str) -> None:
        if self._column == self.width:
            self._rows[self._row].goes_on = True
            self._row, self._column = self._row + 1, 0
            self._rows += [_Row()] * (self._row == len(self._rows))
        row = self._rows[self._row]
        text = row.text.ljust(self._column)
        row.text = text[: self._column] + character + text[self._column + 1 :]
        self._column += 1

    def _obey(self, command: str, number: str) -> None:
        if command == "A":
            self._row = max(0, self._row - int(number or 1))
        elif command == "J":
            assert (number, self._column) == ("", 0), "only whole rows are erased"
            self._rows[self._row :] = [_Row()]
        elif command in "hl":
            assert number == "25", "only the cursor is switched"
            self.has_cursor = command == "h"
        else:
            assert command == "m", f"an unknown command: {command}"
