"""Starts engines, each in a process forked from this one, which has imported SGLang already.

  python engine_host.py

It reads a line of JSON for each engine:

  {"run": arguments of engine_run.main, "log": a path, "environment": {name: value},
   "plugins": their folders, "is_spawned": whether its processes are started anew}

It answers with two lines: the engine's process id, which is also its group's, and at its end the
exit code. It ends when its input ends.

Importing SGLang takes Python seconds, and an engine has three processes. So SGLang reads the same
environment, while it is imported, for all engines that aren't spawned.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from contextlib import nullcontext
from typing import Any
from unittest import mock

import engine_run


def main() -> None:
    """Runs one engine after the other."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of SGLang must not be read as an answer
    multiprocessing.set_start_method("fork")
    _import_all()
    for line in sys.stdin:
        process = multiprocessing.Process(target=_run, args=(json.loads(line),))
        process.start()
        print(process.pid, file=answers, flush=True)
        process.join()
        print(process.exitcode, file=answers, flush=True)


def _import_all() -> None:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.models.registry import ModelRegistry

    assert Engine is not None
    assert ModelRegistry.get_supported_archs()


def _run(wanted: dict[str, Any]) -> None:
    os.setsid()
    log = os.open(wanted["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path[:0] = wanted["plugins"]
    os.environ.update(wanted["environment"])
    # Without this, SGLang would have all processes spawned.
    forked = mock.patch.object(multiprocessing, "set_start_method")
    with nullcontext() if wanted["is_spawned"] else forked:
        engine_run.main(*wanted["run"])


if __name__ == "__main__":
    main()
