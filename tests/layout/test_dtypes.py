from __future__ import annotations

import pytest
import torch

from kvtide.layout.dtypes import DTYPE_BYTES, dtype_name


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_layouts_and_torch_agree_on_names(name: str) -> None:
    """A dtype of torch's has the name that a layout writes; a name is its own."""
    dtype: torch.dtype = getattr(torch, name)
    assert (name, name) == (dtype_name(dtype), dtype_name(name))
    assert DTYPE_BYTES[name] == dtype.itemsize
