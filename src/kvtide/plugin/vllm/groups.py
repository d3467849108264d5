"""BlockGroup: the blocks of a group of layers, as vLLM hands them over, adopted as a pool.

In vLLM a block has an id, and one id names the block's bytes in every layer of the group. So a
block is a slot of kvtide's, and a layer's part of it a row. Groups may lie in the same memory; vLLM
gives a block's id to one group at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch

from kvtide.device import Device
from kvtide.layout import Ids
from kvtide.plugin.description import Description, Part
from kvtide.pool import Pool
from kvtide.seal import Seal, Span
from kvtide.transfer import Mover

Layer = tuple[torch.Tensor, int]
"""A layer's blocks, [block, byte], and how many bytes of each are KV: padding follows them."""


@final
@dataclass(frozen=True)
class BlockGroup:
    """The blocks of a group, each of `block_bytes` in all layers of this rank together."""

    pool: Pool
    mover: Mover

    @classmethod
    def adopt(cls, number: int, layers: Sequence[Layer], device: Device) -> BlockGroup:
        """Makes a pool over the layers' tensors. Raises LayoutError if they can't be moved."""
        widths: dict[int, list[torch.Tensor]] = {}
        for tensor, block_bytes in layers:
            widths.setdefault(block_bytes, []).append(tensor[:, :block_bytes])
        parts = tuple(Part(f"bytes_{width}", tensors) for width, tensors in widths.items())
        # Block 0 belongs to nobody: vLLM reads it where there is no block.
        blocks = Description(f"vllm_{number}", parts, page_size=1, slot_count=len(layers[0][0]))
        pool = blocks.adopt(device)
        return cls(pool, Mover(pool))

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers: those of a chunk, so that a chunk is a block."""
        return self.pool.geometry.token_bytes

    def rows_of(self, blocks: Sequence[int]) -> list[Ids]:
        """The rows of blocks. Raises SlotError for an id that is no block's, or given twice."""
        return [rows.ids for rows in self.pool.rows_of(self.pool.checked(blocks))]

    def seal_of(self, name: str, spans: Sequence[Span]) -> Seal:
        """The seal of a block with that name; `spans` cover its bytes in order."""
        first = ((range(1),),)
        whole = tuple(Span(0, span.first, span.stop, span.checksum) for span in spans)
        return Seal(self.pool.geometry.canonical, name, 1, first, ((),), self.block_bytes, whole)

    def check(self, seal: Seal, name: str) -> None:
        """Raises SnapshotMiss unless a seal is that of such a block with that name."""
        seal.check_target(self.pool.geometry.canonical, name, 1)
        seal.check_coverage([self.block_bytes])
