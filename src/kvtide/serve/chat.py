"""Turns prompts into tokens: a text as it is, or a conversation by the model's chat template.

The text of a special token in a prompt, such as `<|im_end|>`, stays text unless the caller asks
otherwise: only the template writes special tokens. A prompt can't end its own turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtide.errors import UsageError
from kvtide.serve.adapter import PreTrainedTokenizerBase
from kvtide.serve.models import OpenModel
from kvtide.serve.reasons import short_reason

_MARKS = ("\U000f0000", "\U000f0001")
"""transformers puts them around the text that stays text, and drops them from a prompt."""


class ToolsError(UsageError):
    """What keeps a model from being told of the tools that a prompt has."""


def encode_text(model: OpenModel, text: str, *, special_tokens: bool) -> list[int]:
    """The tokens of a text, and those that the tokenizer puts around every text.

    With `special_tokens` the text of a special token is that token. Raises UsageError if the
    tokenizer makes a special token of text all the same.
    """
    tokenizer = model.tokenizer
    ids: list[int] = tokenizer(text, split_special_tokens=not special_tokens)["input_ids"]
    if not special_tokens:
        special = set(tokenizer.all_special_ids) | _special(tokenizer).keys()
        if sum(token in special for token in ids) > tokenizer.num_special_tokens_to_add():
            raise _made_of_text(model)
    return ids


def encode_begun(model: OpenModel, mark: str, text: str) -> list[int]:
    """The tokens of `mark` and then `text`, with which an answer shall begin.

    The mark may be a token of its own, and text of special tokens in `text` stays text.
    """
    tokenizer = model.tokenizer
    ids: list[int] = tokenizer(mark, add_special_tokens=False)["input_ids"]
    rest = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return ids + list(rest)


def encode_chat(
    model: OpenModel,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    special_tokens: bool,
) -> list[int]:
    """The tokens of a conversation, up to where the model's answer begins.

    With `special_tokens` the text of a special token in it is that token. Raises UsageError if the
    template refuses the conversation, or if it leaves out the tools or the calls of tools; and if
    the tokenizer makes a special token of text all the same. It is a ToolsError where the tools are
    what can't be taken.
    """
    tokenizer = model.tokenizer
    if not special_tokens:
        _refuse_inseparable(model, messages, UsageError)
        _refuse_inseparable(model, tools, ToolsError)
    # A template is a program and may raise any error.
    try:
        conversation = _with_known_roles(tokenizer, messages, tools)
        _refuse_unseen(model, conversation, tools)
        ids: list[int] = tokenizer.apply_chat_template(
            conversation,
            tools=list(tools) or None,
            add_generation_prompt=True,
            return_dict=True,
            sanitize_control_tokens=not special_tokens,
        )["input_ids"]
    except UsageError:
        raise
    except Exception as error:
        if not special_tokens and _can_render(model, messages, tools):
            raise _made_of_text(model) from error
        kind = ToolsError if tools and _can_render(model, messages, ()) else UsageError
        raise kind(
            f"the chat template of {model.name} refuses this: {short_reason(error)}"
        ) from error
    return ids


def _with_known_roles(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """The messages; the developer's are the system's where the template knows no developer."""
    knows_developer = "developer" in tokenizer.get_chat_template(tools=list(tools) or None)
    return [
        {**message, "role": "system"}
        if message["role"] == "developer" and not knows_developer
        else dict(message)
        for message in messages
    ]


def _refuse_unseen(
    model: OpenModel, conversation: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> None:
    """Raises UsageError if the template gives the same text without the tools, or their calls."""
    without_calls = [
        {key: value for key, value in message.items() if key != "tool_calls"}
        for message in conversation
    ]
    others = {"tools": (conversation, ()), "tool_calls": (without_calls, tools)}
    if not tools:
        del others["tools"]
    if without_calls == conversation:
        del others["tool_calls"]
    text = rendered(model, conversation, tools) if others else None
    for name, other in others.items():
        try:
            is_seen = rendered(model, *other) != text
        except Exception:  # the template needs what was left out, so it reads it
            continue
        if not is_seen:
            kind = ToolsError if name == "tools" else UsageError
            raise kind(
                f"the chat template of {model.name} leaves {name!r} out, so the model wouldn't "
                "see them; choose a model that is made for tools"
            )


def _can_render(
    model: OpenModel, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether the template itself takes the conversation, so that only the tokens are a problem."""
    try:
        rendered(model, _with_known_roles(model.tokenizer, messages, tools), tools)
    except Exception:  # a template is a program and may raise any error
        return False
    return True


def _made_of_text(model: OpenModel) -> UsageError:
    return UsageError(
        f"the tokenizer of {model.name} makes a special token of text in this prompt; "
        "change the text, or allow it with --special-tokens"
    )


def rendered(
    model: OpenModel,
    conversation: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> str:
    """The text that the chat template makes of a conversation. May raise any error."""
    text: str = model.tokenizer.apply_chat_template(
        list(conversation), tools=list(tools) or None, add_generation_prompt=True, tokenize=False
    )
    return text


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The special tokens' texts by their ids."""
    decoder = tokenizer.added_tokens_decoder
    return {number: token.content for number, token in decoder.items() if token.special}


def _refuse_inseparable(model: OpenModel, value: object, kind: type[UsageError]) -> None:
    """Raises an error of the kind for text that transformers wouldn't keep as it is: see `_MARKS`.

    It leaves the names in objects alone, too, such as those of a tool's parameters.
    """
    special = _special(model.tokenizer).values()
    for text, is_name in _strings(value):
        for mark in _MARKS:
            if mark in text:
                raise kind(
                    f"the character U+{ord(mark):X} is in the prompt, and it is needed to keep "
                    "special tokens apart; remove it, or give them up with --special-tokens"
                )
        found = next((word for word in special if word in text), None) if is_name else None
        if found is not None:
            raise kind(
                f"a name in the prompt has the text of the special token {found!r}; "
                "change it, or allow it with --special-tokens"
            )


def _strings(value: object) -> list[tuple[str, bool]]:
    """All strings in a JSON value, and whether each is the name of an object's member."""
    found: list[tuple[str, bool]] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            found.append((item, False))
        elif isinstance(item, Mapping):
            found += [(name, True) for name in item]
            waiting += item.values()
        elif isinstance(item, Sequence):
            waiting += item
    return found
