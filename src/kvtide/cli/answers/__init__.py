"""Where the answers of `kvtide run` go: nothing that was answered is lost, whatever ends it."""

from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path

from kvtide.cli.answers.base import Answers, Kept
from kvtide.cli.answers.file import AnswerFile, part_of
from kvtide.cli.answers.saved import read_saved
from kvtide.cli.answers.stream import AnswerStream
from kvtide.cli.files import open_stream, reason_of, standard_stream
from kvtide.errors import UsageError

__all__ = ["Answers", "Kept", "holds_answers", "open_answers", "part_of"]


def open_answers(path: Path | None, *, resume: bool, overwrite: bool) -> Answers:
    """Opens the answers of a run to `path`; a path of None is standard output.

    Raises UsageError if the file has answers and neither `resume` nor `overwrite` is given, if
    both are, if another process writes to the file, or if it can't be opened.
    """
    if resume and overwrite:
        raise UsageError("--resume keeps answers and --overwrite drops them; give one of the two")
    stream = _open_stream(path)
    if stream is None:
        assert path is not None, "standard output is a stream"
        return AnswerFile(path, resume=resume, overwrite=overwrite)
    name = "standard output" if path is None else str(path)
    if resume:
        os.close(stream)
        raise UsageError(f"--resume reads earlier answers, which {name} can't give; name a file")
    return AnswerStream(stream, name)


def holds_answers(path: Path) -> bool:
    """Whether `path` is a file or a part whose first answer is in its first two lines.

    The file of standard output doesn't count: nothing takes its place. Raises UsageError if the
    file can't be read.
    """
    if not path.is_file() or standard_stream(path) is not None:
        return False
    try:
        with path.open("rb") as file:
            return bool(read_saved(islice(file, 2)).answers)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason_of(error)}") from error


def _open_stream(path: Path | None) -> int | None:
    if path is not None:
        try:
            return open_stream(path)
        except OSError as error:
            raise UsageError(f"--out: cannot write {path}: {reason_of(error)}") from error
    # The descriptor of a closed standard output may be another file's by now.
    if sys.stdout is None:
        raise UsageError("standard output is closed; name a file with --out")
    return os.dup(1)
