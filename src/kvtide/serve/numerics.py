"""What decides the last bits of a computation, apart from its inputs."""

from __future__ import annotations

import os
from importlib.metadata import version

import torch

from kvtide import __version__
from kvtide.machine import machine_name
from kvtide.serve.batch import ExactRules
from kvtide.serve.query_blocks import QUERY_ROWS
from kvtide.serve.repeatable import MKL_MODE


def numerics_of(device: torch.device, rules: ExactRules) -> str:
    """A text that differs where exact mode may compute other bits: on other machines, say.

    It has versions, the processor or the device, the instructions that torch uses, its threads, and
    the rules that the self-check found.
    """
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    parts = (
        f"kvtide {__version__}",
        f"torch {torch.__version__}",
        f"transformers {version('transformers')}",
        machine_name(),
        torch.backends.cpu.get_cpu_capability(),
        f"MKL {os.environ.get(MKL_MODE)}",
        f"{torch.get_num_threads()} threads",
        device.type if name_of is None else str(name_of(device)),
        repr(rules),
        f"{QUERY_ROWS} queries",
    )
    return "; ".join(parts)
