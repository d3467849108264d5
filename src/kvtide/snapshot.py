"""Snapshot: what a request left behind, sealed, in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from kvtide.arena import HostArena, Lease
from kvtide.errors import SnapshotDamaged, SnapshotMiss
from kvtide.layout import Ids, Rows
from kvtide.seal import Seal, ranges_of
from kvtide.ticket import Ticket


@final
@dataclass(slots=True)
class Snapshot:
    """All that some token slots owned, in host memory, in the order of those slots.

    It owns its memory until it is discarded (`Tide.discard`); the slots it came from don't
    matter any more. `readers` are the restores of it that are under way.
    """

    seal: Seal
    lease: Lease
    readers: list[Ticket[Any]] = field(default_factory=list)

    @property
    def token_count(self) -> int:
        """Tokens in it; the slots that it is restored to must be as many."""
        return self.seal.token_count

    @property
    def size_bytes(self) -> int:
        """Host memory that it takes of the arena's limit; 0 once discarded."""
        return self.lease.size_bytes

    @property
    def chunks(self) -> list[memoryview]:
        """The used bytes of each chunk: the snapshot's own memory, valid until it is discarded.

        With `seal.to_json()` they are all of the snapshot: see `load`. Raises SnapshotMiss once it
        is discarded.
        """
        self.require_held()
        blocks = zip(self.lease.blocks, self.seal.used_bytes, strict=True)
        return [block.bytes_view(size_bytes).toreadonly() for block, size_bytes in blocks]

    def verify(self) -> None:
        """Raises SnapshotDamaged, naming the first bad chunk, unless all bytes are as sealed.

        Reads host memory alone. Raises SnapshotMiss once the snapshot is discarded.
        """
        self.seal.check_bytes(self.chunks)

    @classmethod
    def load(cls, arena: HostArena, seal: Seal, chunks: Sequence[memoryview | bytes]) -> Snapshot:
        """A snapshot with a copy of `chunks`, which are what `Snapshot.chunks` gave for that seal.

        Raises SnapshotDamaged where a byte isn't the sealed one, SnapshotMiss for chunks that the
        arena's blocks can't hold, ArenaFull; nothing is held then.
        """
        seal.check_bytes(chunks)
        largest = max(seal.used_bytes, default=0)
        if largest > arena.block_bytes:
            raise SnapshotMiss(
                f"snapshot has chunks of {largest} bytes, the arena's blocks hold "
                f"{arena.block_bytes}; give the arena larger blocks, or recompute this request"
            )
        lease = Lease(arena)
        try:
            lease.extend(len(chunks))
            for block, chunk, size_bytes in zip(lease.blocks, chunks, seal.used_bytes, strict=True):
                block.bytes_view(size_bytes)[:] = memoryview(chunk)[:size_bytes]
            snapshot = cls(seal, lease)
            snapshot.verify()  # the bytes that were copied, and not those that were read before
            return snapshot
        except BaseException:
            lease.release()
            raise

    def require_held(self) -> None:
        """Raises SnapshotMiss if it was discarded."""
        if self.lease.released:
            raise SnapshotMiss(f"snapshot of {self.token_count} tokens was discarded already")

    def rows_in(self, group: int, target: Rows, *, keep_extra_rows: bool = False) -> Ids:
        """The rows of `target` that this snapshot's rows of a group go to, in the snapshot's order.

        Raises SnapshotMiss where a token that has a row here has none there, or where tokens that
        share a row here are in two there: what they owned would be lost. Also where a token that
        has a row there has none here: that row would keep another request's bytes, unless
        `keep_extra_rows` says that this is meant.
        """
        sealed = self.seal.tokens[group], self.seal.lasts[group]
        if sealed == (ranges_of(target.tokens), ranges_of(target.lasts)):
            return target.ids  # token for token, as mostly
        tokens = self.seal.tokens_of(group)
        found = target.of_tokens(tokens)
        if found is None:
            missing = tokens[~np.isin(tokens, target.tokens)][0]
            raise SnapshotMiss(
                f"snapshot has a row for token {missing} of {self.token_count}, the target none: "
                "its window, or its share of the context, is another one"
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
                "it would keep another request's bytes; map that token to no row, or say that "
                "this is meant by keep_extra_rows=True"
            )
        return found

    def _require_same_rows(self, group: int, tokens: Ids, target: Rows) -> None:
        """Raises SnapshotMiss where the target begins a row at a token that shares a row here."""
        begun = target.tokens[(target.tokens > tokens[0]) & ~np.isin(target.tokens, tokens)]
        holders = np.searchsorted(tokens, begun) - 1
        begun = begun[begun <= self.seal.lasts_of(group)[holders]]
        if begun.size:
            raise SnapshotMiss(
                f"the target begins a row at token {begun[0]}, the snapshot has that token in "
                "a row with others; restore to slots that fill rows as those it is from did"
            )

    def _require_same_lasts(
        self, group: int, tokens: Ids, target: Rows, *, keep_extra_rows: bool
    ) -> None:
        """Raises SnapshotMiss where a row holds tokens up to another one here than there.

        A row moves whole, so tokens that only the target's row holds would get what lay behind
        the snapshot's; `keep_extra_rows` says that nothing reads them.
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
