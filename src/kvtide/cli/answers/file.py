"""The answers in the file of `--out`, and in the part beside it while the run isn't complete."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvtide.cli.answers.base import Answers, Kept
from kvtide.cli.answers.part import PartFile
from kvtide.cli.answers.saved import (
    HEADER_START,
    VERSION,
    Saved,
    differences,
    encoded,
    header_line,
    is_ours,
    read_saved,
)
from kvtide.cli.files import reason_of, replace_file
from kvtide.errors import KvtideError, UsageError
from kvtide.sizes import counted


def part_of(path: Path) -> Path:
    """The part of the file `path`: beside it, or beside the file that it is a link to."""
    target = Path(os.path.realpath(path))
    return target.with_name(target.name + ".part")


class AnswerFile(Answers):
    """Answers that are appended to a part, which takes the place of the file at the end.

    Until then the file stays as it was. With `resume` the answers of both are kept that fit.
    Raises UsageError where answers would be lost unasked, and where another process has the part.
    """

    is_terminal = False

    def __init__(self, path: Path, *, resume: bool, overwrite: bool) -> None:
        self._path = path
        self._target = Path(os.path.realpath(path))
        self._resume = resume
        self._header: Mapping[str, Any] = {}
        self._lines: dict[str, bytes] = {}
        """The line of each prompt that has one, and then the lines of other ids."""
        self._is_finished = False
        self._part = PartFile(part_of(path))
        try:
            self._in_file, self._in_part = self._read()
            self._answers_in_part = len(self._in_part.answers)
            if not overwrite:
                self._refuse_other_version()
                self._refuse_loss()
            self._match_mode()
        except BaseException:
            if self._part.is_empty:
                self._part.remove()
            self._part.close()
            raise

    def keep(self, keys: Mapping[str, str], header: Mapping[str, Any]) -> Kept:
        self._header = header
        if not self._resume:
            return Kept()
        saved = self._in_file.answers | self._in_part.answers
        kept = {pair[0]: line for pair, line in saved.items() if keys.get(pair[0]) == pair[1]}
        if saved and not kept:
            self._refuse_misfits(len(saved))
        others = {pair[0]: line for pair, line in saved.items() if pair[0] not in keys}
        self._lines = kept | others
        return Kept(
            lines=kept,
            changed=len({answer_id for answer_id, _ in saved if answer_id in keys} - {*kept}),
            others=len(others),
            broken=len(self._in_part.broken),
        )

    def begin(self) -> None:
        try:
            if self._resume and self._answers_in_part:
                self._part.cut_half_line()
                return
            self._part.clear()
            self._answers_in_part = 0
            self._part.append(header_line(self._header))
        except OSError as error:
            raise self._failure(self._part.path, error) from error

    def write(self, prompt_id: str, row: Mapping[str, Any], key: str | None) -> None:
        line = encoded(row, key)
        try:
            self._part.append(line)
        except OSError as error:
            raise self._failure(self._part.path, error) from error
        self._lines[prompt_id] = line
        self._answers_in_part += key is not None

    def sync(self) -> None:
        try:
            self._part.sync()
        except OSError as error:
            raise self._failure(self._part.path, error) from error

    def sync_if_due(self) -> None:
        try:
            self._part.sync_if_due()
        except OSError as error:
            raise self._failure(self._part.path, error) from error

    def finish(self, prompt_ids: Sequence[str]) -> None:
        known = set(prompt_ids)
        ordered = [self._lines[prompt_id] for prompt_id in prompt_ids]
        ordered += [line for answer_id, line in self._lines.items() if answer_id not in known]
        try:
            replace_file(self._target, ordered)
        except OSError as error:
            raise self._failure(self._path, error) from error
        # From here on the part is superfluous, and not before.
        self._is_finished = True
        self._part.remove()

    def place(self) -> str:
        if self._is_finished:
            return f"kept in {self._path}"
        places = [self._path] if self._resume and self._in_file.answers else []
        places += [self._part.path] if self._answers_in_part else []
        names = " and ".join(map(str, places))
        return f"kept in {names}; the same command with --resume answers the rest" if names else ""

    def close(self) -> None:
        # After the end of a run the part may be another process's.
        if not (self._is_finished or self._answers_in_part):
            self._part.remove()
        self._part.close()

    def _read(self) -> tuple[Saved, Saved]:
        """What the file and the part hold. Raises UsageError if the part isn't kvtide's."""
        try:
            first = next(self._part.lines(), b"")
            if not (first.startswith(HEADER_START) or HEADER_START.startswith(first)):
                raise UsageError(
                    f"--out: {self._part.path}, where answers are kept during a run, isn't "
                    "kvtide's; move it away, or name another file"
                )
            in_part = read_saved(self._part.lines())
            if not self._target.exists():
                return Saved(), in_part
            with self._target.open("rb") as file:
                return read_saved(file), in_part
        except OSError as error:
            raise UsageError(f"--out: cannot read {self._path}: {reason_of(error)}") from error

    def _match_mode(self) -> None:
        """Lets those alone read the part who may read the file."""
        if not self._target.exists():
            return
        mode = stat.S_IMODE(self._target.stat().st_mode) | stat.S_IRUSR | stat.S_IWUSR
        with suppress(PermissionError):  # of a part that another user began
            self._part.path.chmod(mode)

    def _refuse_other_version(self) -> None:
        header = self._in_part.header
        if header is not None and not is_ours(header):
            raise UsageError(
                f"--out: {self._part.path} is of version {json.dumps(header['kvtide'])}, and this "
                f"kvtide knows {VERSION}; go on with the kvtide that began it, name another file, "
                "or add --overwrite to answer everything anew"
            )

    def _refuse_loss(self) -> None:
        """Raises UsageError if the end of the run would lose a line, or its begin an answer."""
        broken = self._in_file.broken
        if broken:
            raise UsageError(
                f"--out: line {broken[0]} of {self._path} isn't an answer of kvtide's; remove that "
                "line, name another file, or add --overwrite to replace the file"
            )
        counts = [
            f"{path} holds {counted(len(saved.ids), 'answer')}"
            for path, saved in ((self._path, self._in_file), (self._part.path, self._in_part))
            if saved.answers
        ]
        if counts and not self._resume:
            raise UsageError(
                f"--out: {' and '.join(counts)}; add --resume to keep them and to answer the rest, "
                "or --overwrite to answer everything anew"
            )

    def _refuse_misfits(self, count: int) -> None:
        reason = differences(self._header, self._in_part.header)
        reason = reason or "they are of other prompts, of another model or by other settings"
        raise UsageError(
            f"--resume: none of the {counted(count, 'answer')} of {self._path} fits ({reason}); "
            "name another file with --out, or add --overwrite instead to answer everything anew"
        )

    def _failure(self, path: Path, error: OSError) -> KvtideError:
        return KvtideError(
            f"cannot write {path}: {reason_of(error)}; once that is mended, the same command with "
            "--resume goes on with what is kept"
        )
