"""Slots to chunks to bytes, and back."""

from kvtide.transfer.mover import Mover
from kvtide.transfer.plan import checked_slots, chunk_tokens_for

__all__ = ["Mover", "checked_slots", "chunk_tokens_for"]
