"""How long answers take, as the metrics have it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.serve.request import Request
from kvtide.server.calls import Call
from serve.harness import check_rows_once
from support.serving import Served, serve_and


def test_each_answer_has_times_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiting counts from the call's arrival on, and tokens of an earlier server don't."""
    check_rows_once(monkeypatch)
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("kvtide.server.calls.time", clock)

    async def test(server: Served) -> None:
        nonlocal now
        short, long, resumed = requests = [Request(name, [5]) for name in ("a", "b", "c")]
        resumed.output_ids += [1] * 50
        call = Call(requests, 90.0)
        call.begin()
        assert 50 == call.resumed_tokens
        for second in range(4):
            now = 101.0 + second
            for request in requests if second < 2 else [long]:
                request.output_ids.append(1)
            if second == 1:
                short.finish_reason = resumed.finish_reason = "stop"
            call.publish()
        now, long.finish_reason = 200.0, "stop"
        call.publish()
        server.service.metrics.note_end(call)
        text = (await server.client.get("/metrics")).text
        lines: dict[str, Any] = dict(x.rsplit(" ", 1) for x in text.splitlines() if x[0] != "#")
        assert 3 * 11.0 == float(lines["kvtide:time_to_first_token_seconds_sum"])
        assert 3 * 1.0 == float(lines["kvtide:time_per_token_seconds_sum"])
        assert "3.0" == lines["kvtide:time_per_token_seconds_count"]

    serve_and(test)
