"""Snapshot: the bytes of a request in host memory, with a seal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import numpy as np

from kvtide.arena import Charge, HostArena, Lease
from kvtide.errors import ArenaFull, SnapshotDamaged, SnapshotMiss
from kvtide.form import SPAN_BYTES
from kvtide.layout import Ids, Rows
from kvtide.seal import Seal, ranges_of
from kvtide.ticket import Ticket

MakeRoom = Callable[[Seal], Sequence[memoryview]]
"""Gives writable memory for the chunks of a seal: for each chunk a view of its used bytes.

It may raise, for example ArenaFull.
"""


# What the interpreter needs for a snapshot beside its bytes, measured and rounded up.
_SNAPSHOT_BYTES = 2 << 10
_SEALED_BYTES = 320
_RANGE_BYTES = 192


def charge_for(arena: HostArena, seal: Seal, block_count: int) -> Charge:
    """Counts what a snapshot of `block_count` blocks needs beside them. Raises ArenaFull.

    That is its seal, which may lack its spans yet, and its books. Its key is the caller's.
    """
    range_count = sum(map(len, (*seal.tokens, *seal.lasts)))
    return arena.charge(beside_bytes_of(seal.chunk_bytes, block_count, range_count))


def beside_bytes_of(chunk_bytes: int, block_count: int, range_count: int) -> int:
    """What a snapshot of such chunks, with so many ranges of tokens, takes beside its blocks."""
    span_count = block_count * (chunk_bytes // SPAN_BYTES + 1)
    return _SNAPSHOT_BYTES + span_count * _SEALED_BYTES + range_count * _RANGE_BYTES


@final
@dataclass(slots=True)
class Snapshot:
    """The rows of some token slots in host memory, in the order of the slots.

    It owns its memory until it is discarded (`Tide.discard`), and is independent of the slots.
    `readers` has the tickets of its restores that have not ended.
    """

    seal: Seal
    lease: Lease
    readers: list[Ticket[Any]] = field(default_factory=list)
    is_below: bool = False
    """Whether it is in a tier alone: its memory was given away, and a restore brings it back."""
    charge: Charge | None = None
    """Its memory beside the blocks, which counts while this object lives."""

    @property
    def token_count(self) -> int:
        """How many tokens it has. A restore needs as many slots."""
        return self.seal.token_count

    @property
    def size_bytes(self) -> int:
        """Bytes of the arena's limit that it takes; 0 once discarded."""
        return self.lease.size_bytes

    @property
    def chunks(self) -> list[memoryview]:
        """The used bytes of each chunk: views of the snapshot's memory, valid until `discard`.

        These bytes and `seal.to_json()` are the whole snapshot: see `load`. Raises SnapshotMiss
        once the snapshot is discarded.
        """
        self.require_here()
        return [view.toreadonly() for view in chunk_views(self.lease, self.seal)]

    def verify(self) -> None:
        """Raises SnapshotDamaged, which names the first bad chunk, if a byte differs from the seal.

        Reads only host memory. Raises SnapshotMiss once the snapshot is discarded.
        """
        self.seal.check_bytes(self.chunks)

    @classmethod
    def load(cls, arena: HostArena, seal: Seal, chunks: Sequence[memoryview | bytes]) -> Snapshot:
        """Makes a snapshot from a seal and a copy of `chunks` (see `Snapshot.chunks`).

        Raises SnapshotDamaged if a byte differs from the seal, SnapshotMiss if a chunk is larger
        than the arena's blocks, ArenaFull if there is no room. After an error nothing is kept.
        """
        return cls.fetch(arena, partial(_copied, seal, chunks))

    @classmethod
    def fetch(cls, arena: HostArena, get: Callable[[MakeRoom], Seal]) -> Snapshot:
        """Makes a snapshot of bytes that `get` writes into memory of the arena, and has checked.

        `get` may call the function that it is given once. Raises the errors of `get`, SnapshotMiss
        if a chunk is larger than the arena's blocks, ArenaFull if there is no room. After an error
        nothing is kept.
        """
        lease, charges = Lease(arena), list[Charge]()
        try:
            seal = get(partial(_make_room, lease, arena, charges.append))
            return cls(seal, lease, charge=next(iter(charges), None))
        except BaseException:
            lease.release()
            raise

    @classmethod
    def below(cls, arena: HostArena, seal: Seal) -> Snapshot | None:
        """A snapshot that is in a tier alone; None if the arena has no room for its seal.

        Raises SnapshotMiss if a chunk is larger than the arena's blocks.
        """
        _require_fit(arena.block_bytes, seal)
        try:
            charge = charge_for(arena, seal, len(seal.used_bytes))
        except ArenaFull:
            return None
        lease = Lease(arena)
        lease.release()
        return cls(seal, lease, is_below=True, charge=charge)

    @property
    def is_held(self) -> bool:
        """Whether it can be restored: it wasn't discarded."""
        return self.is_below or not self.lease.released

    def require_here(self) -> None:
        """Raises SnapshotMiss if it isn't in host memory: it was discarded, or is in a tier."""
        if self.is_below:
            raise SnapshotMiss(
                f"snapshot of {self.token_count} tokens is in a tier below host memory; restore it "
                "by the Tide that spills to that tier, or take it out of the tier (Tier.load)"
            )
        if self.lease.released:
            raise SnapshotMiss(f"snapshot of {self.token_count} tokens was discarded already")

    def rows_in(self, group: int, target: Rows, *, keep_extra_rows: bool = False) -> Ids:
        """The rows of `target` for this snapshot's rows of a group, in the snapshot's order.

        Raises SnapshotMiss in three cases. A token has a row here and none in the target. Tokens
        share a row here and have different rows in the target: bytes would be lost. A token has a
        row in the target and none here: the row would keep another request's bytes, unless
        `keep_extra_rows` allows that.
        """
        sealed = self.seal.tokens[group], self.seal.lasts[group]
        if sealed == (ranges_of(target.tokens), ranges_of(target.lasts)):
            return target.ids  # the usual case: rows of the same tokens
        tokens = self.seal.tokens_of(group)
        found = target.of_tokens(tokens)
        if found is None:
            missing = tokens[~np.isin(tokens, target.tokens)][0]
            raise SnapshotMiss(
                f"snapshot has a row for token {missing} of {self.token_count}, the target none: "
                "its window, or its share of the context, differs"
            )
        if target.lasts is not None and tokens.size:
            if tokens.size != self.seal.lasts_of(group).size:
                raise SnapshotDamaged(
                    f"a snapshot's seal is damaged: rows of group {group} hold several tokens, and "
                    "the last ones aren't in it; recompute this request"
                )
            self._require_same_rows(group, tokens, target)
            self._require_same_lasts(group, tokens, target, keep_extra_rows=keep_extra_rows)
        if found.size < target.tokens.size and not keep_extra_rows:
            extra = target.tokens[~np.isin(target.tokens, tokens)][0]
            raise SnapshotMiss(
                f"the target has a row for token {extra} of {self.token_count}, the snapshot none: "
                "it would keep another request's bytes; map that token to no row, or allow this "
                "with keep_extra_rows=True"
            )
        return found

    def _require_same_rows(self, group: int, tokens: Ids, target: Rows) -> None:
        """Raises SnapshotMiss if a row of the target begins inside a row of the snapshot."""
        begun = target.tokens[(target.tokens > tokens[0]) & ~np.isin(target.tokens, tokens)]
        holders = np.searchsorted(tokens, begun) - 1
        begun = begun[begun <= self.seal.lasts_of(group)[holders]]
        if begun.size:
            raise SnapshotMiss(
                f"a row of the target begins at token {begun[0]}, which is inside a row of the "
                "snapshot; restore to slots that fill rows in the same manner as the source"
            )

    def _require_same_lasts(
        self, group: int, tokens: Ids, target: Rows, *, keep_extra_rows: bool
    ) -> None:
        """Raises SnapshotMiss if a row's last token differs between the snapshot and the target.

        A row moves whole, so tokens that only the target's row holds would get wrong bytes.
        `keep_extra_rows` allows that, since nothing reads them.
        """
        assert target.lasts is not None
        lasts = self.seal.lasts_of(group)
        here = target.lasts[np.searchsorted(target.tokens, tokens)]
        wrong = here < lasts if keep_extra_rows else here != lasts
        if wrong.any():
            first = int(wrong.argmax())
            raise SnapshotMiss(
                f"the row of token {tokens[first]} holds tokens up to {lasts[first]} in the "
                f"snapshot, up to {here[first]} in the target; restore to slots whose maps leave "
                "out the same tokens"
            )


