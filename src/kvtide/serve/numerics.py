"""What decides the last bits of a computation, apart from its inputs."""

from __future__ import annotations

import os
from importlib.metadata import version

import torch

from kvtide import __version__
from kvtide.machine import machine_name, processor_traits
from kvtide.serve.batch import ExactRules
from kvtide.serve.query_blocks import QUERY_ROWS

_OF_LIBRARIES = ("ATEN_", "DNNL_", "MKL_", "ONEDNN_", "OPENBLAS_")
"""How the names of variables begin by which libraries choose their kernels."""


def numerics_of(
    device: torch.device, rules: ExactRules, chunk_tokens: int, *, is_packed: bool
) -> str:
    """A text that differs where exact mode may compute other bits: on other machines, say.

    It has versions, the processor or the device, settings that choose kernels, threads, whether the
    model's matrices are packed, and the rules that the self-check found. The length of a prompt's
    chunks is part of it only where bits depend on how a prompt is cut.
    """
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    parts = (
        f"kvtide {__version__}",
        f"torch {torch.__version__}",
        f"transformers {version('transformers')}",
        machine_name(),
        processor_traits(),
        torch.backends.cpu.get_cpu_capability(),
        f"products in {torch.get_float32_matmul_precision()}",
        *(f"{name}={os.environ[name]}" for name in sorted(os.environ) if _is_of_library(name)),
        f"{torch.get_num_threads()} threads",
        device.type if name_of is None else str(name_of(device)),
        repr(rules),
        "copies of matrices" if is_packed else "matrices as loaded",
        f"{QUERY_ROWS} queries" if rules.query_rows else f"chunks of {chunk_tokens}",
    )
    return "; ".join(parts)


def _is_of_library(name: str) -> bool:
    return name.startswith(_OF_LIBRARIES)
