"""What the engine's thread tells those who wait for answers."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvtide.server.calls import Call
from serve.harness import check_rows_once
from support.serving import Served, serve_and


def test_a_step_wakes_only_calls_that_have_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that wait hear that they are taken, and then nothing until they have a token."""
    check_rows_once(monkeypatch)
    woken: Counter[Call] = Counter()

    def wake(call: Call) -> None:
        woken[call] += 1
        call._changed.set()

    monkeypatch.setattr(Call, "wake", wake)

    async def test(server: Served) -> None:
        asks = [server.complete(prompt="Hi", max_tokens=9, temperature=0) for _ in range(3)]
        assert [200] * 3 == [answer.status_code for answer in await asyncio.gather(*asks)]
        assert server.engine.stats.prompt_tokens > 0
        assert [1 + 9] * 3 == [*woken.values()]

    serve_and(test, max_running=1)
