"""Recurrent state: a layer without attention keeps as much of a long request as of a short one.

Source: SGLang's MambaPool (conv and temporal, one slot a request). Qwen3-Next and other hybrids
have it beside full attention.
"""

from __future__ import annotations

from kvtide.layout.gqa import GQA
from kvtide.layout.mla import MLA
from kvtide.layout.plane import Plane
from kvtide.layout.spec import Layout

RECURRENT = Layout(
    "recurrent",
    Plane("conv", "layer request channel width"),
    Plane("ssm", "layer request head head_dim state", dtype="float32"),
)

RECURRENT_AND_FULL = Layout.joined("recurrent_and_full", full=GQA, state=RECURRENT)

RECURRENT_AND_MLA = Layout.joined("recurrent_and_mla", full=MLA, state=RECURRENT)
