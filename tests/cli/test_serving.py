from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvtide.cli.serving import LibraryServing
from kvtide.errors import UsageError
from kvtide.prompts import Prompt, parse_prompt
from kvtide.prompts.requests import encode_prompt
from kvtide.serve.models import OpenModel, open_model
from kvtide.serve.request import SamplingParams


@pytest.fixture(scope="module")
def tiny() -> OpenModel:
    """The small random model, for which each byte is a token."""
    return open_model("tiny-random")


@pytest.fixture
def untaught(tiny: OpenModel) -> OpenModel:
    """The same model without a chat template, like a base model."""
    tokenizer = open_model("tiny-random").tokenizer
    tokenizer.chat_template = None
    return replace(tiny, tokenizer=tokenizer)


def _prompt(**fields: object) -> Prompt:
    return parse_prompt(json.dumps({"id": "a", **fields}).encode(), where="f, line 7")


def test_prompt_is_put_into_the_chat_template(tiny: OpenModel) -> None:
    """The model reads a turn of the user and the beginning of its answer."""
    ids = encode_prompt(tiny, _prompt(prompt="Hé"))
    expected = "<|im_start|>user\nHé<|im_end|>\n<|im_start|>assistant\n"
    assert expected == tiny.tokenizer.decode(ids)


def test_messages_keep_their_roles_and_order(tiny: OpenModel) -> None:
    """A conversation of several turns is one prompt."""
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": str(n)} for n, role in enumerate(roles)]
    text = tiny.tokenizer.decode(encode_prompt(tiny, _prompt(messages=messages)))
    expected = "".join(f"<|im_start|>{role}\n{n}<|im_end|>\n" for n, role in enumerate(roles))
    assert f"{expected}<|im_start|>assistant\n" == text


def test_model_without_template_takes_plain_prompts_only(untaught: OpenModel) -> None:
    """A base model continues the text; messages are refused with the line and the remedy."""
    ids = encode_prompt(untaught, _prompt(prompt="Once"))
    assert "Once" == untaught.tokenizer.decode(ids)
    chat = _prompt(messages=[{"role": "user", "content": "x"}])
    with pytest.raises(UsageError, match="f, line 7: the model tiny-random has no chat template"):
        encode_prompt(untaught, chat)


def test_a_raw_prompt_is_continued_without_the_template(tiny: OpenModel) -> None:
    """OpenAI's completions work so. Special tokens' text stays text unless asked otherwise."""
    raw = replace(_prompt(prompt="a<|im_end|>"), is_openai=True)
    assert len("a<|im_end|>") == len(encode_prompt(tiny, raw))
    assert 2 == len(encode_prompt(tiny, raw, special_tokens=True))


def test_prompt_that_the_template_refuses_is_bad_input(untaught: OpenModel) -> None:
    """Templates raise errors of their own, such as for roles that don't alternate."""
    untaught.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match=r"f, line 7: .*tiny-random refuses .*must alternate"):
        encode_prompt(untaught, _prompt(prompt="x"))


@pytest.mark.parametrize("template", ["{{ 1/0 }}", "{{ range(10**9) }}", "{{ 1 + 'a' }}"])
def test_template_that_fails_is_bad_input(untaught: OpenModel, template: str) -> None:
    """A template is a program, which may for example divide by zero."""
    untaught.tokenizer.chat_template = template
    with pytest.raises(UsageError, match="f, line 7: the chat template of tiny-random refuses"):
        encode_prompt(untaught, _prompt(prompt="x"))


def test_prompt_without_tokens_is_bad_input(untaught: OpenModel) -> None:
    """A template may leave nothing of a prompt, and then there is nothing to answer."""
    untaught.tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(UsageError, match="f, line 7: the prompt has no tokens"):
        encode_prompt(untaught, _prompt(prompt="x"))


def test_request_carries_id_tokens_and_params(tiny: OpenModel) -> None:
    """The request has the id, the tokens and the settings of its line."""
    params = SamplingParams(max_new_tokens=3)
    (request,) = LibraryServing().make_requests(tiny, _prompt(prompt="x", seed=5), params)
    assert ("a", replace(params, seed=5)) == (request.id, request.params)
    assert encode_prompt(tiny, _prompt(prompt="x")) == request.prompt_ids


def test_unknown_device_is_refused_by_name() -> None:
    """The device is refused before a model is opened."""
    LibraryServing().check_device("cpu")
    with pytest.raises(UsageError, match=r"'abacus'.*cpu"):
        LibraryServing().check_device("abacus")
