"""Is each token of a conversation computed once, whatever the pool has room for?

Eight conversations of six turns go to a server whose pool has room for two. Each turn sends all
turns before it again, with the answers that the server gave. The report says how many tokens of
prompts were computed, beside how many there were: all but the last turn's new ones could be known.
In exact mode the tokens of answers are computed once more, as part of the next prompt; with --fast
they aren't. Exits with 1 if more tokens were computed than that, but for ends of blocks.

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
from kvtide.serve.models import open_model
from kvtide.serve.supported import geometry_of

TURNS, CONVERSATIONS, AT_ONCE = 6, 8, 2
ANSWER_TOKENS = 24
BLOCK_TOKENS = 64
"""The most tokens at the end of a turn that may be computed again, since blocks are whole."""


@dataclass
class Conversation:
    """The messages so far, and what its prompts cost."""

    messages: list[dict[str, str]] = field(default_factory=list)
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
            talk.computed.append(count - answer.usage["prompt_tokens_details"]["cached_tokens"])

        for _ in range(TURNS):
            texts = [prompt_of(dice, dice.randint(40, 90)) for _ in conversations]
            await asyncio.gather(*map(take_turn, conversations, texts))
    return conversations


def judged(conversations: list[Conversation]) -> dict[str, Any]:
    """Adds up what was computed, and what had to be."""
    once = sum(talk.prompt_tokens[-1] for talk in conversations)
    sent = sum(sum(talk.prompt_tokens) for talk in conversations)
    computed = sum(sum(talk.computed) for talk in conversations)
    bound = once + CONVERSATIONS * (TURNS - 1) * BLOCK_TOKENS
    return {
        "sent_tokens": sent,
        "once_tokens": once,
        "computed_tokens": computed,
        "computed_share": round(computed / sent, 3),
        "computed_beside_once": round(computed / once, 3),
        "holds": computed <= bound,
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
            result[mode] = judged(asyncio.run(talk(server, server.model)))
            state = server.state()
        names = ("retractions", "recomputed_tokens", "offloaded_bytes", "restored_bytes")
        result[mode] |= {name: state[name] for name in names}
    tell(result, options.json)
    return not all(result[mode]["holds"] for mode in ("exact", "fast"))


if __name__ == "__main__":
    sys.exit(main())
