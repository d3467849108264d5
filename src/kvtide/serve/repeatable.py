"""What the libraries under torch must be told before they compute, to repeat their results.

MKL, which multiplies torch's matrices in float32, chooses the order of additions by how its input
lies in memory, and so by which thread computes it, unless its mode for reproducible results is on
(oneMKL developer guide, "Obtaining Numerically Reproducible Results"). MKL reads that mode from the
environment, once, at its first product. Measured on an AMD EPYC with torch 2.13, float32 and two
threads: without the mode a request's attention has other bits on the second thread than on the
first, for most head sizes; with the mode it has not, and nothing is slower.

This module imports neither torch nor anything that does.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

MKL_MODE = "MKL_CBWR"
_OFF = 1
_ALL_SETTINGS = -1


def ask_for_repeatable_results() -> None:
    """Turns on MKL's mode for reproducible results, unless the environment has chosen one.

    Without effect where MKL has computed something in this process already.
    """
    os.environ[MKL_MODE] = os.environ.get(MKL_MODE) or "AUTO"  # an empty one chooses nothing


def is_mkl_repeatable() -> bool | None:
    """Whether MKL's mode for reproducible results is in force; None without MKL, or unknown.

    Torch must be loaded. A mode that isn't in force by now won't be any more.
    """
    package = getattr(sys.modules.get("torch"), "__file__", None)
    if package is None:
        return None
    try:
        library = ctypes.CDLL(str(Path(package).parent / "lib" / "libtorch_cpu.so"))
        current: int = library.mkl_serv_cbwr_get(_ALL_SETTINGS)
    except (OSError, AttributeError):  # no such file, or a torch without MKL inside
        return None
    return current != _OFF
