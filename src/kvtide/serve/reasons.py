"""Says in one line why something that belongs to a model can't be read. Imports no torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from huggingface_hub.errors import StrictDataclassError

from kvtide.errors import UsageError, shortened


@contextlib.contextmanager
def one_line(what: str) -> Iterator[None]:
    """Turns any error of the readers of `what` into a UsageError of one line."""
    try:
        yield
    except UsageError:
        raise
    # Half a dozen libraries read these files, and each raises errors of other classes.
    except Exception as error:
        raise UsageError(f"{what} can't be loaded: {short_reason(error)}") from error


def short_reason(error: BaseException) -> str:
    """The first line of an error's message, or the error's class if it has no message."""
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        return _wrong_value(str(error), error.__cause__)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    head = lines[0] if lines else type(error).__name__
    if head.endswith(":") and len(lines) > 1:
        head = f"{head} {lines[1]}"
    if isinstance(error, LookupError):  # its text is a bare key
        head = f"{type(error).__name__} {head}"
    return head.rstrip(".")[:300]


def _wrong_value(message: str, cause: BaseException) -> str:
    """What is wrong with a configuration, without the words of the library that checked it."""
    reason = short_reason(cause)
    field = re.search(r"error for field '(.+?)'", message)
    if field is None:  # several fields contradict each other, and the cause says which
        return reason
    value = re.search(r"\(value: (.+)\)$|with value (.+?) doesn't match", reason)
    if value is None:
        return f"{field[1]} in its configuration is wrong: {reason}"
    shown = shortened(value[1] or value[2], 80)
    return f"{field[1]} in its configuration is {shown}, which is of the wrong type"
