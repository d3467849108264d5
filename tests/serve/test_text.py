"""Text of an answer as it grows: characters of several tokens, and stop strings."""

from __future__ import annotations

import pytest

from kvtide.serve.text import TextStream
from serve.harness import tiny


def stream(stop: tuple[str, ...] = ()) -> TextStream:
    """Makes a stream with the tiny model's tokenizer, in which each byte is a token."""
    return TextStream(tiny().tokenizer.backend_tokenizer, stop)


def ids(text: str) -> list[int]:
    """Returns the text's tokens."""
    found: list[int] = tiny().tokenizer.backend_tokenizer.encode(text).ids
    return found


def test_character_waits_for_its_last_byte() -> None:
    """Half a character is not shown, not even as a replacement character."""
    text = stream()
    shown = [text.text for token in ids("a€") if not text.push(token)]
    assert ["a", "a", "a", "a€"] == shown


def test_finish_adds_an_incomplete_character() -> None:
    """Bytes that arrived are not dropped silently."""
    text = stream()
    for token in ids("a€")[:-1]:
        text.push(token)
    text.finish()
    assert text.text.startswith("a")
    assert "\N{REPLACEMENT CHARACTER}" in text.text


@pytest.mark.parametrize("stop", [("END",), ("ND", "END"), ("nope", "END")])
def test_stop_string_cuts_where_it_begins(stop: tuple[str, ...]) -> None:
    """A stop string may come in several pieces; of several, the first one in the text cuts."""
    text = stream(stop)
    ended = [text.push(token) for token in ids("the END")]
    assert [False] * 6 + [True] == ended
    assert text.text == ("the E" if stop[0] == "ND" and len(stop) == 1 else "the ")


def test_empty_stop_string_stops_nothing() -> None:
    """The empty string is in every text."""
    text = stream(("",))
    assert not any(text.push(token) for token in ids("abc"))
    assert text.text == "abc"


def test_special_tokens_are_not_text() -> None:
    """An end token ends the answer and isn't shown."""
    text = stream()
    end = tiny().tokenizer.convert_tokens_to_ids("<|im_end|>")
    for token in [*ids("ab"), end]:
        text.push(token)
    text.finish()
    assert text.text == "ab"
