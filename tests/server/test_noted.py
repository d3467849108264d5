from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest
from h11 import LocalProtocolError

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
