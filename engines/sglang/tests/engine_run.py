"""Runs a real SGLang engine through a scenario, in its own process.

  python engine_run.py scenario.json results.json

A scenario is {"server": arguments of sglang.Engine, "steps": [[name, argument], …]}. The results
are a list with an entry for each step.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any


async def _answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(await engine.async_generate(**request))
    except ValueError as error:  # SGLang raises it for a request that it aborts with an error
        return {"error": str(error)}


async def generate(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Asks all requests at once, and returns their answers."""
    return list(await asyncio.gather(*(_answer(engine, request) for request in requests)))


async def alone(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Asks one request after the other without a cached prefix, and returns the answers."""
    answers = []
    for request in requests:
        answers += await generate(engine, [request])
        await engine.tokenizer_manager.flush_cache()
    return answers


async def sample(engine: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Asks all requests at once, then scores each answer as a part of a prompt."""
    answers = await generate(engine, requests)
    prompts = [
        {
            "input_ids": [*request["input_ids"], *answer["output_ids"]],
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        for request, answer in zip(requests, answers, strict=True)
    ]
    return {"answers": answers, "scores": await alone(engine, prompts)}


async def prolong(engine: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Asks all requests at once, then each with half of its answer in its cached prompt."""
    answers = await generate(engine, requests)
    halves = []
    for request, answer in zip(requests, answers, strict=True):
        first = answer["output_ids"][: len(answer["output_ids"]) // 2]
        rest = len(answer["output_ids"]) - len(first)
        halves.append(
            {
                **request,
                "input_ids": [*request["input_ids"], *first],
                "sampling_params": {**request["sampling_params"], "max_new_tokens": rest},
            }
        )
    return {"answers": answers, "rests": await generate(engine, halves)}


async def leave(engine: Any, requests: list[dict[str, Any]]) -> None:
    """Starts requests, but doesn't wait for their answers: the engine shuts down meanwhile."""
    tasks = [asyncio.create_task(engine.async_generate(**request)) for request in requests]
    await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def rest(engine: Any, seconds: float) -> None:
    """Does nothing for a while, so that the scheduler is idle."""
    await asyncio.sleep(seconds)


async def ask(engine: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Asks all requests at once, and returns for each its answer or SGLang's error."""
    tasks = {
        request["rid"]: asyncio.create_task(engine.async_generate(**request))
        for request in requests
    }
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    return {
        rid: {"error": str(task.exception())} if task.exception() else task.result()
        for rid, task in tasks.items()
    }


async def metrics(engine: Any, _: None) -> str:
    """Returns the text of the server's endpoint for Prometheus."""
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return str(generate_latest(registry).decode())


async def call(engine: Any, wanted: dict[str, Any]) -> Any:
    """Calls a coroutine of a module of the tests: {"function": "module:name", …its arguments}."""
    return await resolve_name(wanted.pop("function"))(engine, **wanted)


STEPS = {
    step.__name__: step
    for step in (generate, alone, sample, prolong, leave, rest, ask, metrics, call)
}


def main(scenario_path: str, results_path: str) -> None:
    """Runs the scenario, and shuts the engine down in any case."""
    import sglang

    scenario = json.loads(Path(scenario_path).read_text())
    engine = sglang.Engine(**scenario["server"])
    try:
        results = [
            engine.loop.run_until_complete(STEPS[name](engine, argument))
            for name, argument in scenario["steps"]
        ]
    finally:
        engine.shutdown()
    Path(results_path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
