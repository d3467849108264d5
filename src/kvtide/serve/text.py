"""Decodes tokens to text as they come, and cuts the text at a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


@final
class TextStream:
    """The text of one answer, token by token.

    A token may end inside a character; its bytes wait for the rest. `text` only grows, until a stop
    string cuts it at the place where the string begins.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = [word for word in stop if word]
        self._ids: list[int] = []
        self.text = ""

    def push(self, token_id: int) -> bool:
        """Takes a token; True if the text now ends at a stop string."""
        self._ids.append(token_id)
        added = self._stream.step(self._tokenizer, token_id)
        return self._extend(added or "")

    def finish(self) -> bool:
        """Adds bytes that still wait for the rest of their character, as replacement characters."""
        whole: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        rest = whole[len(self.text) :] if whole.startswith(self.text) else ""
        return self._extend(rest)

    def _extend(self, added: str) -> bool:
        longest = max((len(word) for word in self._stop), default=1)
        # A stop string may begin in the text that is there already.
        start = max(0, len(self.text) - longest + 1)
        self.text += added
        found = [self.text.find(word, start) for word in self._stop]
        begins = [begin for begin in found if begin >= 0]
        if begins:
            self.text = self.text[: min(begins)]
        return bool(begins)
