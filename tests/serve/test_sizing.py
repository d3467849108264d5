"""How many bytes an engine may take on this machine, also in a container."""

from __future__ import annotations

from typing import Any

import pytest

from kvtide.device import open_device
from kvtide.errors import UsageError
from kvtide.layout import GQA
from kvtide.pool import Pool
from kvtide.serve import sizing
from kvtide.serve.options import EngineOptions
from kvtide.serve.request import Request, SamplingParams

GEOMETRY = GQA.bind(dtype="uint8", layer=1, token=4, head=1, head_dim=5, v_head_dim=5)


def _count(*lengths: int, free_bytes: int | None = 1 << 30, **options: Any) -> int:
    """Counts the pages for requests of these numbers of tokens."""
    requests = [
        Request(str(number), [1] * length, SamplingParams(1))
        for number, length in enumerate(lengths)
    ]
    return sizing.count_pages(GEOMETRY, EngineOptions(**options), requests, free_bytes)


def test_only_whole_pages_are_counted() -> None:
    """A page of 4 tokens takes 40 bytes."""
    assert [1, 1, 2] == [_count(kv_memory_bytes=size) for size in (40, 79, 80)]
    with pytest.raises(UsageError, match="39 bytes holds no page: a page takes 40 bytes"):
        _count(kv_memory_bytes=39)


def test_room_for_all_is_the_sum_of_their_pages() -> None:
    """Each request's need is rounded up to pages; without requests there is still a page."""
    assert 1 + 2 == _count(4, 5)
    assert 1 == _count()


def test_room_is_for_those_that_can_run_at_once() -> None:
    """Ten thousand requests need no more room than the longest two of them."""
    assert 3 + 2 == _count(*[4] * 10_000, 9, 8, max_running=2)


def test_the_pool_takes_half_of_the_free_memory_at_most() -> None:
    """Memory that is promised to retracted requests isn't free either."""
    assert 12 == _count(*[8] * 100, free_bytes=1000)
    assert 5 == _count(*[8] * 100, free_bytes=1000, host_memory_bytes=800)
    assert 200 == _count(*[8] * 100, free_bytes=None, max_running=100)


def test_a_request_that_cannot_be_met_does_not_count() -> None:
    """It may need more than the share, be longer than the context, or have failed already."""
    assert 1 + 2 == _count(4, 5, 4000, free_bytes=1000)
    late = Request("late", [1] * 9, SamplingParams(5), context_limit=8)
    failed = Request("failed", [], SamplingParams(90), error="has failed before")
    fine = Request("fine", [1] * 6, SamplingParams(1000), context_limit=8)
    assert 2 == sizing.count_pages(GEOMETRY, EngineOptions(), [late, failed, fine], 1 << 30)
    assert 1 == _count(4000, free_bytes=1000)


def test_a_pool_in_which_requests_wait_holds_each_of_them() -> None:
    """Their lengths are known, so a request that is longer than the share is no exaggeration."""
    assert 20 == _count(4, 80, free_bytes=1000, on_pressure="wait")
    assert 12 == _count(*[8] * 100, free_bytes=1000, on_pressure="wait")


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"kv_memory_bytes": 600, "host_memory_bytes": 401}, "set --kv-memory or --host-memory"),
        ({"kv_memory_bytes": 1001}, "set --kv-memory lower"),
        ({"host_memory_bytes": 401}, "set --host-memory lower"),
        ({}, "end other programs, or ask for fewer new tokens"),
    ],
)
def test_memory_that_is_not_free_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], remedy: str
) -> None:
    """Pool and host memory together must fit, and the remedy is an option that was given."""
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: 1000)
    pool_bytes = options.get("kv_memory_bytes", 600 if options else 1001)
    with pytest.raises(UsageError, match=f"only 1000 are free; {remedy}"):
        sizing.spare_after(pool_bytes, EngineOptions(**options))


def test_sizes_that_fit_to_the_byte_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pool and host memory may be all that is free."""
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: 1000)
    assert 0 == sizing.spare_after(600, EngineOptions(kv_memory_bytes=600, host_memory_bytes=400))
    assert 300 == sizing.spare_after(600, EngineOptions(host_memory_bytes=100))


def test_a_refusal_adds_up_and_names_the_memory_that_would_do() -> None:
    """A page is 4 tokens of 10 bytes: 13 tokens take 4 pages."""
    request = Request("r", [1] * 10, SamplingParams(4))
    assert (
        "needs room for 13 tokens (10 of its prompt and 3 of 4 new ones: the last one needs none), "
        "the pool holds 12; give it 160 bytes of KV memory (--kv-memory) or ask for fewer new "
        "tokens"
    ) == sizing.reason_to_refuse(request, GEOMETRY, 3)
    assert sizing.reason_to_refuse(request, GEOMETRY, 4) is None
    request.context_limit = 9
    assert (
        "its prompt has 10 tokens, the model has 9 positions; shorten the prompt"
    ) == sizing.reason_to_refuse(request, GEOMETRY, 100)


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
        sizing.create_pool(GEOMETRY, device, 3, EngineOptions(kv_memory_bytes=120))
    device.close()
