"""Grouped-query attention, and multi-head attention as its case of one query head a group.

Sources of the forms: NHD and HND are the two orders of FlashInfer and vLLM; a fused tensor of k
and v is vLLM's; scales beside fp8 and fp4 values are SGLang's pools.
"""

from __future__ import annotations

from kvtide.layout.plane import Plane
from kvtide.layout.spec import Layout

GQA = Layout(
    "gqa",
    Plane("k", "layer page token head head_dim"),
    Plane("v", "layer page token head v_head_dim"),
)

GQA_HND = Layout(
    "gqa_hnd",
    Plane("k", "layer page head token head_dim"),
    Plane("v", "layer page head token v_head_dim"),
)

GQA_FUSED = Layout("gqa_fused", Plane("kv", "layer page 2 token head head_dim"))

K_ONLY = Layout("k_only", Plane("k", "layer page token head head_dim"))
