"""A lower bound of the number of tokens of a text, which must never be too high."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from kvtide.serve.lengths import least_tokens, reason_too_long
from serve.harness import tiny

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _byte_level() -> Tokenizer:
    """Makes a tokenizer of bytes with an entry for `aaaa`, a normalizer and a special token."""
    merges = [("a", "a"), ("aa", "aa")]
    entries = [*ALPHABET, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(entries)}, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()]
    )
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def _with_fallback() -> Tokenizer:
    """Makes a tokenizer in the manner of SentencePiece, with the bytes for unknown characters."""
    entries = ["<unk>", *BYTES, "▁", "a", "aa"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(entries)},
            merges=[("a", "a")],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


KNOWN = {"bytes": _byte_level(), "fallback": _with_fallback()}
TEXTS = (
    st.text(st.sampled_from(list("a 1é\u0301\u0308\u1100\u1161\u11a8<|end>▁\U0001f600")))
    | st.text()
)


@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_a_text_never_has_fewer_tokens(name: str, text: str) -> None:
    """A prompt that fits is never refused for its length."""
    ids = KNOWN[name].encode(text, add_special_tokens=False).ids
    assert len(ids) >= least_tokens(KNOWN[name], text)


def test_a_long_text_surely_has_many_tokens() -> None:
    """The longest entry covers 7 bytes, and a text may lose three quarters of its bytes."""
    assert 7_000_000 // (7 * 4) == least_tokens(KNOWN["bytes"], "a" * 7_000_000)
    assert 600_000 // 6 == least_tokens(KNOWN["fallback"], "a" * 600_000)


def test_characters_are_joined_to_a_third_of_their_bytes_at_most() -> None:
    """The bound counts on a quarter, for all characters that this release of Unicode has."""
    ratios = {}
    for number in range(0x110000):
        parts = unicodedata.normalize("NFD", chr(number))
        if len(parts) > 1 and unicodedata.normalize("NFC", parts) == chr(number):
            ratios[chr(number)] = len(parts.encode()) / len(chr(number).encode())
    assert 3 == max(ratios.values())


def _changed(change: Callable[[dict[str, Any]], object]) -> Tokenizer:
    form = json.loads(KNOWN["bytes"].to_str())
    change(form)
    return Tokenizer.from_str(json.dumps(form))


REMOVED = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}


@pytest.mark.parametrize(
    "change",
    [
        lambda form: form.update(pre_tokenizer={"type": "WhitespaceSplit"}),
        lambda form: form["pre_tokenizer"]["pretokenizers"].append(REMOVED),
        lambda form: form.update(normalizer={"type": "NFKC"}),
        lambda form: form.update(
            normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}
        ),
        lambda form: form.update(
            normalizer={"type": "Replace", "pattern": {"String": "ab"}, "content": "c"}
        ),
        lambda form: form["added_tokens"][0].update(rstrip=True),
        lambda form: form["model"]["vocab"].pop("b"),
        lambda form: form.update(pre_tokenizer=None),
    ],
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(
    change: Callable[[dict[str, Any]], object],
) -> None:
    """Nothing is known of the number of its tokens."""
    assert 0 == least_tokens(_changed(change), "a" * 1000)


def test_a_tokenizer_of_words_has_no_bound() -> None:
    """Any text without spaces may be its one token for unknown words."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    assert 0 == least_tokens(words, "a" * 1000)


@pytest.mark.parametrize("is_raw", [True, False])
def test_a_prompt_is_refused_without_its_tokens(is_raw: bool) -> None:
    """The model has 8192 positions; the longest entry of its vocabulary covers 13 bytes."""
    model = tiny()

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("the prompt was turned into tokens")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.tokenizer), "_encode_plus", refuse)
        message = {"role": "user", "content": "x" * 1_000_000}
        reason = reason_too_long(model, [message], is_raw=is_raw)
    assert reason is not None
    assert "the model has 8192 positions; shorten the prompt" in reason


def test_only_a_prompt_that_cannot_fit_is_refused() -> None:
    """A shorter one, and one of a model without a limit, are turned into tokens."""
    model = replace(tiny())
    assert reason_too_long(model, [{"role": "user", "content": "x" * 9000}], is_raw=True) is None
    message = {"role": "user", "content": "x" * 1_000_000}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "context_limit", 100_000)
        assert reason_too_long(model, [message], is_raw=True) is None
        patch.setattr(type(model), "context_limit", None)
        assert reason_too_long(model, [message], is_raw=True) is None
