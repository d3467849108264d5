"""Grouped-query attention, and multi-head attention as its case of one query head a group."""

from __future__ import annotations

from kvtide.layout.spec import Layout, Plane

GQA = Layout(
    "gqa",
    Plane("k", "layer page token head head_dim"),
    Plane("v", "layer page token head v_head_dim"),
)
