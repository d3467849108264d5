"""Every field of OpenAI's API that its official client knows does what docs/serve.md says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as of_completions
from openai.types.chat import completion_create_params as of_chats

from kvtide.server.errors import ApiError
from kvtide.server.intake import Asked, Intake
from kvtide.server.tenants import Tenant
from serve.harness import tiny

DOCUMENT = Path(__file__).parents[2] / "docs" / "serve.md"
BODIES: Mapping[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Hi"}], "seed": 1},
    "completions": {"prompt": "Hi", "seed": 1},
}
WITHOUT_EFFECT: Mapping[str, object] = {
    "best_of": 1,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "prediction": {"type": "content", "content": "Hi"},
    "presence_penalty": 0.0,
    "prompt_cache_key": "a",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "response_format": {"type": "text"},
    "safety_identifier": "a",
    "service_tier": "auto",
    "store": True,
    "suffix": "",
    "user": "a",
    "verbosity": "medium",
}
"""A value that may be given to each of these fields."""
WITH_EFFECT: Mapping[str, object] = {
    "audio": {"format": "wav", "voice": "alloy"},
    "best_of": 3,
    "frequency_penalty": 0.5,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "logit_bias": {"5": 1},
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "presence_penalty": -0.5,
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "suffix": "end",
    "verbosity": "low",
    "web_search_options": {},
}
"""A value that must be refused."""


def _fields_of(api: str) -> set[str]:
    """Returns the fields that the client knows."""
    kinds = of_chats if api == "chat" else of_completions
    names = ("CompletionCreateParamsNonStreaming", "CompletionCreateParamsStreaming")
    return {field for name in names for field in vars(kinds)[name].__annotations__}


def _documented() -> Iterator[tuple[str, str, str]]:
    """Yields the API, the field, and what becomes of it, from the document's table."""
    lines = DOCUMENT.read_text("utf-8").split("| field | in |")[1].split("\n\n")[0].splitlines()
    for line in lines[2:]:
        names, where, said = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall("`([a-z_]+)`", names):
            for api in BODIES if where == "both" else [where]:
                yield api, name, said


DOCUMENTED = list(_documented())


def _read(api: str, **more: object) -> Asked:
    """Returns what a call with a plain body and these fields asks for."""
    raw = json.dumps({**BODIES[api], **more}).encode()
    intake = Intake(tiny(), "tiny", 512)
    with contextlib.closing(intake):
        return asyncio.run(intake.read(raw, is_chat=api == "chat", tenant=Tenant(), most=8))


def _refused(api: str, **more: object) -> str | None:
    """Returns the field that the error names, which must be there."""
    with pytest.raises(ApiError) as caught:
        _read(api, **more)
    assert caught.value.status == 400
    return caught.value.param


@pytest.mark.parametrize("api", BODIES)
def test_each_field_of_the_client_is_documented_once(api: str) -> None:
    """So nothing is ignored in silence when the API gets new fields."""
    documented = [name for where, name, _ in DOCUMENTED if where == api]
    assert len(documented) == len(set(documented))
    assert _fields_of(api) <= set(documented) <= _fields_of(api) | _fields_of("chat")


@pytest.mark.parametrize(("api", "name", "said"), DOCUMENTED)
def test_what_becomes_of_a_field_is_as_documented(api: str, name: str, said: str) -> None:
    """What is obeyed is checked; what is taken changes nothing; the rest is refused by its name."""
    if said == "obeyed":
        refused = _refused(api, **{"stream": True, name: {"a": 1}})
        assert refused is not None
        assert name == refused.partition(".")[0]
        return
    if said.startswith("refused"):
        assert name == _refused(api, **{name: WITH_EFFECT[name]})
    if said != "refused":
        (plain,), (found,) = (
            _read(api).requests,
            _read(api, **{name: WITHOUT_EFFECT[name]}).requests,
        )
        assert (plain.prompt_ids, plain.params, plain.key) == (
            found.prompt_ids,
            found.params,
            found.key,
        )


def test_padding_that_isnt_there_can_be_refused_alone() -> None:
    """A client that needs its events to have equal lengths must know that they haven't."""
    assert _read("chat", stream=True, stream_options={"include_obfuscation": False}).is_stream
    name = "include_obfuscation"
    refused = _refused("chat", stream=True, stream_options={name: True})
    assert f"stream_options.{name}" == refused
