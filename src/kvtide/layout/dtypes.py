"""How layouts write a dtype: by its plain name, such as `bfloat16`. Pure."""

from __future__ import annotations


def dtype_name(dtype: object) -> str:
    """The name of torch's dtype (`torch.bfloat16`), or of one that is a name already."""
    return str(dtype).removeprefix("torch.")
