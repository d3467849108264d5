"""Writes results: `--out`, one JSON line for each request, and `--report`, one JSON object."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtide.errors import KvtideError, UsageError
from kvtide.sizes import counted, format_size

if TYPE_CHECKING:
    from kvtide.serve.engine import EngineStats
    from kvtide.serve.request import Request
    from kvtide.serve.selfcheck import RowCheck


def is_answered(request: Request) -> bool:
    """Whether the request ended with an answer or an error; False if it was aborted."""
    return request.finish_reason not in (None, "abort")


def answer_row(request: Request) -> dict[str, object]:
    """The `--out` line of one request, as a dictionary."""
    return {
        "id": request.id,
        "text": request.text,
        "token_ids": list(request.output_ids),
        "prompt_tokens": len(request.prompt_ids),
        "new_tokens": len(request.output_ids),
        "finish_reason": request.finish_reason,
        "retractions": request.retractions,
        "error": request.error,
    }


def write_answers(path: Path, requests: Iterable[Request]) -> int:
    """Writes a line for each answered request, in the given order; returns their number.

    The file appears complete or not at all. Raises KvtideError if it can't be written.
    """
    rows = [json.dumps(answer_row(r), ensure_ascii=False) for r in requests if is_answered(r)]
    _write(path, "".join(row + "\n" for row in rows))
    return len(rows)


def write_report(path: Path, report: dict[str, object]) -> None:
    """Writes the report. Raises KvtideError if it can't be written."""
    _write(path, json.dumps(report, indent=2) + "\n")


def make_report(
    requests: Sequence[Request],
    stats: EngineStats,
    *,
    seconds: float,
    exact: bool,
    check: RowCheck | None,
    verified: bool | None,
) -> dict[str, object]:
    """The `--report` object. `seconds` is wall time without loading and verifying.

    `exact` says whether every answer is exact, recomputed ones included. `check` is the
    self-check's result, None with `--fast`. `verified` is None without `--verify` and until
    verifying has ended.
    """
    return {
        "requests": len(requests),
        "failed": sum(r.error is not None for r in requests),
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "retractions": stats.retractions,
        "resumes": stats.resumes,
        "offloaded_bytes": stats.offloaded_bytes,
        "restored_bytes": stats.restored_bytes,
        "recomputed_tokens": stats.recomputed_tokens,
        "pool_tokens": stats.pool_tokens,
        "peak_pool_tokens": stats.peak_pool_tokens,
        "peak_host_bytes": stats.peak_host_bytes,
        "seconds": round(seconds, 6),
        "tokens_per_second": round(stats.new_tokens / seconds, 3) if seconds > 0 else 0.0,
        "offload_seconds": round(stats.offload_seconds, 6),
        "restore_seconds": round(stats.restore_seconds, 6),
        "exact": exact,
        "exact_rows": None if check is None else check.exact_rows,
        "selfcheck_seconds": None if check is None else round(check.seconds, 3),
        "verified": verified,
    }


def describe_check(check: RowCheck) -> str:
    """The line about exact mode: its row counts, and its cost if it is slow here."""
    return f"exact mode: {check.detail} (self-check: {check.seconds:.1f} s)"


def summarize(requests: Sequence[Request], report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows (name, value) of the table that is printed at the end."""
    retracted = sum(request.retractions > 0 for request in requests)
    moving = report["offload_seconds"] + report["restore_seconds"]
    share = moving / report["seconds"] if report["seconds"] else 0.0
    rows = [
        ("requests", f"{report['requests']:,}, {report['failed']:,} of them failed"),
        ("prompt tokens", f"{report['prompt_tokens']:,}"),
        (
            "new tokens",
            f"{report['new_tokens']:,} in {report['seconds']:.1f} s, "
            f"{report['tokens_per_second']:.1f} a second",
        ),
        (
            "retractions",
            f"{report['retractions']:,}, of {counted(retracted, 'request')}; "
            f"{report['resumes']:,} resumed",
        ),
        (
            "moved",
            f"{format_size(report['offloaded_bytes'])} out, "
            f"{format_size(report['restored_bytes'])} back, in {share:.2%} of the time",
        ),
        (
            "KV pool",
            f"{report['pool_tokens']:,} tokens, at most {report['peak_pool_tokens']:,} in use",
        ),
        ("host memory", f"at most {format_size(report['peak_host_bytes'])} in use"),
    ]
    if report["recomputed_tokens"]:
        rows.append(("recomputed", f"the KV of {counted(report['recomputed_tokens'], 'token')}"))
    inexact = sum(not request.exact for request in requests)
    rows.append(("exact", _explain_exact(report["exact"], inexact)))
    return rows


def check_writable(path: Path, *, option: str) -> None:
    """Raises UsageError if the value of `option` can't be written as a file.

    It is called before the requests are answered, since the answers would be lost otherwise.
    """
    folder = path.parent
    try:
        with suppress(FileNotFoundError):
            path.stat()  # raises for links in a circle and long names; `is_dir` wouldn't
        if path.is_dir():
            raise UsageError(f"{option}: {path} is a folder; give the name of a file")
        if not folder.is_dir():
            raise UsageError(f"{option}: there is no folder {folder} for {path.name}; make it")
        target = path if _is_special(path) else folder
        if not os.access(target, os.W_OK):
            raise UsageError(f"{option}: no permission to write to {target}")
    except OSError as error:
        raise UsageError(f"{option}: cannot write {path}: {error.strerror or error}") from error


def _explain_exact(exact: bool, inexact_count: int) -> str:
    if exact:
        return "true"
    if inexact_count:
        return f"false ({counted(inexact_count, 'request')} recomputed in different steps)"
    return "false (--fast)"


def _write(path: Path, text: str) -> None:
    try:
        stream = _standard_stream(path)
        if stream is not None:
            # A second open file has its own position: later output would overwrite this text.
            with os.fdopen(os.dup(stream), "w", encoding="utf-8") as file:
                file.write(text)
        elif _is_special(path):
            path.write_text(text, encoding="utf-8")
        else:
            _replace(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise KvtideError(f"cannot write {path}: {error.strerror or error}") from error


def _is_special(path: Path) -> bool:
    """Whether it is a terminal, a pipe or /dev/null, which must not be replaced by a file."""
    return path.exists() and not path.is_file()


def _standard_stream(path: Path) -> int | None:
    """The descriptor of this process's standard output or error, if `path` is the same file."""
    for stream in (1, 2):
        # The file may be new, and the stream closed.
        with suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(stream)):
                return stream
    return None


def _replace(path: Path, text: str) -> None:
    # An unpredictable name and mode "x", so that a link planted there isn't followed.
    draft = path.with_name(f".kvtide-{secrets.token_hex(8)}.part")
    file = draft.open("x", encoding="utf-8")
    try:
        with file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            draft.chmod(stat.S_IMODE(path.stat().st_mode))
        draft.replace(path)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()
