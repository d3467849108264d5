"""Ends vLLM's engine when the process that started it is gone.

vLLM's engine outlives a server that is killed. Nobody can reach it then, and it keeps its memory,
its port and the lock of its folder, so that the next server wouldn't find what it has saved.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading

logger = logging.getLogger(__name__)

_NAME_OF_VLLM = "EngineCore"


def end_with_parent() -> None:
    """Sends this process SIGTERM, as an operator would, once the process that started it is gone.

    Only if it is an engine that vLLM started: in a process of its own an engine ends with it.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(_NAME_OF_VLLM):
        return

    def watch() -> None:
        parent.join()
        logger.warning("kvtide: the server that started this engine is gone, so the engine ends")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="kvtide-parent", daemon=True).start()
