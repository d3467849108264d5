"""The `kvtide` command: one file per verb.

Nothing in the library imports this package. Its modules import torch and transformers inside the
commands, so that help and errors of input are there at once.
"""

from __future__ import annotations

import os
import sys


def start() -> int:
    """The console script: runs the command line and returns the exit code.

    It needs no package itself, so that it can say which one is missing.
    """
    _let_threads_wait()
    try:
        from kvtide.cli.main import main

        return main()
    except ModuleNotFoundError as error:
        package = (error.name or "kvtide").partition(".")[0]
        if package == "kvtide":
            raise
        sys.stderr.write(
            f"kvtide: {package} is not installed; the command needs: pip install 'kvtide[serve]'\n"
        )
        return 2
    except KeyboardInterrupt:
        # Pressed while the modules load; `main` answers for what comes after.
        sys.stderr.write("kvtide: interrupted\n")
        return 130


def _let_threads_wait() -> None:
    """Has OpenMP's threads wait for each other without spinning for long, unless that is chosen.

    OpenMP reads it when torch is loaded. By default they spin: where other programs want the cores,
    a step then takes many times as long. If they don't spin at all, to wake them takes a third of a
    small model's step (docs/engine.md). An empty variable chooses nothing.
    """
    if not os.environ.get("OMP_WAIT_POLICY"):
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT") or "1000"
