"""What do 64 streams at once get out of a server whose pool has room for 6?

One in five streams is cancelled by its client at a random moment. The same load goes in turns to
`kvtide serve`, exact and with --fast, to both with `--on-pressure recompute`, and to `transformers
serve` with continuous batching, which all get pools of the same size. Each round begins with
another one. Beside seconds the report has the processor's, of the server alone, since other
programs and the clients compute, too. Then each request goes alone to a server with room for all:
in exact mode its answer must be the same. Exits with 1 if one differs, if a server holds something
afterwards, or if an answer fails.

By default no prompt has anything to do with another one, so all that KV in host memory can spare is
what retracted requests would compute again. With `--turns` each stream is a conversation, whose
prompts begin with all that was said before. Meanwhile others had the pool.

  python benchmarks/serve/load.py [--rounds 3] [--only exact] [--json FILE]
  python benchmarks/serve/load.py --turns 4 --words 300 --longest 16 [...]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servers import (
    Answer,
    Ask,
    Server,
    client_of,
    converse,
    kvtide_server,
    prompt_of,
    tell,
    transformers_server,
)

from kvtide.machine import machine_facts
from kvtide.serve.find import find_model
from kvtide.serve.models import open_model
from kvtide.serve.supported import geometry_of
from kvtide.server.events import FREE, KEPT

PAGE = 16
_COUNTS = (
    *("retractions", "resumes", "recomputed_tokens", "offloaded_bytes", "restored_bytes"),
    *("prompt_tokens", "cached_tokens"),
)
_FLAGS = {
    "exact": (),
    "exact, recompute": ("--on-pressure", "recompute"),
    "fast": ("--fast",),
    "fast, recompute": ("--fast", "--on-pressure", "recompute"),
}
_ONLY = {
    "kvtide": ("exact",),
    "recompute": ("exact", "exact, recompute"),
    "exact": ("exact", "transformers", "exact, recompute"),
}
_PAIRS = (
    ("exact", "exact, recompute"),
    ("exact", "transformers"),
    ("fast", "fast, recompute"),
    ("fast", "transformers"),
)


def make_load(
    count: int, seed: int, longest: int, most_words: int = 0, turns: int = 1
) -> list[Ask]:
    """Makes streams of mixed lengths; one in five ends early.

    Answers have up to `longest` tokens, and first prompts up to `most_words` words, by default half
    as many. In each further turn a stream says a few words more.
    """
    dice = random.Random(seed)
    asks = []
    for number in range(count):
        tokens = dice.randint(longest // 4, longest)
        cancel = dice.randint(1, tokens // 2) if number % 5 == 4 else None
        words = dice.randint(5, most_words or longest // 2)
        prompt = prompt_of(dice, words)
        more = tuple(prompt_of(dice, dice.randint(5, 16)) for _ in range(turns - 1))
        asks.append(Ask(prompt, tokens, cancel, more=more))
    return asks


def most_tokens(tokenizer: Any, ask: Ask) -> int:
    """How many tokens a stream has at its end, if no answer ends early."""
    said = " ".join((ask.prompt, *ask.more))
    return len(tokenizer(said)["input_ids"]) + (1 + len(ask.more)) * ask.max_tokens


async def drive(server: Server, asks: Sequence[Ask]) -> tuple[list[Answer], float]:
    """Sends all streams at once; their answers, and how long it took."""
    began = time.perf_counter()
    async with client_of(server) as client:
        tasks = (converse(client, server.model, ask) for ask in asks)
        answers = await asyncio.gather(*tasks)
    return answers, time.perf_counter() - began


async def drive_alone(server: Server, asks: Sequence[Ask]) -> list[Answer]:
    """Sends one after another."""
    async with client_of(server) as client:
        return [await converse(client, server.model, ask) for ask in asks]


def figures_of(
    asks: Sequence[Ask], answers: Sequence[Answer], seconds: float, processor_s: float
) -> dict[str, Any]:
    """Tokens a second of the answers that ended, and the streams' times."""
    ended = [answer for ask, answer in zip(asks, answers, strict=True) if ask.cancel_after is None]
    tokens = sum(answer.usage.get("completion_tokens", 0) for answer in ended)
    firsts = sorted(answer.first_s for answer in ended)
    return {
        "seconds": round(seconds, 2),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 2),
        "tokens_per_processor_second": round(tokens / processor_s, 2),
        "median_first_s": round(firsts[len(firsts) // 2], 2),
    }


def held_pages(state: dict[str, Any]) -> int:
    """Pages that requests hold. Those that are kept for later requests don't count."""
    return sum(count for _, count, holder in state["pages"] if holder not in (FREE, KEPT))


def problems_of(server: Server, asks: Sequence[Ask], answers: Sequence[Answer]) -> list[str]:
    """What is wrong after the load: a stream without its end, or something that is held."""
    found = [
        f"stream {number} has no end"
        for number, (ask, answer) in enumerate(zip(asks, answers, strict=True))
        if ask.cancel_after is None and answer.finish_reason is None
    ]
    until = time.monotonic() + 10
    while True:
        state = server.state()
        held = held_pages(state)
        left = state["running_count"] + state["retracted_count"] + state["waiting"]
        if not (held or left):
            return found
        if time.monotonic() > until:
            return [*found, f"{held} pages and {left} requests are held after the end"]
        time.sleep(0.1)


def measure(server: Server, asks: Sequence[Ask]) -> tuple[dict[str, Any], list[Answer]]:
    """The load's figures, and its answers."""
    asyncio.run(drive_alone(server, [Ask("warm up", 4)]))
    before = server.processor_s
    answers, seconds = asyncio.run(drive(server, asks))
    return figures_of(asks, answers, seconds, server.processor_s - before), answers


class Round:
    """The same load, at one server after the other."""

    def __init__(self, options: argparse.Namespace, asks: Sequence[Ask], page_count: int) -> None:
        self.problems: list[str] = []
        self.answers: list[Answer] = []
        """The answers of exact mode."""
        self.figures: dict[str, dict[str, Any]] = {}
        self._options = options
        self._asks = asks
        self._page_count = page_count

    def at(self, name: str, memory: Sequence[str]) -> None:
        """Measures a server by its name in the report."""
        if name == "transformers":
            self._at_transformers()
        else:
            self._at_kvtide(name, *memory, *_FLAGS[name])

    def _at_kvtide(self, name: str, *flags: str) -> None:
        with kvtide_server(self._options.model, *flags) as server:
            figures, answers = measure(server, self._asks)
            self.problems += problems_of(server, self._asks, answers)
            state = server.state()
        self.figures[name] = figures | {key: state[key] for key in _COUNTS}
        if "--fast" in flags:
            return
        if self.answers:
            self.problems += differences(self._asks, self.answers, answers, "in a later run")
        self.answers = answers

    def _at_transformers(self) -> None:
        folder = str(find_model(self._options.model, progress=lambda *_: None).path)
        options = ("--cb-block-size", str(PAGE), "--cb-num-blocks", str(self._page_count))
        with transformers_server(folder, *options) as server:
            self.figures["transformers"], _ = measure(server, self._asks)


def options_of() -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--answers", type=int, default=6, help="for how many the pool has room")
    parser.add_argument("--longest", type=int, default=64, help="the most tokens of an answer")
    parser.add_argument("--words", type=int, default=0, help="the most words of a prompt")
    parser.add_argument("--turns", type=int, default=1, help="how often each stream asks")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", choices=[*_ONLY], help="exact mode alone, beside recompute, or all but --fast"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.longest < 10 or 0 < options.words < 5:
        parser.error("--longest must be at least 10, and --words 0 or at least 5")
    return options


def main() -> int:
    """Measures, and prints."""
    options = options_of()
    source = open_model(options.model, dtype="bfloat16")
    asks = make_load(options.streams, options.seed, options.longest, options.words, options.turns)
    counts = [most_tokens(source.tokenizer, ask) for ask in asks]
    page_count = options.answers * -(-max(counts) // PAGE)
    token_bytes = geometry_of(source.model.config, source.model.dtype, PAGE).token_bytes
    memory = ("--kv-memory", str(page_count * PAGE * token_bytes), "--page-size", str(PAGE))
    names = _ONLY.get(options.only, (*_FLAGS, "transformers"))
    if "transformers" in names and find_model(options.model, progress=lambda *_: None).path is None:
        raise SystemExit(
            f"transformers has no {options.model} to serve; choose an --only without it"
        )
    rounds = [Round(options, asks, page_count) for _ in range(options.rounds)]
    for number, one in enumerate(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            one.at(name, memory)
    problems = [problem for one in rounds for problem in one.problems]
    whole = [ask for ask in asks if ask.cancel_after is None]
    with kvtide_server(options.model, "--kv-memory", str(4 * max(counts) * token_bytes)) as server:
        alone = iter(asyncio.run(drive_alone(server, whole)))
    expected = [Answer() if ask.cancel_after is not None else next(alone) for ask in asks]
    for one in rounds:
        problems += differences(asks, one.answers, expected, "alone")
    result = {
        "machine": machine_facts(),
        "streams": options.streams,
        "turns": options.turns,
        "pool_tokens": page_count * PAGE,
        "longest_tokens": max(counts),
        "answers_compared_with_alone": len(whole),
        "ratios": ratios_of([one.figures for one in rounds]),
        "rounds": [one.figures for one in rounds],
        "problems": problems,
    }
    tell(result, options.json)
    return bool(problems)


def ratios_of(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """The medians over rounds of how much faster kvtide is than another, by both clocks."""
    found: dict[str, dict[str, float]] = {}
    for ours, other in _PAIRS:
        if ours not in rounds[0] or other not in rounds[0]:
            continue
        found[f"{ours} : {other}"] = {
            unit: round(statistics.median(one[ours][unit] / one[other][unit] for one in rounds), 2)
            for unit in ("tokens_per_second", "tokens_per_processor_second")
        }
    return found


def differences(
    asks: Sequence[Ask], answers: Sequence[Answer], others: Sequence[Answer], how: str
) -> list[str]:
    """Which of the answers that ended are others."""
    return [
        f"answer {number} is another one {how}: {answer.text[:60]!r}, {other.text[:60]!r}"
        for number, (ask, answer, other) in enumerate(zip(asks, answers, others, strict=True))
        if ask.cancel_after is None
        and (answer.text, answer.finish_reason) != (other.text, other.finish_reason)
    ]


if __name__ == "__main__":
    sys.exit(main())
