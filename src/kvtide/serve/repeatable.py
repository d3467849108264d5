"""Tells the libraries under torch to repeat their results; must run before they compute.

torch multiplies float32 matrices with MKL. MKL chooses the order of additions by the place of its
input in memory, and so by the thread that computes it, unless its mode for reproducible results is
on (oneMKL developer guide, "Obtaining Numerically Reproducible Results"). MKL reads that mode from
the environment once, at its first product. Measured on an AMD EPYC with torch 2.13, float32 and two
threads: without the mode a request's attention differs in bits between the two threads, for most
head sizes. With the mode it doesn't, and nothing is slower.

This module must not import torch, directly or indirectly.
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
    """Turns on MKL's mode for reproducible results, unless the environment already sets a mode.

    Has no effect if MKL has already computed something in this process.
    """
    os.environ[MKL_MODE] = os.environ.get(MKL_MODE) or "AUTO"  # MKL ignores an empty value


def is_mkl_repeatable() -> bool | None:
    """Whether MKL's mode for reproducible results is on; None if torch has no MKL or can't tell.

    torch must be loaded. A mode that is still off then stays off.
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
