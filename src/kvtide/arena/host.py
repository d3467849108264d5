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

# The arena takes memory from the system in slabs of about this size and keeps it. So a copy in
# the steady state neither allocates memory nor faults in fresh pages.
_SLAB_BYTES = 128 << 20


def slab_count_of(block_bytes: int) -> int:
    """How many blocks the arena takes from the system at once, if its limit has room for them."""
    return max(1, _SLAB_BYTES // block_bytes)


@final
class HostArena:
    """Blocks of `block_bytes`, together never more than `limit_bytes`.

    Blocks of one size can't fragment: a lease fits exactly when enough blocks are free. The
    limit counts whole blocks, leased or kept for later. Not thread-safe: one thread schedules.

    `arena_for` makes an arena whose limit also holds what stands beside the blocks.
    """

    def __init__(
        self,
        device: Device,
        *,
        limit_bytes: int,
        block_bytes: int,
        beside_bytes: int = 0,
        seal_bytes: int | None = None,
    ) -> None:
        """`beside_bytes` of the limit aren't for blocks, and charges may take `seal_bytes`.

        By default nothing is kept for them, and they aren't limited. Raises LayoutError for a size
        that isn't an integer; `parse_size` reads `24MiB`.
        """
        self._device = device
        self.limit_bytes = _size(limit_bytes, "limit_bytes", 0)
        self.block_bytes = _size(block_bytes, "block_bytes", 1)
        beside_bytes = _size(beside_bytes, "beside_bytes", 0)
        self._most_bytes = max(0, self.limit_bytes - beside_bytes)
        self._block_limit = self._most_bytes // self.block_bytes
        self._seal_limit = seal_bytes
        self._charges: dict[weakref.ref[Charge], int] = {}
        self._ended: deque[weakref.ref[Charge]] = deque()
        # `_all` has every block. Each block is also in `_free` or in the list of one lease.
        self._all: list[Block] = []
        self._free: list[Block] = []
        self._peak_count = 0
        self._leased: dict[weakref.ref[Lease], list[Block]] = {}
        # A lease may be forgotten at any moment and in any thread. C code notes it here, and the
        # next call that needs free blocks takes the blocks back.
        self._forgotten: deque[weakref.ref[Lease]] = deque()
        self._released: list[Lease] = []  # released while a move still used their blocks

    @property
    def used_bytes(self) -> int:
        """Bytes under lease, also after the release while a move still uses them."""
        self._reclaim()
        return (len(self._all) - len(self._free)) * self.block_bytes

    @property
    def block_count(self) -> int:
        """How many blocks there can be at most."""
        return self._block_limit

    @property
    def free_count(self) -> int:
        """How many blocks can be leased now."""
        self._reclaim()
        return self._block_limit - (len(self._all) - len(self._free))

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from the system: under lease, or kept for the next lease."""
        return len(self._all) * self.block_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever under lease."""
        return self._peak_count * self.block_bytes

    @property
    def charged_bytes(self) -> int:
        """Bytes beside the blocks that snapshots need.

        It is the sum of all charges, made anew each time, so that no interrupt makes it wrong.
        """
        while self._ended:
            self._charges.pop(self._ended[0], None)
            self._ended.popleft()
        return sum(self._charges.values())

    def lease(self, block_count: int) -> Lease:
        """Leases `block_count` blocks; zero is valid.

        Raises ArenaFull, and takes nothing, if too few are left; LayoutError for an invalid count.
        """
        lease = Lease(self)
        try:
            lease.extend(block_count)
            return lease
        except BaseException:
            lease.release()
            raise

    def charge(self, size_bytes: int) -> Charge:
        """Counts memory beside the blocks for as long as the result lives.

        Raises ArenaFull if charges take more than they may.
        """
        charged_bytes = self.charged_bytes
        if self._seal_limit is not None and charged_bytes + size_bytes > self._seal_limit:
            raise ArenaFull(
                f"host arena: the seals of {len(self._charges)} snapshots take {charged_bytes} of "
                f"{self._seal_limit} bytes, and another one {size_bytes}; raise the limit of host "
                "memory, a part of which they are, or let this request be recomputed"
            )
        charge = Charge()
        self._charges[weakref.ref(charge, self._ended.append)] = size_bytes
        return charge

    def _note(self, lease: Lease, blocks: list[Block]) -> None:
        """Makes the arena take back all of `blocks` when the lease is forgotten."""
        self._leased[weakref.ref(lease, self._forgotten.append)] = blocks

    def _move_to(self, blocks: list[Block], block_count: int) -> None:
        """Moves free blocks to a lease's list; ArenaFull, and none moved, if too few are left."""
        block_count = _size(block_count, "block_count", 0)
        self._reclaim()
        used_count = len(self._all) - len(self._free)
        if used_count + block_count > self._block_limit:
            raise ArenaFull(
                f"host arena: {block_count * self.block_bytes} bytes asked for, "
                f"{used_count * self.block_bytes} of {self._most_bytes} in use; raise the limit, "
                "or let this request be recomputed"
            )
        while len(self._free) < block_count:
            self._grow()
        self._peak_count = max(self._peak_count, used_count + block_count)
        move_last(self._free, blocks, block_count)

    def _grow(self) -> None:
        count = min(slab_count_of(self.block_bytes), self._block_limit - len(self._all))
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
        """Takes back a lease's blocks: now, or when the moves that use them have ended."""
        if not lease.in_use:
            move_last(blocks, self._free, len(blocks))
        elif lease not in self._released:
            self._released.append(lease)

    def _move_again(self, lease: Lease, blocks: list[Block], block_count: int) -> None:
        """Undoes `_take_back`, while nobody has leased a block since: `_free` ends with them."""
        self._released = [other for other in self._released if other is not lease]
        move_last(self._free, blocks, block_count - len(blocks))

    def _reclaim(self) -> None:
        """Takes back the blocks of forgotten leases, and of released ones whose moves have ended.

        Each step is repeatable, so an interrupt between two steps loses nothing.
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
class Charge:
    """Counts as memory beside the blocks of an arena while it lives: see HostArena.charge."""

    __slots__ = ("__weakref__",)


@final
class Lease:
    """The right to some blocks of an arena, until `release`.

    While a move uses a block no other lease gets it, even if this lease is released or forgotten.
    """

    _is_released = True  # for `__del__`, if an interrupt ends `__init__`

    def __init__(self, arena: HostArena) -> None:
        """A lease of no blocks yet; see `extend` and HostArena.lease."""
        self._arena = arena
        self._blocks: list[Block] = []
        self._moves: list[Job[Any]] = []
        arena._note(self, self._blocks)
        self._is_released = False

    def extend(self, block_count: int) -> None:
        """Takes `block_count` more blocks, or raises ArenaFull and takes none.

        A caller that makes the lease first and extends it then can release it wherever Ctrl-C
        comes.
        """
        assert not self._is_released, "a lease that was released takes no more blocks"
        self._arena._move_to(self._blocks, block_count)

    def use(self, move: Job[Any]) -> None:
        """Keeps the blocks until `move` has ended, even if the lease is released before."""
        self._moves = [move, *[other for other in self._moves if not other.done()]]

    @property
    def in_use(self) -> bool:
        """Whether a move still uses the blocks."""
        return any(not move.done() for move in self._moves)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks; none after `release`."""
        return () if self._is_released else tuple(self._blocks)

    @property
    def block_bytes(self) -> int:
        """Bytes of each block."""
        return self._arena.block_bytes

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._is_released

    @property
    def size_bytes(self) -> int:
        """Bytes of the arena's limit that this lease takes; 0 after `release`."""
        return len(self.blocks) * self._arena.block_bytes

    def release(self) -> None:
        """Gives the blocks back, now or when the moves that use them have ended. Repeatable."""
        self._is_released = True
        self._arena._take_back(self, self._blocks)

    def hold_again(self, block_count: int) -> None:
        """Undoes `release`, or does nothing before it: the lease has its `block_count` blocks.

        Only valid while nobody else has leased a block since the release.
        """
        self._arena._move_again(self, self._blocks, block_count)
        self._is_released = False

    def __del__(self) -> None:
        """Warns of a lease that was never released; the arena takes its blocks back anyway."""
        if not self._is_released and self._blocks:
            message = f"lease of {self.size_bytes} bytes was never released; discard its snapshot"
            warnings.warn(message, ResourceWarning, stacklevel=2)


def _size(value: object, name: str, least: int) -> int:
    return checked_integer(value, f"host arena: {name}", least=least, error=LayoutError)
