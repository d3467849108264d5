"""How many bytes an engine may take on this machine, also in a container."""

from __future__ import annotations

import pytest

from kvtide.device import open_device
from kvtide.errors import UsageError
from kvtide.layout import GQA
from kvtide.pool import Pool
from kvtide.serve import sizing
from kvtide.serve.request import Request, SamplingParams

GEOMETRY = GQA.bind(dtype="uint8", layer=1, token=4, head=1, head_dim=5, v_head_dim=5)


def test_only_whole_pages_are_counted() -> None:
    """A page of 4 tokens takes 40 bytes."""
    assert [1, 1, 2] == [sizing.count_pages(GEOMETRY, size, ()) for size in (40, 79, 80)]
    with pytest.raises(UsageError, match="39 bytes holds no page: a page takes 40 bytes"):
        sizing.count_pages(GEOMETRY, 39, ())


def test_room_for_all_is_the_sum_of_their_pages() -> None:
    """Each request's need is rounded up to pages; without requests there is still a page."""
    requests = [Request("a", [1] * 4, SamplingParams(1)), Request("b", [1] * 4, SamplingParams(2))]
    assert 1 + 2 == sizing.count_pages(GEOMETRY, None, requests)
    assert 1 == sizing.count_pages(GEOMETRY, None, ())


def test_memory_that_is_not_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pool and host memory together must fit, to the byte."""
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: 1000)
    sizing.check_memory(600, 400)
    with pytest.raises(UsageError, match="only 1000 are free"):
        sizing.check_memory(600, 401)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("no memory")])
def test_a_device_without_memory_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """One line has the size and the option to set."""

    def fail(*_: object, **__: object) -> Pool:
        raise error

    monkeypatch.setattr(Pool, "create", fail)
    device = open_device("cpu")
    with pytest.raises(UsageError, match="has no 120 bytes for the KV pool; set --kv-memory"):
        sizing.create_pool(GEOMETRY, device, 3)
    device.close()
