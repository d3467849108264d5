"""PoolTests: what a pool must pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

from kvtide.conformance import checks, ways
from kvtide.conformance.reference import Bytes, units_of
from kvtide.conformance.subjects import Ids, PoolUnderTest
from kvtide.pool import Pool


class PoolTests(ABC):
    """Inherit this as `class TestMyPool(PoolTests)` and give it three methods.

    They say how to make the pool and how to get at its bytes without kvtide; the tests compare
    what kvtide does with what they read. A pool whose layout goes through maps gives `write_map`
    too, one that saves and restores by methods of its own gives `make_way`. Each test makes a
    pool anew, on an instance of its own, so what belongs to it may be kept on `self`. `thorough =
    False` leaves out round trips of which there are others much alike.
    """

    thorough = True

    @abstractmethod
    def make_pool(self) -> Pool:
        """A pool of your tensors (`Pool.adopt`), or one of kvtide's own (`Pool.create`).

        It needs room for a dozen rows of each plane: a dozen pages, where a row is a page.
        """

    @abstractmethod
    def read_raw(self, pool: Pool, plane: str, layer: int) -> Bytes:
        """A copy of the bytes of one layer of a plane, uint8 [row, byte], on the host.

        Layers count from the stage's first. A row's own bytes come first; if others lie between
        it and the next row, they come after, and the tests see to it that nobody touches them.
        """

    @abstractmethod
    def write_raw(self, pool: Pool, plane: str, layer: int, data: Bytes) -> None:
        """Sets what `read_raw` gives, of the same shape."""

    def write_map(self, pool: Pool, name: str, ids: Ids) -> None:
        """Sets a map of your engine's that the layout's rules go through, int64 [slot], in place.

        Only for layouts that have some, such as sliding windows.
        """
        raise NotImplementedError(f"the layout goes through a map {name!r}: give write_map")

    def make_way(self, subject: PoolUnderTest, block_bytes: int) -> Any:
        """How the pool's bytes are taken away and put back: by Tide, unless you say otherwise.

        An object with `save(slots, request) -> saved`, `load(saved, slots, request)` and
        `drop(saved)`. `block_bytes` is what should move at once.
        """
        return ways.TideWay(subject, block_bytes)

    def make_subject(self) -> PoolUnderTest:
        """The pool as the tests see it."""
        pool = self.make_pool()
        read, write = partial(self.read_raw, pool), partial(self.write_raw, pool)
        subject = PoolUnderTest(pool, read, write, partial(self.write_map, pool))
        least = 12 * units_of(pool.geometry).slots
        count = pool.slot_count - pool.padding_slots
        assert count >= least, f"make_pool gives {count} slots; the tests need {least}"
        return subject

    def _way(self, subject: PoolUnderTest) -> Any:
        return partial(self.make_way, subject)

    def test_planes_lie_where_the_pool_says(self) -> None:
        """`pool.plane` views the bytes of that plane and layer, counted from the stage's first."""
        checks.check_planes(self.make_subject())

    def test_round_trips_are_exact(self) -> None:
        """Into other slots, with poisoned sources and untouched neighbours, for all counts."""
        subject = self.make_subject()
        check = checks.check_round_trips if self.thorough else checks.check_boundaries
        check(subject, self._way(subject))

    def test_slots_may_lie_anyhow(self) -> None:
        """Contiguous, reversed, scattered, by pages and across them."""
        checks.check_orders(self.make_subject())

    def test_indices_may_be_of_any_kind(self) -> None:
        """Lists and arrays, of 32 and 64 bits, on the host and on the device."""
        subject = self.make_subject()
        checks.check_indices(subject, self._way(subject))

    def test_snapshot_has_the_bytes_of_the_format(self) -> None:
        """So that it fits every pool of that geometry."""
        checks.check_snapshot_bytes(self.make_subject())

    def test_snapshot_owns_its_bytes(self) -> None:
        """It is no view of slots that are another's by now."""
        checks.check_snapshot_owns(self.make_subject())

    def test_slots_that_cannot_be_meant_are_refused(self) -> None:
        """Negative, repeated, out of range: both ways, and nothing has changed."""
        checks.check_refused_slots(self.make_subject())

    def test_failed_restore_changes_nothing(self) -> None:
        """Damage, another geometry, key, length or window."""
        checks.check_failed_restores(self.make_subject())

    def test_moves_are_fenced(self) -> None:
        """By what the device was asked for before, and after."""
        checks.check_fences(self.make_subject())
