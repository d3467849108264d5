"""Multi-head latent attention: one latent and one rotary key a token, for all heads.

Sources: DeepSeek-V2 (arXiv 2405.04434) for the parts. SGLang's MLATokenToKVPool keeps both in one
row; its NPU pool keeps them in two planes, in Ascend's ND order or in NZ tiles of 16 columns.
DeepSeek-V3.2's sparse attention adds index keys, in some layers only.
"""

from __future__ import annotations

from kvtide.layout.plane import Plane
from kvtide.layout.spec import Layout

MLA = Layout("mla", Plane("kv", "layer page token 1 latent_dim"))
"""Latent and rope in one row of `latent_dim`, which is `kv_lora_rank + qk_rope_head_dim`."""

MLA_SPLIT = Layout(
    "mla_split",
    Plane("latent", "layer page token 1 kv_lora_rank"),
    Plane("rope", "layer page token 1 qk_rope_head_dim"),
    Plane("index_k", "index_layer page token 1 index_head_dim", optional=True),
    Plane("index_scale", "index_layer page token index_scale_dim", dtype="float32", optional=True),
)
"""The NPU's order: two planes, and index keys with their scales where the model has them."""

MLA_PACKED = Layout(
    "mla_packed",
    Plane("latent", "layer page token 1 record_bytes", dtype="uint8"),
    Plane("index_k", "index_layer page token 1 index_head_dim", optional=True),
    Plane("index_scale", "index_layer page token index_scale_dim", dtype="float32", optional=True),
)
"""fp8 records: a token's latent, scales and rope in one row of bytes."""

MLA_NZ = Layout(
    "mla_nz",
    Plane("latent", "layer page latent_tile token 16"),
    Plane("rope", "layer page rope_tile token 16"),
    Plane("index_k", "index_layer page token 1 index_head_dim", optional=True),
)
"""Ascend's NZ: tiles of 16 columns, each over the whole page, so that the page is the row."""

DSA = Layout(
    "dsa",
    Plane("kv", "layer page token 1 latent_dim"),
    Plane("index_k", "index_layer page index_page_bytes", dtype="uint8"),
    Plane("tail_k", "tail_layer request tail_token index_head_dim", optional=True),
    Plane("tail_score", "tail_layer request tail_token", dtype="float32", optional=True),
)
"""Sparse attention on CUDA: a page's index keys and scales share a row; a request owns its tail."""
