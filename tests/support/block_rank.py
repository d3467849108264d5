"""A rank's blocks over the tiers below it, as a worker of vLLM's has them; without vLLM."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kvtide.arena import HostArena
from kvtide.device import CPUDevice
from kvtide.plugin.vllm.block_store import BlockStore
from kvtide.plugin.vllm.groups import BlockGroup
from kvtide.plugin.vllm.lookups import Lookups
from kvtide.plugin.vllm.messages import BlockReport, Orders
from kvtide.plugin.vllm.stack import TierStack
from kvtide.plugin.vllm.tiers_below import TiersBelow
from kvtide.plugin.vllm.timely import TimelyThreads
from kvtide.tier import Namespace

KEYS = (b"a", b"b", b"c")
NAMES = Namespace(model="m", weights="w", layout="l")
BLOCK_BYTES, PADDED_BYTES = 5000, 5120
COUNT = 8


class BlockRank:
    """A worker with `COUNT` blocks on a device, and the look-ups of its scheduler."""

    def __init__(self, below: TiersBelow, seed: int) -> None:
        make = torch.Generator().manual_seed(seed)
        self.layer = torch.randint(
            -128, 128, (COUNT, PADDED_BYTES), dtype=torch.int8, generator=make
        )
        self._device = CPUDevice(lanes=1)
        group = BlockGroup.adopt(0, [(self.layer, BLOCK_BYTES)], self._device)
        arena = HostArena(self._device, limit_bytes=COUNT * 8192, block_bytes=8192)
        self.below = below
        self.store = BlockStore([group], lambda key: 0, arena, NAMES, below.tier, deadline_s=60)
        self._lookups = Lookups(TierStack(below.tiers), TimelyThreads(1, 60))
        self._jobs = 0
        self._requests = 0

    def block(self, number: int) -> bytes:
        """The bytes of a block on the device."""
        return self.layer[number, :BLOCK_BYTES].numpy().tobytes()

    def save(self, keys: Sequence[bytes]) -> BlockReport:
        """Saves the blocks 1, 2, … under these keys, and waits until tiers have them."""
        self._move(self.store.save, keys, 1)
        while self.store._writer is not None and self.store._writer._running:
            time.sleep(0.001)
        return self.store.take_report()

    def found(self, keys: Sequence[bytes]) -> list[bool | None]:
        """What the scheduler is told that the tiers have, as to a new request."""
        self._requests += 1
        name = str(self._requests)
        for _ in range(2):
            answers = [self._lookups.ask(name, key, NAMES.key_of(key.hex())) for key in keys]
            self._lookups.flush()
            self._lookups.wait(60)
        return answers

    def fetch(self, keys: Sequence[bytes]) -> BlockReport:
        """Brings blocks to host memory, if tiers have them."""
        self.store.follow(Orders(forget=list(keys)))
        self.store.follow(Orders(fetch=list(keys)))
        report = BlockReport()
        while len(report.fetched) + len(report.missing) < len(keys):
            report.add(self.store.take_report())
        return report

    def load(self, keys: Sequence[bytes], first: int) -> None:
        """Loads blocks from host memory to the blocks `first`, … of the device."""
        self._move(self.store.load, keys, first)

    def close(self) -> None:
        """Ends all."""
        self.store.close()
        self._lookups.close()
        self.below.close()
        self._device.close()

    def _move(self, begin: object, keys: Sequence[bytes], first: int) -> None:
        assert callable(begin)
        self._jobs += 1
        begin(self._jobs, [[(key, first + number) for number, key in enumerate(keys)]])
        self.store.wait([self._jobs])
        (ended,) = self.store.take_ended()
        assert ended.went_well
