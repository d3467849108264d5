"""Search: looks in tiers for snapshots of other processes, without their bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, islice
from math import inf
from typing import Any, NamedTuple, final

from kvtide.arena import HostArena
from kvtide.device import Job
from kvtide.errors import SnapshotMiss
from kvtide.seal import Seal
from kvtide.snapshot import Snapshot
from kvtide.tier.entry import SpillEntry, State
from kvtide.tier.namespace import is_shared
from kvtide.tier.retries import RetriedTier
from kvtide.tier.workers import Workers

_AT_ONCE = 64
"""How many names a tier is asked for in one call: over a network a call takes a while."""

EndsAt = Callable[[int], Iterable[str]]
"""Gives further names, by how many were found before them."""


class Found(NamedTuple):
    """The seal of a snapshot, and the tier that has it under the name."""

    name: str
    tier: RetriedTier
    seal: Seal


@final
class Search:
    """Looks for snapshots with `names`, one after another, up to the first that no tier has.

    Then it looks for the first of `ends_at(n)` that a tier has, where n names were found.

    A worker does `look`; Spill's thread asks for the rest when the search has ended.
    """

    def __init__(
        self,
        names: Sequence[str],
        tiers: Sequence[RetriedTier],
        workers: Workers,
        ends_at: EndsAt = lambda _: (),
        clock: Callable[[], float] = time.monotonic,
        until: float = inf,
    ) -> None:
        """Gives the work to a worker. What takes longer than `until`, by the clock, is given up."""
        self.found: list[Found] = []
        self.errors: list[tuple[RetriedTier, Exception]] = []
        """Who could not answer, and why."""
        self._names = names
        self._tiers = tiers
        self._ends_at = ends_at
        self._workers = workers
        self._clock = clock
        self._until = until
        self._asked: RetriedTier | None = None
        """Whom it asks, or asked last."""
        self._is_given_up = False
        self.job: Job[Any] = workers.start(self.look)

    def has_ended(self) -> bool:
        """Whether it is over: all was asked, or it was given up since a tier gave no answer."""
        if not self._is_given_up and not self.job.done() and self._clock() > self._until:
            self._give_up()
        return self._is_given_up or self.job.done()

    def _give_up(self) -> None:
        """Waits for no answer any more. The tier isn't asked again before it has answered."""
        self._is_given_up = True
        self._ends_at = lambda _: ()  # it may hold what its caller has forgotten
        self._workers.settle(self.job, 0.0)  # so a thread that hangs is replaced
        if self._asked is not None:
            self._asked.note_late(self.job)
            self._asked.counts.missed(TimeoutError("a tier was too late to say what it has"))

    def look(self) -> None:
        """In a worker: asks the tiers."""
        for found in self._places_of(self._names):
            if found is None:
                break
            self.found.append(found)
        # Who can't answer isn't asked for more of many ends.
        ends = self._ends_at(len(self.found)) if not self.errors else ()
        for found in self._places_of(ends):
            if found is not None:
                self.found.append(found)
            if found is not None or self.errors:
                break

    def entries(self, arena: HostArena) -> Iterator[SpillEntry]:
        """What it found, for the books; counts what went wrong. The search `has_ended`.

        Ends where the arena has no room for a seal.
        """
        for tier, error in self.errors:
            tier.counts.missed(error)
        for name, tier, seal in self.found:
            try:
                snapshot = Snapshot.below(arena, seal)
            except SnapshotMiss as error:  # an arena of another size wrote it
                tier.counts.missed(error)
                if not is_shared(name):
                    tier.forget(name)
                return
            if snapshot is None:
                return
            entry = SpillEntry(snapshot, name, State.BELOW)
            entry.tier = tier
            yield entry

    def _places_of(self, names: Iterable[str]) -> Iterator[Found | None]:
        """For each name the first tier that has it; None if there is none."""
        left = iter(names)
        while batch := [*islice(left, _AT_ONCE)]:
            known: dict[RetriedTier, set[str]] = {}
            for place, name in enumerate(batch):
                yield self._place_of(name, batch[place:], known)

    def _place_of(
        self, name: str, batch: Sequence[str], known: dict[RetriedTier, set[str]]
    ) -> Found | None:
        """The first tier that has a name. It is asked for the `batch`, unless what it has is known.

        Of a tier that couldn't answer nothing is known to be there.
        """
        for tier in self._tiers:
            if self._is_given_up:
                break
            self._asked = tier
            try:
                if tier not in known:
                    known[tier] = set()
                    known[tier] = {*compress(batch, tier.contains_each(batch))}
                if name in known[tier]:
                    return Found(name, tier, tier.seal_of(name))
            except Exception as error:
                self.errors.append((tier, error))
        return None
