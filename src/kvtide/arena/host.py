"""HostArena: host memory with a hard limit, handed out in blocks of one size."""

from __future__ import annotations

import warnings
from typing import final

from kvtide.device import Block, Device
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
        self._block_count = 0
        self._free: list[Block] = []
        self._peak_count = 0

    @property
    def used_bytes(self) -> int:
        """Bytes under lease."""
        return (self._block_count - len(self._free)) * self.block_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from the system: under lease, or kept for the next one."""
        return self._block_count * self.block_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever under lease."""
        return self._peak_count * self.block_bytes

    def lease(self, block_count: int) -> Lease:
        """`block_count` blocks (zero is valid), or ArenaFull and nothing taken."""
        assert block_count >= 0, "a lease can't be of less than nothing"
        used_count = self._block_count - len(self._free)
        if used_count + block_count > self._block_limit:
            raise ArenaFull(
                f"host arena: {block_count * self.block_bytes} bytes asked for, "
                f"{self.used_bytes} of {self.limit_bytes} in use; raise the limit, "
                "or let this request be recomputed"
            )
        while len(self._free) < block_count:
            self._grow()
        # One by one: the collector may give back a forgotten lease between any two steps.
        blocks = [self._free.pop() for _ in range(block_count)]
        self._peak_count = max(self._peak_count, used_count + block_count)
        return Lease(self, blocks)

    def _grow(self) -> None:
        slab_count = max(1, _SLAB_BYTES // self.block_bytes)
        count = min(slab_count, self._block_limit - self._block_count)
        assert count > 0, "grows only below the limit"
        size_bytes = count * self.block_bytes
        try:
            slab = self._device.allocate_host(size_bytes)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            raise ArenaFull(
                f"host arena: the system has no {size_bytes} bytes to give, with "
                f"{self.reserved_bytes} of {self.limit_bytes} taken; lower the limit"
            ) from error
        blocks = [Block(slab, number * self.block_bytes) for number in range(count)]
        self._free.extend(reversed(blocks))
        self._block_count += count

    def _take_back(self, blocks: list[Block]) -> None:
        self._free.extend(reversed(blocks))


@final
class Lease:
    """The right to some blocks of an arena, until `release`."""

    def __init__(self, arena: HostArena, blocks: list[Block]) -> None:
        self._arena = arena
        self._blocks: list[Block] | None = blocks

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks; none after `release`."""
        return tuple(self._blocks or ())

    @property
    def released(self) -> bool:
        """Whether the blocks were given back."""
        return self._blocks is None

    @property
    def size_bytes(self) -> int:
        """What this lease takes of the arena's limit."""
        return len(self._blocks or ()) * self._arena.block_bytes

    def release(self) -> None:
        """Gives the blocks back; harmless when it was done before."""
        if self._blocks is not None:
            blocks, self._blocks = self._blocks, None
            self._arena._take_back(blocks)

    def __del__(self) -> None:
        """A lease that was forgotten gives back its blocks, and says so."""
        if self._blocks:
            message = f"lease of {self.size_bytes} bytes was never released; discard its snapshot"
            self.release()  # before the warning, which may be turned into an error
            warnings.warn(message, ResourceWarning, stacklevel=2)


def _size(value: object, name: str, least: int) -> int:
    return checked_integer(value, f"host arena: {name}", least=least, error=LayoutError)
