"""Prompt: what one line of the prompts asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as field_of
from typing import Any

Message = Mapping[str, Any]
"""A turn of a conversation, as chat templates read it: `role`, `content`, and what a tool needs."""


@dataclass(frozen=True)
class Prompt:
    """One prompt and its settings."""

    where: str
    """File and line, for errors: `prompts.jsonl, line 3`."""
    id: str
    messages: tuple[Message, ...]
    """The conversation. A plain `prompt` is one message of the user. None if it has `token_ids`."""
    is_chat: bool
    """Whether the line has `messages`, which only a model with a chat template can answer."""
    is_openai: bool = False
    """Whether the line has OpenAI's batch format, and so is answered in it. A `prompt` in that
    format is continued as it is, without the chat template."""
    token_ids: tuple[int, ...] = ()
    """The prompt's tokens, where the line gives these and no text. The model may lack some."""
    field: str = "prompt"
    """Where in its line the prompt is, for errors: `messages`, or `prompt[2]`."""
    tools: tuple[Message, ...] = ()
    """The tools that the model is told of, as OpenAI's API describes them."""
    settings: Mapping[str, Any] = field_of(default_factory=dict)
    """The fields of SamplingParams that the line sets. For the others the options hold."""
    sample_count: int | None = None
    """How many answers the line asks for. None: as many as the option says."""
    place: int = 0
    """The prompt's number among all prompts, from 0; the seeds of its requests depend on it."""

    @property
    def is_raw(self) -> bool:
        """Whether the model continues the text itself, without the chat template."""
        return self.is_openai and not self.is_chat

    def sample_ids(self, default_count: int) -> list[str]:
        """The id of the request for each answer; the first has the prompt's own id."""
        count = default_count if self.sample_count is None else self.sample_count
        return [self.id] + [f"{self.id}#{sample}" for sample in range(1, count)]
