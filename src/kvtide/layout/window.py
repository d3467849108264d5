"""Sliding windows: layers that keep the last tokens only. A map with holes leads to their rows.

Source: SGLang's SWAKVPool. Its `full_to_swa_index_mapping` is 0 for a token that has left the
window, since slot 0 is padding.
"""

from __future__ import annotations

from kvtide.layout.gqa import GQA
from kvtide.layout.rules import Mapped
from kvtide.layout.spec import Layout

WINDOW = GQA.through("window", Mapped("full_to_window", hole=0))

WINDOW_AND_FULL = Layout.joined("window_and_full", full=GQA, window=WINDOW)
"""Both kinds of layers of one model, such as Gemma or gpt-oss, in one snapshot."""
