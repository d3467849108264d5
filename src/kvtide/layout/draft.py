"""A draft model's KV beside the target's: the same slots, other layers, one snapshot."""

from __future__ import annotations

from kvtide.layout.gqa import GQA
from kvtide.layout.mla import MLA
from kvtide.layout.spec import Layout

TARGET_AND_DRAFT = Layout.joined("target_and_draft", target=GQA, draft=GQA)

MLA_TARGET_AND_DRAFT = Layout.joined("mla_target_and_draft", target=MLA, draft=MLA)
