"""How layouts write a dtype: by its plain name, such as `bfloat16`. Pure."""

from __future__ import annotations

from kvtide.errors import LayoutError
from kvtide.integers import shown

DTYPE_BYTES = {
    "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "bfloat16": 2, "float16": 2, "int16": 2, "float32": 4, "int32": 4, "int64": 8,
}  # fmt: skip


def dtype_name(dtype: object) -> str:
    """The name of torch's dtype (`torch.bfloat16`), or of one that is a name already."""
    return str(dtype).removeprefix("torch.")


def checked_dtype(dtype: object, what: str) -> str:
    """The dtype's name if it is known; LayoutError, with the known ones, for anything else."""
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise LayoutError(f"{what}: dtype {shown(dtype)} isn't one of {[*DTYPE_BYTES]}")
    return dtype
