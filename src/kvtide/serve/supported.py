"""Which models the engine serves: decoders in which every layer attends to all earlier tokens.

`kvtide.models` reads the configuration, for this engine and for `kvtide plan`. A model type that is
unknown there isn't served, and special attention is refused with the reason. Some things don't show
in a configuration, such as an argument that changes the attention. The adapter's trial pass and
`kvtide.serve.owncheck` find them, before the first request.
"""

from __future__ import annotations

from typing import Any

import torch

from kvtide.errors import UsageError
from kvtide.layout import Geometry
from kvtide.layout.dtypes import dtype_name
from kvtide.models.attention import special_attention
from kvtide.models.cache import cache_of


def geometry_of(config: Any, dtype: torch.dtype | str, page_size: int) -> Geometry:
    """The KV geometry of a transformers configuration, for pools of `dtype`.

    `page_size` is in tokens. Raises UsageError, with the reason, for a model that the engine
    doesn't serve.
    """
    text = config.get_text_config(decoder=True).to_dict()
    name = text.get("model_type")
    try:
        reason = special_attention(text)
        if reason is None:
            return cache_of(text, dtype=dtype_name(dtype), page_size=page_size).geometry
    except UsageError as error:
        reason = str(error).removeprefix(f"model type {name!r}: ")
    raise UsageError(
        f"model type {name!r} isn't served: {reason}; choose a decoder with full attention in "
        "every layer, such as Llama, Qwen or SmolLM2"
    )
