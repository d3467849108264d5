"""PoolTests: what a pool must pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

from kvtide.conformance import checks, refusals, ways
from kvtide.conformance.pool_under_test import Ids, PoolUnderTest
from kvtide.conformance.reference import Bytes, units_of
from kvtide.pool import Pool


class PoolTests(ABC):
    """Inherit this as `class TestMyPool(PoolTests)` and give it three methods.

    The methods make the pool, and read and write its bytes without kvtide. If the layout needs
    maps, override `write_map` too. If the pool has its own methods for saving and restoring,
    override `make_way`. Each test makes a new pool on a new instance, so you may keep things of
    the pool on `self`. With `thorough = False` the tests leave out similar round trips.
    """

    thorough = True

    @abstractmethod
    def make_pool(self) -> Pool:
        """A pool of your tensors (`Pool.adopt`), or a new one (`Pool.create`).

        It needs 12 rows of each plane, so 12 pages if a row is a page.
        """

    @abstractmethod
    def read_raw(self, pool: Pool, plane: str, layer: int) -> Bytes:
        """A copy of the bytes of one layer of a plane, uint8 [row, byte], on the host.

        Layers count from the stage's first. If there is a gap before the next row, its bytes follow
        the row's bytes. The tests check that kvtide leaves them unchanged.
        """

    @abstractmethod
    def write_raw(self, pool: Pool, plane: str, layer: int, data: Bytes) -> None:
        """Sets the bytes that `read_raw` gives; `data` has the same shape."""

    def write_map(self, pool: Pool, name: str, ids: Ids) -> None:
        """Sets the contents of one of your engine's maps in place; `ids` are int64 [slot].

        Only layouts whose rules need maps use it, such as sliding windows.
        """
        raise NotImplementedError(f"the layout goes through a map {name!r}: give write_map")

    def make_way(self, subject: PoolUnderTest, block_bytes: int) -> Any:
        """The object that saves and restores the pool's bytes; by default it uses a Tide.

        It has `save(slots, request) -> saved`, `load(saved, slots, request)` and `drop(saved)`, and
        moves `block_bytes` at once. All three raise an error, of any class, for what they can't do.
        It may have `start_save` and `start_load` besides, which take the same arguments and return
        a ticket without waiting: an object whose `wait()` gives the result. A Tide moves the pool's
        bytes as well, as the tests compare its snapshots with kvtide's format.
        """
        return ways.TideWay(subject, block_bytes)

    def make_subject(self) -> PoolUnderTest:
        """The pool with the functions that read and write it."""
        pool = self.make_pool()
        read, write = partial(self.read_raw, pool), partial(self.write_raw, pool)
        subject = PoolUnderTest(pool, read, write, partial(self.write_map, pool))
        least = 12 * units_of(pool.geometry).slots
        count = pool.slot_count - pool.padding_slots
        assert count >= least, f"make_pool gives {count} slots; the tests need {least}"
        return subject

    def _way(self, subject: PoolUnderTest) -> ways.MakeWay | None:
        """Makes the pool's own way; None if it has none."""
        has_none = type(self).make_way is PoolTests.make_way
        return None if has_none else partial(self.make_way, subject)

    def test_planes_lie_where_the_pool_says(self) -> None:
        """`pool.plane` views the bytes of that plane and layer, counted from the stage's first."""
        checks.check_planes(self.make_subject())

    def test_round_trips_are_exact(self) -> None:
        """A restore into other slots writes the same bytes, for all counts, and nothing else."""
        subject = self.make_subject()
        check = checks.check_round_trips if self.thorough else checks.check_boundaries
        check(subject, self._way(subject))

    def test_slots_may_have_any_order(self) -> None:
        """Slots may be contiguous, reversed, scattered, page by page, or begin inside a page."""
        subject = self.make_subject()
        checks.check_orders(subject, self._way(subject))

    def test_indices_may_be_of_any_kind(self) -> None:
        """Slots may be lists or arrays, of 32 or 64 bits, on the host or on the device."""
        subject = self.make_subject()
        checks.check_indices(subject, self._way(subject))

    def test_snapshot_has_the_bytes_of_the_format(self) -> None:
        """So it fits every pool of that geometry."""
        subject = self.make_subject()
        checks.check_snapshot_bytes(subject, self._way(subject))

    def test_snapshot_owns_its_bytes(self) -> None:
        """It is a copy: it stays the same when another request writes to its slots."""
        subject = self.make_subject()
        checks.check_snapshot_owns(subject, self._way(subject))

    def test_invalid_slots_are_refused(self) -> None:
        """Negative, repeated and out-of-range slots raise an error and change nothing."""
        subject = self.make_subject()
        refusals.check_refused_slots(subject, self._way(subject))

    def test_failed_restore_changes_nothing(self) -> None:
        """Restores fail for damage and for another geometry, key, length or window."""
        subject = self.make_subject()
        refusals.check_failed_restores(subject, self._way(subject))

    def test_moves_are_fenced(self) -> None:
        """A move waits for all earlier work of the device, and all later work waits for it."""
        subject = self.make_subject()
        checks.check_fences(subject, self._way(subject))
