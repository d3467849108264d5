"""How much of a server each tenant may take, so that one leaves room for the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from kvtide.server.errors import ApiError
from kvtide.server.tenants import Tenant


@final
class Quota:
    """The places of one kind, and who has them. For the asyncio loop's thread alone."""

    def __init__(self, kind: str, most: int, most_each: int, remedy: str) -> None:
        """There are `most`, and a tenant may have `most_each` of them.

        `kind` says what has a place, and `remedy` what to do without one, for errors.
        """
        self.most = most
        self.most_each = min(most, most_each)
        self._kind = kind
        self._remedy = remedy
        self._taken: Counter[Tenant] = Counter()

    @property
    def count(self) -> int:
        """How many are taken."""
        return self._taken.total()

    def check(self, tenant: Tenant, count: int = 1) -> None:
        """Raises ApiError, with the limit that is reached, if `count` more are too many now."""
        if self.count + count > self.most:
            raise ApiError(
                429,
                f"this server has {self.count} {self._kind}, of {self.most} at most; "
                f"{self._remedy}",
                code="queue_full",
                retry_after_s=1,
            )
        held = self._taken[tenant]
        if held + count > self.most_each:
            raise ApiError(
                429,
                f"this API key has {held} {self._kind}, of {self.most_each} at most; "
                f"{self._remedy}",
                code="key_limit",
                retry_after_s=1,
            )

    @contextmanager
    def taken(self, tenant: Tenant, count: int = 1) -> Iterator[None]:
        """Takes places for as long as this context lasts. Raises as `check`."""
        self.check(tenant, count)
        self._taken[tenant] += count
        try:
            yield
        finally:
            self._taken[tenant] -= count
            self._taken += Counter()  # forgets tenants without any
