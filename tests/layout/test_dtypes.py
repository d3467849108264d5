from __future__ import annotations

import pytest
import torch

from kvtide.layout.dtypes import DTYPE_BYTES, dtype_name


@pytest.mark.parametrize("name", DTYPE_BYTES)
def test_layouts_and_torch_agree_on_names(name: str) -> None:
    """A dtype of torch has the name that layouts use, and a name stays unchanged."""
    dtype: torch.dtype = getattr(torch, name)
    assert (name, name) == (dtype_name(dtype), dtype_name(name))
    assert DTYPE_BYTES[name] == dtype.itemsize
