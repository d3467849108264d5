"""One tenant leaves room for the others."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from typing import Any

import pytest

from kvtide.server.errors import ApiError
from kvtide.server.feed import MOST_WATCHERS
from kvtide.server.quota import Quota
from kvtide.server.tenants import Tenant
from serve.harness import check_rows_once
from support.serving import Served, serve_and

KEYS = ("first-key", "second-key")
FIRST, SECOND = ({"authorization": f"Bearer {key}"} for key in KEYS)


@pytest.fixture(autouse=True)
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Lets the engines of these tests share a self-check."""
    check_rows_once(monkeypatch)
    return monkeypatch


def test_places_are_taken_and_given_back() -> None:
    """The error says which limit is reached; one that refuses takes nothing."""
    first, second, third = (Tenant(name) for name in (b"1", b"2", b"3"))
    quota = Quota("things", 5, 3, "wait")
    with ExitStack() as taken:
        taken.enter_context(quota.taken(first, 2))
        for tenant, count, code in ((first, 2, "key_limit"), (second, 4, "queue_full")):
            with pytest.raises(ApiError) as caught, quota.taken(tenant, count):
                pass
            assert (429, code) == (caught.value.status, caught.value.code)
            assert caught.value.retry_after_s
        taken.enter_context(quota.taken(second, 3))
        with pytest.raises(ApiError, match="5 things, of 5 at most; wait"):
            quota.check(third)
    assert 0 == quota.count
    assert {} == quota._taken


@pytest.mark.parametrize(
    ("keys", "max_per_key", "most"), [(KEYS, None, 2), (KEYS, 3, 3), (KEYS[:1], None, 4)]
)
def test_a_key_has_its_share_of_the_answers(
    keys: tuple[str, ...], max_per_key: int | None, most: int, patch: pytest.MonkeyPatch
) -> None:
    """Calls count from their arrival on. Another key's are taken meanwhile."""
    released = threading.Event()

    async def test(server: Served) -> None:
        intake = server.service.intake
        read = intake._read

        def read_later(*arguments: Any) -> Any:
            released.wait(20)
            return read(*arguments)

        patch.setattr(intake, "_read", read_later)

        def call(headers: dict[str, str]) -> asyncio.Task[Any]:
            body = {"prompt": "Hi", "max_tokens": 1}
            post = server.client.post("/v1/completions", json=body, headers=headers)
            return asyncio.create_task(post)

        calls = [call(FIRST) for _ in range(most + 1)]
        done, waiting = await asyncio.wait(calls, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        (refused,) = [task.result() for task in done]
        code = "key_limit" if most < 4 else "queue_full"
        assert (429, code) == (refused.status_code, refused.json()["error"]["code"])
        assert f"{most} answers" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        others = [call(SECOND)] if most < 4 else []
        await asyncio.sleep(0.05)
        released.set()
        assert {200} == {(await task).status_code for task in [*waiting, *others]}
        body = {"prompt": "Hi", "n": most + 1}
        never = await server.client.post("/v1/completions", json=body, headers=FIRST)
        assert (400, "n") == (never.status_code, never.json()["error"]["param"])

    try:
        serve_and(test, keys=keys, max_live=4, max_per_key=max_per_key)
    finally:
        released.set()


def test_a_key_has_its_share_of_the_pages_that_watch() -> None:
    """Another key's are served meanwhile."""

    async def test(server: Served) -> None:
        get, service = server.client.get, server.service
        first = service.tenants.find(FIRST["authorization"])
        assert first is not None
        with ExitStack() as others:
            for _ in range(MOST_WATCHERS // 2):
                others.enter_context(service.watchers.taken(first))
            refused = await asyncio.wait_for(get("/events", headers=FIRST), 30)
            assert (429, "key_limit") == (refused.status_code, refused.json()["error"]["code"])
            watching = asyncio.create_task(get("/events", headers=SECOND))
            while not service.feed._watchers:
                await asyncio.sleep(0.01)
            assert MOST_WATCHERS // 2 + 1 == service.watchers.count
            service.feed.close()
            assert 200 == (await asyncio.wait_for(watching, 30)).status_code
        assert 0 == service.watchers.count

    serve_and(test, keys=KEYS)
