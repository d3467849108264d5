from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest
from h11 import LocalProtocolError

from kvtide.server import noted
from kvtide.server.noted import Noted
from serve.harness import check_rows_once
from support.serving import Served, serve_and


@pytest.mark.parametrize(
    ("error", "statuses"), [(LocalProtocolError("MUST_CLOSE"), []), (KeyError("secret"), [500])]
)
def test_a_client_that_broke_the_protocol_is_no_failure(
    error: Exception, statuses: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent to it any more; any other error is the server's, and told so."""
    check_rows_once(monkeypatch)
    sent: list[Any] = []

    async def broken(*_: Any) -> None:
        raise error

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def test(server: Served) -> None:
        scope = {"type": "http", "method": "GET", "headers": []}
        await Noted(broken, server.service)(scope, receive, send)

    serve_and(test)
    assert statuses == [message["status"] for message in sent if "status" in message]
    assert not any(b"secret" in message.get("body", b"") for message in sent)


@pytest.mark.parametrize(
    ("method", "expected"), [("GET", "GET other 499, "), ("X" * 1000, "other other 499, ")]
)
def test_a_client_that_left_is_told_as_such_and_its_words_are_not(
    method: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log and the metrics have a status that says so, and a method only if it's a known one."""
    check_rows_once(monkeypatch)
    lines: list[str] = []
    monkeypatch.setattr(noted.logger, "info", lambda text, *values: lines.append(text % values))

    async def unanswered(*_: Any) -> Any:
        pass

    async def test(server: Served) -> None:
        scope = {"type": "http", "method": method, "headers": []}
        await Noted(unanswered, server.service)(scope, unanswered, unanswered)
        counts = server.service.metrics.text().decode()
        assert 'kvtide:responses_total{route="other",status="499"} 1.0' in counts

    serve_and(test)
    (line,) = lines
    assert line.startswith(expected)
