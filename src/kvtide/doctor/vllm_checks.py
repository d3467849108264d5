"""Checks the vLLM of this environment: is it there, and does it find kvtide?

`kvtide doctor --vllm` prints the findings. Nothing here needs a server, a model or an accelerator.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.metadata import entry_points

import torch

from kvtide.errors import UsageError, first_line

GROUP, ENTRY_POINT = "vllm.general_plugins", "kvtide.plugin.vllm:register"
CHOSEN = "VLLM_PLUGINS"
"""vLLM's variable with the names of the plugins that it is to load, if not all."""


def import_vllm() -> None:
    """Imports what the doctor needs. Raises UsageError, with the remedy, if that fails."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise UsageError(
            f"--vllm: vLLM isn't installed in this environment ({sys.prefix}); install kvtide "
            "into vLLM's own environment (pip install kvtide) and run it there"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # a report isn't the place for its log
    try:
        importlib.import_module("vllm.v1.kv_offload.base")
    except Exception as error:  # whatever its kernels and a vendor's packages raise
        raise UsageError(
            f"--vllm: vLLM is installed here, but can't be imported: {first_line(error)}; run it "
            "where vLLM's server runs"
        ) from error


def versions() -> dict[str, str]:
    """The versions of vLLM, kvtide and torch."""
    from kvtide import __version__
    from kvtide.plugin.vllm.package import VLLM

    return {"vllm": VLLM.version, "kvtide": __version__, "torch": torch.__version__}


def is_tested() -> bool:
    """Whether kvtide was tested with this vLLM; another one is refused if a name is gone."""
    from kvtide.plugin.vllm.package import VLLM

    return VLLM.version in VLLM.tested


def why_not_loaded() -> str | None:
    """Why vLLM's processes won't load kvtide's plugin; None if they will."""
    found = [entry for entry in entry_points(group=GROUP) if entry.value == ENTRY_POINT]
    if not found:
        return f"no package in {sys.prefix} registers it; install kvtide there: pip install kvtide"
    chosen = os.environ.get(CHOSEN)
    if chosen is not None and found[0].name not in chosen.split(","):
        return f"{CHOSEN}={chosen} leaves it out; add {found[0].name}, or unset it"
    return None


def why_not_registered() -> str | None:
    """Loads vLLM's plugins into this process, as its own do. None if it knows kvtide's classes."""
    from kvtide.plugin.vllm.reads import VLLM_READS
    from kvtide.plugin.vllm.settings import CONNECTOR, SPEC

    try:
        importlib.import_module("vllm.plugins").load_general_plugins()
        connectors = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
        specs = importlib.import_module("vllm.v1.kv_offload.factory")
        VLLM_READS.refuse_if_moved()
        connectors.KVConnectorFactory._registry[CONNECTOR]()
        specs.OffloadingSpecFactory._registry[SPEC]()
    except Exception as error:  # whatever a moved module raises
        return first_line(error)
    return None
