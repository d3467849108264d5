"""Which requests are made of a body."""

from __future__ import annotations

import asyncio
import contextlib
import json

from kvtide.server.intake import Intake
from kvtide.server.tenants import Tenant
from serve.harness import tiny


def test_a_pool_of_another_size_finds_what_was_left() -> None:
    """A chat without a limit has what the pool leaves, which is no part of what its client said."""

    def key_of(pool_tokens: int, **more: int) -> str:
        raw = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "seed": 1, **more})
        intake = Intake(tiny(), "tiny", pool_tokens)
        with contextlib.closing(intake):
            asked = asyncio.run(intake.read(raw.encode(), is_chat=True, tenant=Tenant(), most=8))
        return asked.requests[0].key

    assert key_of(512) == key_of(528)
    assert key_of(512) != key_of(512, max_tokens=5) != key_of(512, max_tokens=6)


def test_tokens_that_cant_fit_are_copied_for_no_answer() -> None:
    """A body of a few megabytes would become gigabytes."""
    raw = json.dumps({"prompt": [5] * 8193, "n": 8}).encode()
    intake = Intake(tiny(), "tiny", 512)
    with contextlib.closing(intake):
        asked = asyncio.run(intake.read(raw, is_chat=False, tenant=Tenant(), most=8))
    assert [[]] * 8 == [request.prompt_ids for request in asked.requests]
    assert all("8193 tokens" in str(request.error) for request in asked.requests)
