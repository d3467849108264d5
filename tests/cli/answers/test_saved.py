from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from kvtide.cli.answers.saved import differences, encoded, header_line, read_saved


def test_a_line_is_the_row_and_its_key() -> None:
    """Other programs read it: UTF-8, and the row's order."""
    line = encoded({"id": "b", "text": "h\u00e9\n"}, "0a")
    assert '{"id": "b", "text": "h\u00e9\\n", "key": "0a"}\n'.encode() == line


@given(st.text())
def test_a_line_is_one_line_for_everybody(text: str) -> None:
    """Whatever the model says: no character ends the line, or is an order to a terminal."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return  # half a surrogate pair is no text of a tokenizer
    line = encoded({"id": "a", "text": text}, None).decode()
    assert 1 == len(line.splitlines())
    assert text == json.loads(line)["text"]
    assert not [character for character in line[:-1] if ord(character) < 32]
    assert not [character for character in line if 0x7F <= ord(character) < 0xA0]


def test_all_kinds_of_lines_are_told_apart() -> None:
    """Answers by id and key, in OpenAI's form too; failed prompts, which aren't; and others."""
    answer, batch = encoded({"id": "a"}, "k1"), encoded({"id": "x", "custom_id": "b"}, "k2")
    saved = read_saved(
        [
            header_line({"model": "m"}),
            answer,
            batch,
            encoded({"id": "failed"}, None),
            b"\0\0\0\n",
            b"[1]\n",
            b'{"id": "no key"}\n',
            b'{"id": 7, "key": "k"}\n',
            b"[" * 100_000 + b"\n",
            b'{"id": "half", "key": "k"}',
        ]
    )
    assert {"kvtide": 1, "model": "m"} == saved.header
    assert {("a", "k1"): answer, ("b", "k2"): batch} == saved.answers
    assert [5, 6, 7, 8, 9, 10] == saved.broken


def test_differences_are_named() -> None:
    """By the setting's name, with both values; what only one of them knows isn't compared."""
    ours = {"model": "m", "settings": {"stop": ("x",), "dtype": "float32", "new": 1}}
    theirs = {"model": "n", "settings": {"stop": ["x"], "dtype": "bfloat16", "old": 1}}
    assert (
        'model is "m" here and "n" there, dtype is "float32" here and "bfloat16" there'
    ) == differences(ours, theirs)
    assert "" == differences(ours, None)
    assert "" == differences(ours, {"settings": 7, "model": "m"})
