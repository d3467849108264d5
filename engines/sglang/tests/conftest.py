"""SGLang as it is without an accelerator and without its kernels."""

from __future__ import annotations

import sys

import pytest

if "sgl_kernel" not in sys.modules:
    pytest.exit("SGLang's tests need its environment: run `make test-sglang`", returncode=4)

from sglang.srt.runtime_context import get_parallel

# A server sets these from its arguments; pools of latents can't be built without.
get_parallel().override_permanently(attn_dcp_size=1, attn_dcp_rank=0)
