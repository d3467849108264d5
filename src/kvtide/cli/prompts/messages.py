"""Checks the messages of a conversation."""

from __future__ import annotations

from kvtide.cli.prompts.fields import check_text, kind_of, quote, refuse
from kvtide.cli.prompts.prompt import Message

ROLES = ("system", "user", "assistant")


def check_messages(value: object, where: str) -> tuple[Message, ...]:
    """The messages as chat templates read them."""
    if not isinstance(value, list):
        refuse(where, f"'messages' is {kind_of(value)}, not a list")
    if not value:
        refuse(where, "'messages' is empty")
    return tuple(
        _check_message(message, f"messages[{index}]", where) for index, message in enumerate(value)
    )


def _check_message(value: object, name: str, where: str) -> Message:
    if not isinstance(value, dict):
        refuse(where, f"{name} is {kind_of(value)}, not an object with 'role' and 'content'")
    for key in ("role", "content"):
        if key not in value:
            refuse(where, f"{name} lacks a {key!r}")
    for key in value:
        if key not in ("role", "content"):
            refuse(where, f"{name} has an unknown key {quote(key)}; known are role, content")
    role = check_text(value["role"], f"{name}.role", where)
    if role not in ROLES:
        refuse(where, f"{name}.role is {quote(role)}; known are {', '.join(ROLES)}")
    return {"role": role, "content": check_text(value["content"], f"{name}.content", where)}
