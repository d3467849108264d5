"""HostArena: host memory with a hard limit, handed out in blocks of one size."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from typing import Any, final

from kvtide.atomic import call_each, move_last
from kvtide.device import Block, Device, Job
from kvtide.errors import ArenaFull, LayoutError
from kvtide.integers import checked_integer

# Memory is taken from the system in slabs of about this size, and kept: a copy in the steady
# state then neither allocates nor faults in fresh pages.
_SLAB_BYTES = 64 << 20


@final
class HostArena:
    """Blocks of `block_bytes`, together never more than `limit_bytes`.

    Blocks of one size can't fragment: a lease fits exactly when enough blocks are free. The
    limit counts whole blocks, leased or kept for later. Not thread-safe: one thread schedules.
    """

    def __init__(self, device: Device, *, limit_bytes: int, block_bytes: int) -> None:
        """Raises LayoutError for what is no size in bytes; `parse_size` makes one of a text."""
        self._device = device
        self.limit_bytes = _size(limit_bytes, "limit_bytes", 0)
        self.block_bytes = _size(block_bytes, "block_bytes", 1)
        self._block_limit = self.limit_bytes // self.block_bytes
        # A block lies among the free ones or in one lease's list, and in `_all` as well.
        self._all: list[Block] = []
        self._free: list[Block] = []
        self._peak_count = 0
        self._leased: dict[weakref.ref[Lease], list[Block]] = {}
        # Leases that were forgotten, in whatever thread and moment: C notes it, and the next who
        # asks takes the blocks back.
        self._forgotten: deque[weakref.ref[Lease]] = deque()
        self._released: list[Lease] = []  # while a move used them

    @property
    def used_bytes(self) -> int:
        """Bytes under lease, or of a lease that was released while a move uses it still."""
        self._reclaim()
        return (len(self._all) - len(self._free)) * self.block_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from the system: under lease, or kept for the next one."""
        return len(self._all) * self.block_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever under lease."""
        return self._peak_count * self.block_bytes

    def lease(self, block_count: int) -> Lease:
        """`block_count` blocks (zero is valid), or ArenaFull and nothing taken.

        Raises LayoutError for what is no count.
        """
        lease = Lease(self)
        try:
            lease.extend(block_count)
            return lease
        except BaseException:
            lease.release()
            raise

    def _note(self, lease: Lease, blocks: list[Block]) -> None:
        """From now on the arena takes back what is in `blocks` once the lease is forgotten."""
        self._leased[weakref.ref(lease, self._forgotten.append)] = blocks

    def _move_to(self, blocks: list[Block], block_count: int) -> None:
        """Free blocks to a lease's list, or ArenaFull and nothing taken."""
        block_count = _size(block_count, "block_count", 0)
        self._reclaim()
        used_count = len(self._all) - len(self._free)
        if used_count + block_count > self._block_limit:
            raise ArenaFull(
                f"host arena: {block_count * self.block_bytes} bytes asked for, "
                f"{used_count * self.block_bytes} of {self.limit_bytes} in use; raise the limit, "
                "or let this request be recomputed"
            )
        while len(self._free) < block_count:
            self._grow()
        self._peak_count = max(self._peak_count, used_count + block_count)
        move_last(self._free, blocks, block_count)

    def _grow(self) -> None:
        slab_count = max(1, _SLAB_BYTES // self.block_bytes)
        count = min(slab_count, self._block_limit - len(self._all))
        assert count > 0, "grows only below the limit"
        size_bytes = count * self.block_bytes
        try:
            slab = self._device.allocate_host(size_bytes)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            raise ArenaFull(
                f"host arena: the system has no {size_bytes} bytes to give, with "
                f"{self.reserved_bytes} of {self.limit_bytes} taken; lower the limit"
            ) from error
        blocks = [Block(slab, number * self.block_bytes) for number in reversed(range(count))]
        call_each(list.extend, (self._all, self._free), (blocks, blocks))

    def _take_back(self, lease: Lease, blocks: list[Block]) -> None:
        """What a lease still has, unless a move uses it: then as soon as that has ended."""
        if not lease.in_use:
            move_last(blocks, self._free, len(blocks))
        elif lease not in self._released:
            self._released.append(lease)

    def _move_again(self, lease: Lease, blocks: list[Block], block_count: int) -> None:
        """What `_take_back` was given last, and so is taken first."""
        self._released = [other for other in self._released if other is not lease]
        move_last(self._free, blocks, block_count - len(blocks))

    def _reclaim(self) -> None:
        """Takes back what was forgotten, and what was released while a move used it.

        Each step may be repeated: an interrupt between two loses nothing.
        """
        while self._forgotten:
            blocks = self._leased.get(self._forgotten[0], [])
            move_last(blocks, self._free, len(blocks))
            self._leased.pop(self._forgotten[0], None)
            self._forgotten.popleft()
        for lease in tuple(self._released):
            if not lease.in_use:
                move_last(lease._blocks, self._free, len(lease._blocks))
                self._released.remove(lease)


@final
class Lease:
    """The right to some blocks of an arena, until `release`.

    Nobody else gets a block while a move uses it, whatever becomes of the lease.
    """

    _is_released = True  # until it is made, for `__del__`

    def __init__(self, arena: HostArena) -> None:
        """Of no blocks: see `extend`, and HostArena.lease."""
        self._arena = arena
        self._blocks: list[Block] = []
        self._moves: list[Job[Any]] = []
        arena._note(self, self._blocks)
        self._is_released = False

    def extend(self, block_count: int) -> None:
        """Takes `block_count` blocks more, or raises ArenaFull and takes none.

        Whoever makes a lease first and extends it then can give back all that it ever has,
        wherever Ctrl-C comes.
        """
        assert not self._is_released, "a lease that was released takes no more blocks"
        self._arena._move_to(self._blocks, block_count)

    def use(self, move: Job[Any]) -> None:
        """Blocks stay this lease's until `move` has ended, also when it is released before."""
        self._moves = [move, *[other for other in self._moves if not other.done()]]

    @property
    def in_use(self) -> bool:
        """Whether a move that uses its blocks is under way."""
        return any(not move.done() for move in self._moves)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks; none after `release`."""
        return () if self._is_released else tuple(self._blocks)

    @property
    def released(self) -> bool:
        """Whether the blocks were given back, or are as soon as no move uses them."""
        return self._is_released

    @property
    def size_bytes(self) -> int:
        """What this lease takes of the arena's limit; 0 after `release`."""
        return len(self.blocks) * self._arena.block_bytes

    def release(self) -> None:
        """Gives the blocks back, now or when the moves that use them have ended. Repeatable."""
        self._is_released = True
        self._arena._take_back(self, self._blocks)

    def hold_again(self, block_count: int) -> None:
        """Takes back the `block_count` blocks that it just released, or hadn't yet: for whoever
        undoes it, when nobody has leased any since."""
        self._arena._move_again(self, self._blocks, block_count)
        self._is_released = False

    def __del__(self) -> None:
        """A lease that was forgotten says so; the arena takes its blocks back in any case."""
        if not self._is_released and self._blocks:
            message = f"lease of {self.size_bytes} bytes was never released; discard its snapshot"
            warnings.warn(message, ResourceWarning, stacklevel=2)


def _size(value: object, name: str, least: int) -> int:
    return checked_integer(value, f"host arena: {name}", least=least, error=LayoutError)
