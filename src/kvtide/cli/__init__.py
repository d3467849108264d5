"""The `kvtide` command: one file per verb.

Nothing in the library imports this package. Its modules import torch and transformers only inside
a command, so that help and input errors appear at once.
"""

from __future__ import annotations

import os
import sys


def start() -> int:
    """The console script: runs the command line and returns the exit code.

    It needs only the standard library, so it can name a package that is missing.
    """
    from kvtide.cli.extras import describe_missing

    _fill_closed_streams()
    _let_threads_wait()
    try:
        from kvtide.cli.main import main

        return main()
    except ModuleNotFoundError as error:
        sys.stderr.write(f"kvtide: {describe_missing(error)}\n")
        return 2
    except KeyboardInterrupt:
        # Ctrl-C while the modules load. Later `main` handles it.
        sys.stderr.write("kvtide: interrupted\n")
        return 130


def _fill_closed_streams() -> None:
    """Opens nothing in place of a closed standard stream.

    Otherwise the next file gets its number, and with it what libraries write to the stream.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    while nowhere < 3:
        nowhere = os.dup(nowhere)
    os.close(nowhere)


def _let_threads_wait() -> None:
    """Makes OpenMP's threads spin only briefly when they wait, unless the environment says how.

    By default they spin for long: if other programs need the cores, a step then takes many times as
    long. If they don't spin at all, waking them takes a third of a small model's step
    (docs/engine.md). OpenMP reads the variables when torch is loaded; an empty one counts as unset.
    """
    if not os.environ.get("OMP_WAIT_POLICY"):
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT") or "1000"
