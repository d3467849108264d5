"""Copies rows of a pool to blocks and back in three stages: plan, bind to memory, run."""

from kvtide.transfer.chunk_size import chunk_bytes_for
from kvtide.transfer.mover import Mover
from kvtide.transfer.plan import checked_slots

__all__ = ["Mover", "checked_slots", "chunk_bytes_for"]
