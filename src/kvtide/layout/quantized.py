"""Keys and values of one byte or less, with the scales that make numbers of them.

A scale is a plane like any other: KV without its scales is other KV. Values packed two a byte
(fp4) are bytes to a copy, so their planes are uint8 of half the width. Sources: SGLang's pools
for fp8, fp4 and mxfp8 (memory_pool.py, 0.5.23); OCP Microscaling Formats 1.0 for the block of 32
elements that shares a scale.
"""

from __future__ import annotations

from kvtide.layout.plane import Plane
from kvtide.layout.spec import Layout

GQA_SCALED = Layout(
    "gqa_scaled",
    Plane("k", "layer page token head head_dim"),
    Plane("v", "layer page token head v_head_dim"),
    Plane("k_scale", "layer page token head k_scale_dim", dtype="float32"),
    Plane("v_scale", "layer page token head v_scale_dim", dtype="float32"),
)
"""fp8 (or int8) with scales of each token and head, `scale_dim` of them."""

GQA_FP4 = Layout(
    "gqa_fp4",
    Plane("k", "layer page token head packed_dim", dtype="uint8"),
    Plane("v", "layer page token head v_packed_dim", dtype="uint8"),
    Plane("k_scale", "layer page token head k_scale_dim", dtype="uint8"),
    Plane("v_scale", "layer page token head v_scale_dim", dtype="uint8"),
)
"""fp4, two values a byte, and block scales of one byte."""

GQA_MXFP8 = Layout(
    "gqa_mxfp8",
    Plane("k", "layer page token head head_dim"),
    Plane("v", "layer page token head v_head_dim"),
    Plane("k_scale", "layer page head scale_block token", dtype="uint8"),
    Plane("v_scale", "layer page head v_scale_block token", dtype="uint8"),
)
"""mxfp8 whose scales are interleaved over a page: they move page by page, the values by token."""

MLA_FP4 = Layout(
    "mla_fp4",
    Plane("latent", "layer page token 1 packed_dim", dtype="uint8"),
    Plane("scale", "layer page token scale_dim", dtype="uint8"),
)
"""A packed latent with rope in one row, and its block scales."""
