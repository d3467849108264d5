"""Text as it comes: characters that span tokens, and stop strings that span pieces."""

from __future__ import annotations

import pytest

from kvtide.serve.text import TextStream
from serve.harness import tiny


def stream(stop: tuple[str, ...] = ()) -> TextStream:
    """A stream of the tiny model's tokenizer: one token a byte."""
    return TextStream(tiny().tokenizer.backend_tokenizer, stop)


def ids(text: str) -> list[int]:
    """Its tokens."""
    found: list[int] = tiny().tokenizer.backend_tokenizer.encode(text).ids
    return found


def test_character_waits_for_its_last_byte() -> None:
    """Half a character isn't text yet, and never shows as a replacement character."""
    text = stream()
    shown = [text.text for token in ids("a€") if not text.push(token)]
    assert ["a", "a", "a", "a€"] == shown


def test_finish_adds_what_never_got_whole() -> None:
    """The bytes that came are not silently dropped."""
    text = stream()
    for token in ids("a€")[:-1]:
        text.push(token)
    text.finish()
    assert text.text.startswith("a")
    assert "\N{REPLACEMENT CHARACTER}" in text.text


@pytest.mark.parametrize("stop", [("END",), ("ND", "END"), ("nope", "END")])
def test_stop_string_cuts_where_it_begins(stop: tuple[str, ...]) -> None:
    """Also one that came in several pieces; of several the first in the text counts."""
    text = stream(stop)
    ended = [text.push(token) for token in ids("the END")]
    assert [False] * 6 + [True] == ended
    assert text.text == ("the E" if stop[0] == "ND" and len(stop) == 1 else "the ")


def test_empty_stop_string_stops_nothing() -> None:
    """It is in every text."""
    text = stream(("",))
    assert not any(text.push(token) for token in ids("abc"))
    assert text.text == "abc"


def test_special_tokens_are_not_text() -> None:
    """An end-of-text token ends the answer without showing in it."""
    text = stream()
    end = tiny().tokenizer.convert_tokens_to_ids("<|im_end|>")
    for token in [*ids("ab"), end]:
        text.push(token)
    text.finish()
    assert text.text == "ab"
