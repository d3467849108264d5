"""Names of models: kvtide's built-in models, and the form of ids on the hub. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvtide.models.types import Config

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""An id on the hub, such as org/name."""

SMOLLM2_NAME = "smollm2"
TINY_RANDOM = "tiny-random"

BUILT_IN: Mapping[str, Config] = {
    SMOLLM2_NAME: {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
    },
    TINY_RANDOM: {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
    },
}
"""The configurations of the built-in models, with the fields that decide their cache. So
`kvtide plan` need not fetch or build them."""
