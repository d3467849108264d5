"""Copies rows of a pool to blocks and back in three stages: plan, bind to memory, run."""

from kvtide.transfer.chunk_size import chunk_bytes_for
from kvtide.transfer.mover import Mover

__all__ = ["Mover", "chunk_bytes_for"]
