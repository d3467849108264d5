"""Text: from tokens to text as they come, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


@final
class TextStream:
    """The text of one answer, token by token.

    Tokens can end within a character: such bytes wait for the rest. `text` never shrinks,
    except that a stop string cuts it where the string begins.
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
        piece = self._stream.step(self._tokenizer, token_id)
        return self._extend(piece or "")

    def finish(self) -> bool:
        """Adds what waits for bytes that won't come, as replacement characters."""
        whole: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        rest = whole[len(self.text) :] if whole.startswith(self.text) else ""
        return self._extend(rest)

    def _extend(self, piece: str) -> bool:
        longest = max((len(word) for word in self._stop), default=1)
        # A stop string may have begun in what was there before.
        start = max(0, len(self.text) - longest + 1)
        self.text += piece
        found = [at for word in self._stop if (at := self.text.find(word, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)
