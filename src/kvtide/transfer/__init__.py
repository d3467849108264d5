"""Slots to chunks to bytes, and back: plan everything, bind it to buffers and blocks, run it."""

from kvtide.transfer.chunk_size import chunk_bytes_for
from kvtide.transfer.mover import Mover
from kvtide.transfer.plan import checked_slots

__all__ = ["Mover", "checked_slots", "chunk_bytes_for"]
