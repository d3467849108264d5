"""All cases, and all pools that are refused, by family."""

from __future__ import annotations

from types import ModuleType

from kvtide.plugin.sglang.cases import (
    ascend,
    compressed_keys,
    deepseek_v4,
    draft_model,
    keys_values,
    keys_values_quantized,
    latent,
    recurrent_state,
    sliding_window,
    unified_memory,
)
from kvtide.plugin.sglang.cases.round_trips import Case, Refusal

FAMILIES: tuple[tuple[str, ModuleType], ...] = (
    ("Keys and values", keys_values),
    ("Keys and values, quantized", keys_values_quantized),
    ("Latents", latent),
    ("Recurrent state", recurrent_state),
    ("Compressed keys", compressed_keys),
    ("Sliding windows", sliding_window),
    ("Unified memory", unified_memory),
    ("Draft models", draft_model),
    ("Ascend NPU", ascend),
    ("DeepSeek-V4", deepseek_v4),
)
"""A title, and the module that has the family's CASES, and REFUSED if any are."""

CASES: tuple[Case, ...] = tuple(case for _, family in FAMILIES for case in family.CASES)

REFUSED: tuple[Refusal, ...] = tuple(
    refusal for _, family in FAMILIES for refusal in getattr(family, "REFUSED", ())
)
