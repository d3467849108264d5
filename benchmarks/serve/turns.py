"""Is each token of a conversation computed once, whatever the pool has room for?

Eight conversations of six turns go to a server whose pool has room for two. Each turn sends all
turns before it again, with the answers that the server gave. The report says how many tokens of
prompts were computed, beside how many different ones there were: a token is another if it, or any
before it, differs. In exact mode the tokens of answers are computed once more, as part of the next
prompt; with --fast they are known, so `least_tokens` is less.

Conversations begin alike. Where two of them part in one step, neither waits for the other to have
less than 8 tokens more in common: that would cost each a step. So these few may be computed twice,
once for each conversation but the first. Exits with 1 if more were, in one of the modes.

  python benchmarks/serve/turns.py [--model smollm2] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servers import Answer, Server, client_of, kvtide_server, prompt_of, stream, tell

from kvtide.machine import machine_facts
from kvtide.serve.chat import encode_chat
from kvtide.serve.models import OpenModel, open_model
from kvtide.serve.supported import geometry_of

TURNS, CONVERSATIONS, AT_ONCE = 6, 8, 2
ANSWER_TOKENS = 24
PARTING_TOKENS = 7
"""The most tokens that are computed twice where a conversation parts from the others."""


@dataclass
class Conversation:
    """The messages so far, and what its prompts cost."""

    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    """The tokens of each answer."""
    prompt_tokens: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)


async def talk(server: Server, model: str) -> list[Conversation]:
    """Takes all turns; each turn goes to all conversations at once."""
    dice = random.Random(11)
    conversations = [Conversation() for _ in range(CONVERSATIONS)]
    async with client_of(server) as client:

        async def take_turn(talk: Conversation, text: str) -> None:
            talk.messages.append({"role": "user", "content": text})
            body = {
                "model": model,
                "messages": talk.messages,
                "max_tokens": ANSWER_TOKENS,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            answer: Answer = await stream(client, "/v1/chat/completions", body)
            talk.messages.append({"role": "assistant", "content": answer.text})
            count = answer.usage["prompt_tokens"]
            talk.prompt_tokens.append(count)
            talk.answers.append(answer.usage["completion_tokens"])
            talk.computed.append(count - answer.usage["prompt_tokens_details"]["cached_tokens"])

        for _ in range(TURNS):
            texts = [prompt_of(dice, dice.randint(40, 90)) for _ in conversations]
            await asyncio.gather(*map(take_turn, conversations, texts))
    return conversations


def judged(source: OpenModel, conversations: list[Conversation], *, fast: bool) -> dict[str, Any]:
    """Adds up what was computed, and what had to be."""
    sent = sum(sum(talk.prompt_tokens) for talk in conversations)
    computed = sum(sum(talk.computed) for talk in conversations)
    once = least = 0
    known: set[tuple[int, ...]] = set()
    of_answers: set[tuple[int, ...]] = set()
    for turn in range(TURNS):
        for talk in conversations:
            messages = talk.messages[: 2 * turn + 1]
            ids = encode_chat(source, messages, special_tokens=False)
            assert talk.prompt_tokens[turn] == len(ids), "the server reads the same tokens"
            new = {tuple(ids[: count + 1]) for count in range(len(ids))} - known
            once += len(new)
            least += len(new - of_answers)
            known |= new
            if fast and turn + 1 < TURNS:
                longer = encode_chat(source, talk.messages[: 2 * turn + 3], special_tokens=False)
                # An answer's last token has no KV.
                stored = range(len(ids), len(ids) + talk.answers[turn] - 1)
                of_answers |= {tuple(longer[: count + 1]) for count in stored}
    return {
        "sent_tokens": sent,
        "once_tokens": once,
        "least_tokens": least,
        "computed_tokens": computed,
        "computed_share": round(computed / sent, 3),
        "computed_beside_once": round(computed / once, 3),
        "each_once_but_partings": computed <= least + (CONVERSATIONS - 1) * PARTING_TOKENS,
    }


def main() -> int:
    """Reads the options, measures, and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    source = open_model(options.model, dtype="bfloat16")
    token_bytes = geometry_of(source.model.config, source.model.dtype, 16).token_bytes
    longest = TURNS * (2 * 90 + ANSWER_TOKENS + 16)
    memory = ("--kv-memory", str(AT_ONCE * longest * token_bytes), "--host-memory", "1GiB")
    result: dict[str, Any] = {"machine": machine_facts(), "pool_tokens": AT_ONCE * longest}
    for mode in ("exact", "fast"):
        with kvtide_server(options.model, *memory, f"--{mode}") as server:
            talks = asyncio.run(talk(server, server.model))
            result[mode] = judged(source, talks, fast=mode == "fast")
            state = server.state()
        names = ("retractions", "recomputed_tokens", "offloaded_bytes", "restored_bytes")
        result[mode] |= {name: state[name] for name in names}
    tell(result, options.json)
    return not all(result[mode]["each_once_but_partings"] for mode in ("exact", "fast"))


if __name__ == "__main__":
    sys.exit(main())
