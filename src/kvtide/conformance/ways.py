"""`go` makes a round trip and compares every byte; TideWay moves the bytes by a Tide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import numpy as np

from kvtide.arena import HostArena
from kvtide.conformance.pool_under_test import PoolUnderTest
from kvtide.conformance.reference import Image, first_difference, restored
from kvtide.conformance.trips import INDICES, Trip
from kvtide.snapshot import Snapshot
from kvtide.ticket import Ticket
from kvtide.tide import Tide

CHUNK_ROWS = 4
"""The rows of a full chunk in most checks, counted in the group of planes with the largest rows."""
_BLOCKS = 1024
"""The most blocks of an arena; an unused block costs a little, too."""
_LIMIT_BYTES = 1 << 20

MakeWay = Callable[[int], Any]
"""Makes an object that saves and restores, for the bytes that it moves at once; see PoolTests."""


@final
class TideWay:
    """Saves and restores by a Tide. A pool with its own methods gives such an object of its own."""

    def __init__(
        self, subject: PoolUnderTest, block_bytes: int, target: PoolUnderTest | None = None
    ) -> None:
        self.block_bytes = block_bytes
        self._tides = [make_tide(end, block_bytes) for end in (subject, target or subject)]
        self._held_count = 0

    def save(self, slots: Any, request: int | None) -> Snapshot:
        """Saves the bytes of the slots and of the request."""
        return self.start_save(slots, request).wait()

    def start_save(self, slots: Any, request: int | None) -> Ticket[Snapshot]:
        """Begins to save; the ticket's `wait` gives the snapshot."""
        ticket = self._tides[0].start_offload(slots, key="kit", request=request)
        self._held_count += 1
        return ticket

    def load(self, saved: Snapshot, slots: Any, request: int | None) -> None:
        """Writes the bytes to other slots. Rows of tokens that weren't saved keep their bytes."""
        self.start_load(saved, slots, request).wait()

    def start_load(self, saved: Snapshot, slots: Any, request: int | None) -> Ticket[None]:
        """Begins to restore; the ticket's `wait` returns when the bytes are there."""
        tide = self._tides[1]
        return tide.start_restore(saved, slots, key="kit", request=request, keep_extra_rows=True)

    def drop(self, saved: Snapshot) -> None:
        """Frees the memory of the saved bytes, once no restore needs them."""
        self._tides[0].discard(saved)
        self._held_count -= 1
        used_bytes = self._tides[0].arena.used_bytes
        assert self._held_count or not used_bytes, f"{used_bytes} bytes of the arena are in use"


def ways_of(subject: PoolUnderTest, block_bytes: int, make_way: MakeWay | None) -> Iterator[Any]:
    """The ways by which a check must pass: a Tide's, and the pool's own if it has one."""
    yield TideWay(subject, block_bytes)
    if make_way is not None:
        yield make_way(block_bytes)


def started(way: Any, move: str, *arguments: Any) -> Callable[[], Any]:
    """Begins a `save` or a `load`; the result waits for it. A way may be unable to begin only."""
    start = getattr(way, f"start_{move}", None)
    if start is None:
        result = getattr(way, move)(*arguments)
        return lambda: result
    wait: Callable[[], Any] = start(*arguments).wait
    return wait


def make_tide(subject: PoolUnderTest, block_bytes: int) -> Tide:
    """A tide of the pool, with a new arena of such blocks."""
    limit_bytes = min(_LIMIT_BYTES, _BLOCKS * block_bytes)
    arena = HostArena(subject.pool.device, limit_bytes=limit_bytes, block_bytes=block_bytes)
    return Tide(subject.pool, arena)


def block_sizes(subject: PoolUnderTest) -> dict[str, int]:
    """Block sizes by name: for some rows, for all rows, and less than a row if rows can be cut."""
    rows = _group_bytes(subject)
    sizes = {"some rows": CHUNK_ROWS * max(rows), "all rows": 1 << 16}
    smallest = min(plane.row_bytes for plane in subject.geometry.planes)
    if not any(rows.is_padded for rows in subject.pool.buffer_rows):
        sizes["less than a row"] = max(1, smallest - 1)
    return sizes


