"""How much sooner does the first token come if the prompt's beginning is in host memory?

A prompt of 900 tokens is answered, other prompts take its place in the pool, and it is sent again
with another last word: its beginning comes back from the arena. Each round uses a prompt of its
own, and the time of the first answer is that of computing it. Both times are the client's, with
HTTP and all; beside them the report has the server's processor time for the whole call, which other
programs disturb less. In exact mode and with --fast; figures are medians.

  python benchmarks/serve/ttft.py [--model smollm2] [--tokens 900] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from pathlib import Path
from typing import Any

from servers import Answer, Ask, Server, client_of, complete, kvtide_server, prompt_of, tell

from kvtide.machine import machine_facts
from kvtide.serve.models import OpenModel, open_model
from kvtide.serve.supported import geometry_of


def prompt_with(source: OpenModel, dice: random.Random, token_count: int) -> str:
    """A prompt of about that many tokens."""
    prompt = prompt_of(dice, 2 * token_count)
    ids = source.tokenizer(prompt)["input_ids"][:token_count]
    text: str = source.tokenizer.decode(ids)
    return text


async def measure(server: Server, source: OpenModel, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds to the first token: computed, and with the beginning in the arena."""
    dice = random.Random(7)
    computed, restored, cached = [], [], set()
    async with client_of(server) as client:

        async def timed(prompt: str) -> tuple[float, float, Answer]:
            before = server.processor_s
            answer = await complete(client, server.model, Ask(prompt, 1))
            return answer.first_s, server.processor_s - before, answer

        await timed("warm up")
        for _ in range(rounds):
            prompt = prompt_with(source, dice, tokens)
            computed.append(await timed(prompt))
            for _ in range(2):
                await timed(prompt_with(source, dice, tokens))
            restored.append(await timed(f"{prompt} end"))
            usage = restored[-1][2].usage
            cached.add(usage["prompt_tokens_details"]["cached_tokens"])
    result: dict[str, Any] = {"cached_tokens": sorted(cached)}
    for field, unit in enumerate(("s", "processor_s")):
        first, second = (
            statistics.median(times[field] for times in part) for part in (computed, restored)
        )
        result |= {
            f"computed_{unit}": round(first, 4),
            f"restored_{unit}": round(second, 4),
            f"ratio_{unit}": round(first / max(second, 0.001), 1),
        }
    return result


def main() -> None:
    """Reads the options, measures, and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    source = open_model(options.model, dtype="bfloat16")
    token_bytes = geometry_of(source.model.config, source.model.dtype, 16).token_bytes
    memory = ("--kv-memory", str((options.tokens + 100) * token_bytes), "--host-memory", "1GiB")
    result: dict[str, Any] = {"machine": machine_facts(), "prompt_tokens": options.tokens}
    for mode in ("exact", "fast"):
        with kvtide_server(options.model, *memory, f"--{mode}") as server:
            result[mode] = asyncio.run(measure(server, source, options.tokens, options.rounds))
    tell(result, options.json)


if __name__ == "__main__":
    main()
