"""Knows of a very long prompt that it can't fit, without turning it into tokens.

To turn 20 MB into tokens takes a minute. The number of tokens has a lower bound: a token covers no
more bytes than the longest entry of the vocabulary. The bound holds only if no part of the text
can vanish or be joined into one token of any length, so only tokenizers are counted of which that
is known. For all others there is no bound, and the prompt is turned into tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer, pre_tokenizers

from kvtide.serve.chat import rendered
from kvtide.serve.models import OpenModel

# Shorter prompts are turned into tokens at once.
_LONG_CHARACTERS = 1 << 18
# NFC joins at most four characters to one. In UTF-8 a joined text keeps a third of its bytes; the
# fourth is for releases of Unicode to come.
_SHRINKS = {"NFC": 4, "Prepend": 1, "Replace": 1}
_KEEPERS = ("ByteLevel", "Digits", "Metaspace")
_COVERED: WeakKeyDictionary[Tokenizer, int] = WeakKeyDictionary()


def reason_too_long(
    model: OpenModel,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    is_raw: bool,
) -> str | None:
    """Why the prompt can't fit the model's context, if its length alone shows that; else None.

    `is_raw` is for a prompt of one message that isn't put into the chat template.
    """
    limit = model.context_limit
    if limit is None or sum(len(str(part)) for part in messages) < _LONG_CHARACTERS:
        return None
    try:
        text = messages[0]["content"] if is_raw else rendered(model, messages, tools)
    except Exception:  # a template may raise anything, and the one who encodes says it
        return None
    least = least_tokens(model.tokenizer.backend_tokenizer, text)
    if least <= limit:
        return None
    return (
        f"its prompt has {len(text)} characters, which are at least {least} tokens, and the model "
        f"has {limit} positions; shorten the prompt"
    )


def least_tokens(tokenizer: Tokenizer, text: str) -> int:
    """A number of tokens that `text` surely has; 0 where nothing is known."""
    if tokenizer not in _COVERED:
        _COVERED[tokenizer] = _most_bytes(json.loads(tokenizer.to_str()))
    most = _COVERED[tokenizer]
    return -(-len(text.encode("utf-8", "replace")) // most) if most else 0


def _most_bytes(form: Mapping[str, Any]) -> int:
    """The most bytes of a text that a token of this tokenizer can cover; 0 if there is no limit."""
    model, added = form["model"], form["added_tokens"]
    shrinks = [_shrink(part) for part in _parts(form["normalizer"], "normalizers")]
    splitters = _parts(form["pre_tokenizer"], "pretokenizers")
    if model["type"] != "BPE" or None in shrinks or not all(map(_keeps_all, splitters)):
        return 0
    # Such a token takes all the space beside it, too.
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return 0
    vocabulary = model["vocab"]
    if any(part["type"] == "ByteLevel" for part in splitters):
        needed = set(pre_tokenizers.ByteLevel.alphabet())
        longest = max(map(len, vocabulary), default=0)  # here a character is a byte
    else:
        needed = {f"<0x{byte:02X}>" for byte in range(256)} if model["byte_fallback"] else {""}
        longest = max((len(token.encode()) for token in vocabulary), default=0)
    # Without an entry for each byte, unknown text would vanish, or be one token.
    if not needed <= vocabulary.keys():
        return 0
    longest = max([longest, *(len(token["content"].encode()) for token in added)])
    for shrink in shrinks:
        longest *= shrink or 1
    return longest


def _parts(form: Mapping[str, Any] | None, inside: str) -> Sequence[Mapping[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer."""
    if form is None:
        return []
    return form[inside] if form["type"] == "Sequence" else [form]


def _shrink(normalizer: Mapping[str, Any]) -> int | None:
    """By what factor a text may lose bytes; None if that isn't known."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        if pattern is None or len(normalizer["content"].encode()) < len(pattern.encode()):
            return None
    return _SHRINKS.get(normalizer["type"])


def _keeps_all(splitter: Mapping[str, Any]) -> bool:
    return splitter["type"] in _KEEPERS or (
        splitter["type"] in ("Split", "Punctuation") and splitter["behavior"] != "Removed"
    )
