"""Compressed caches: `ratio` tokens share a row; tokens that aren't compressed yet wait in a ring.

Source: DeepSeek-V4's C4 and C128 regions (ratios 4 and 128) and QSA's compressed index keys as
SGLang 0.5.23 keeps them: row `slot // ratio`, and a ring for each request.
"""

from __future__ import annotations

from kvtide.layout.plane import Plane
from kvtide.layout.rules import EveryNth
from kvtide.layout.spec import Layout


def compressed(name: str, ratio: int) -> Layout:
    """One latent for `ratio` tokens, and a ring of the request's pending tokens."""
    return Layout(
        name,
        Plane("kv", "layer page token 1 latent_dim", rows=(EveryNth(ratio),)),
        Plane("pending", "layer request ring latent_dim", optional=True),
    )


COMPRESSED_4 = compressed("compressed_4", 4)
COMPRESSED_128 = compressed("compressed_128", 128)