def _group_bytes(subject: PoolUnderTest) -> list[int]:
    """The bytes of a row in all layers, for each group of planes of equal rules."""
    sizes: dict[Any, int] = {}
    for plane in subject.geometry.planes:
        sizes[plane.rules] = sizes.get(plane.rules, 0) + plane.row_bytes * plane.layer_count
    return list(sizes.values())


def go(
    way: Any,
    trip: Trip,
    subject: PoolUnderTest,
    *,
    target: PoolUnderTest | None = None,
    index: str = "numpy int64",
    seed: int = 0,
    note: str = "",
) -> None:
    """Makes a round trip: saves, overwrites every byte of the source, restores, compares all bytes.

    It compares the restored bytes and all other bytes of the pool, which must not change.
    """
    target, form, note = target or subject, INDICES[index], f"{note}: " if note else ""
    subject.set_maps(trip.source.maps)
    saved = subject.fill(seed)
    slots = form(np.array(trip.source.slots, np.int64), subject.pool.device)
    snapshot = way.save(slots, trip.source.request)
    try:
        same(saved, subject.image(), f"{note}saving changed the pool")
        poison = subject.fill(seed + 1)
        before = poison if target is subject else target.fill(seed + 2)
        target.set_maps(trip.target.maps)
        slots = form(np.array(trip.target.slots, np.int64), target.pool.device)
        way.load(snapshot, slots, trip.target.request)
    finally:
        way.drop(snapshot)
    expected = restored(subject.geometry, saved, trip.source, before, trip.target)
    same(expected, target.image(), f"{note}restored into other slots")
    if target is not subject:
        same(poison, subject.image(), f"{note}a restore elsewhere changed the source")


@contextmanager
def filled_and_saved(
    way: Any, trip: Trip, subject: PoolUnderTest, seed: int
) -> Iterator[tuple[Image, Any]]:
    """Fills the pool, and saves the trip's source; drops it in the end.

    Gives the pool's bytes and what was saved.
    """
    subject.set_maps(trip.source.maps)
    image = subject.fill(seed)
    snapshot = way.save(trip.source.slots, trip.source.request)
    try:
        yield image, snapshot
    finally:
        way.drop(snapshot)


def load_and_compare(
    way: Any, trip: Trip, subject: PoolUnderTest, saved: tuple[Image, Any], seed: int, note: str
) -> None:
    """Fills the pool anew, loads at the target what `filled_and_saved` gave, compares all bytes."""
    image, snapshot = saved
    subject.set_maps(trip.target.maps)
    before = subject.fill(seed)
    way.load(snapshot, trip.target.slots, trip.target.request)
    same(restored(subject.geometry, image, trip.source, before, trip.target), subject.image(), note)


def tokens_per_row(subject: PoolUnderTest) -> int:
    """The tokens per row of the plane of tokens where these are fewest."""
    return min((p.tokens_per_row for p in subject.geometry.planes if p.tokens_per_row), default=1)


def some_tokens(subject: PoolUnderTest) -> int:
    """A token count of more than one chunk, the last row or page not full."""
    return (CHUNK_ROWS + 2) * tokens_per_row(subject) - (tokens_per_row(subject) > 1)


def same(expected: Image, found: Image, note: str) -> None:
    """Raises AssertionError, with the first difference, unless two images are equal."""
    difference = first_difference(expected, found)
    assert difference is None, f"{note}: {difference}"


@contextmanager
def refused(error: type[Exception], what: str) -> Iterator[None]:
    """Raises AssertionError unless the body of the `with` raises that error."""
    try:
        yield
    except error:
        return
    raise AssertionError(f"{what}: {error.__name__} expected, and it was done")
