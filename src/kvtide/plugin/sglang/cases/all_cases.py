"""All cases, and all pools that are refused, by family."""

from __future__ import annotations

from types import ModuleType

from kvtide.plugin.sglang.checkup import (
    cases_attention,
    cases_attention_quantized,
    cases_compressed,
    cases_deepseek_v4,
    cases_draft,
    cases_latent,
    cases_npu,
    cases_state,
    cases_unified,
    cases_window,
)
from kvtide.plugin.sglang.checkup.trips import Case, Refusal

FAMILIES: tuple[tuple[str, ModuleType], ...] = (
    ("Keys and values", cases_attention),
    ("Keys and values, quantized", cases_attention_quantized),
    ("Latents", cases_latent),
    ("Recurrent state", cases_state),
    ("Compressed keys", cases_compressed),
    ("Sliding windows", cases_window),
    ("Unified memory", cases_unified),
    ("Draft models", cases_draft),
    ("Ascend NPU", cases_npu),
    ("DeepSeek-V4", cases_deepseek_v4),
)
"""A title, and the module that has the family's CASES, and REFUSED if any are."""

CASES: tuple[Case, ...] = tuple(case for _, family in FAMILIES for case in family.CASES)

REFUSED: tuple[Refusal, ...] = tuple(
    refusal for _, family in FAMILIES for refusal in getattr(family, "REFUSED", ())
)
