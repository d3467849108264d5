"""Keeps the client of the Hugging Face hub from printing. Imports no torch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def silent_hub() -> Iterator[None]:
    """Hides the hub's progress bars, and its warning at each of six attempts."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    logger, had_bars = logging.getLogger("huggingface_hub"), not are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if had_bars:
            enable_progress_bars()