def _copied(seal: Seal, chunks: Sequence[memoryview | bytes], make_room: MakeRoom) -> Seal:
    """Copies `chunks` into new memory, and gives their seal, which is checked before and after."""
    seal.check_bytes(chunks)
    rooms = make_room(seal)
    for room, chunk in zip(rooms, chunks, strict=True):
        room[:] = memoryview(chunk)[: room.nbytes]
    seal.check_bytes(rooms)  # checks the copy: the source may have changed meanwhile
    return seal


def _make_room(
    lease: Lease, arena: HostArena, note: Callable[[Charge], None], seal: Seal
) -> list[memoryview]:
    _require_fit(arena.block_bytes, seal)
    note(charge_for(arena, seal, len(seal.used_bytes)))
    lease.extend(len(seal.used_bytes))
    return chunk_views(lease, seal)


def _require_fit(block_bytes: int, seal: Seal) -> None:
    """Raises SnapshotMiss for a chunk that would reach into the block behind its own."""
    largest = max(seal.used_bytes, default=0)
    if largest > block_bytes:
        raise SnapshotMiss(
            f"snapshot has chunks of {largest} bytes, the arena's blocks hold {block_bytes}; "
            "give the arena larger blocks, or recompute this request"
        )


def chunk_views(lease: Lease, seal: Seal) -> list[memoryview]:
    """Writable views of the used bytes of each chunk, in the blocks of a lease, a block a chunk.

    Raises SnapshotMiss if a chunk is larger than a block: its view would be other blocks' memory.
    """
    _require_fit(lease.block_bytes, seal)
    blocks = zip(lease.blocks, seal.used_bytes, strict=True)
    return [block.bytes_view(size_bytes) for block, size_bytes in blocks]
