"""The browser of all tests of the page: it is started once in a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.page.chromium import Browser, browser


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """A Chromium with an empty profile."""
    with browser() as opened:
        yield opened
