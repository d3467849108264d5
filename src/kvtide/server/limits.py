"""Limits: how much a client may send, and how many requests may wait."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import final

from starlette.requests import ClientDisconnect, Request

from kvtide.errors import UsageError
from kvtide.server.errors import ApiError


@final
@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server bears."""

    max_live: int
    """Answers under way at once, those that wait included."""
    body_bytes: int = 4 << 20
    body_seconds: float = 60.0
    """How long a client may take to send its body."""
    max_per_key: int | None = None
    """Answers of a key under way at once; None for half of all, where there are several keys."""

    def __post_init__(self) -> None:
        """Raises UsageError for an invalid value."""
        if self.max_live < 1:
            raise UsageError(f"max_live is {self.max_live}; it must be 1 or more")

    def most_answers(self, tenant_count: int) -> int:
        """How many answers of a tenant may be under way at once."""
        return self.max_per_key or share_of(self.max_live, tenant_count)


def share_of(most: int, tenant_count: int) -> int:
    """How much of `most` a tenant may have: half of it, where there are several tenants."""
    return most if tenant_count == 1 else max(1, most // 2)


async def read_body_of(request: Request, limits: ServerLimits) -> bytes:
    """The body of a call, which must be JSON. Raises ApiError, ClientDisconnect."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the body is {kind[:60] or 'of no type'}; send application/json")
    said = request.headers.get("content-length", "0")
    if said.isdecimal() and int(said) > limits.body_bytes:
        raise _too_large(limits)
    try:
        return await asyncio.wait_for(_read(request, limits), limits.body_seconds)
    except asyncio.TimeoutError as error:
        seconds = f"{limits.body_seconds:g} s"
        raise ApiError(408, f"the body didn't come within {seconds}; send it faster") from error


async def _read(request: Request, limits: ServerLimits) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limits.body_bytes:
            raise _too_large(limits)
    return bytes(body)


def _too_large(limits: ServerLimits) -> ApiError:
    return ApiError(
        413, f"the body is larger than {limits.body_bytes} bytes (--max-body); send less at once"
    )


__all__ = ["ClientDisconnect", "ServerLimits", "read_body_of", "share_of"]
