"""`kvtide inspect`: what is in the folder of a disk tier, and whether each byte is right."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from kvtide.cli.display import print_table, printable
from kvtide.errors import KvtideError
from kvtide.sizes import counted, format_size

if TYPE_CHECKING:
    from kvtide.tier.inspection import FoundFile

_STYLES = {"whole": "green", "damaged": "bold red", "orphan": "yellow", "foreign": "yellow"}


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of --disk-dir.")],
    remove_damaged: Annotated[
        bool, typer.Option("--remove-damaged", help="Remove damaged files and orphans.")
    ] = False,
    remove_foreign: Annotated[
        bool,
        typer.Option("--remove-foreign", help="Remove files that aren't kvtide's; no folders."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a folder of snapshots: lists each file and verifies every byte of it."""
    from kvtide.tier.inspection import inspect_folder, is_in_use, locked, remove_files

    unwanted = {"damaged", "orphan"} if remove_damaged else set[str]()
    unwanted |= {"foreign"} if remove_foreign else set()
    in_use = is_in_use(folder)
    console = Console(quiet=as_json, file=sys.stdout)
    try:
        with locked(folder) if unwanted else nullcontext():
            found = [*_shown(console, inspect_folder(folder))]
            removed = remove_files(folder, [f for f in found if f.state in unwanted])
    except OSError as error:
        raise KvtideError(f"cannot inspect {folder}: {error.strerror or error}") from error
    if as_json:
        typer.echo(json.dumps(_to_json(folder, found, removed, in_use=in_use)))
    rows = [(state, _total(files)) for state, files in _by_state(found).items()]
    rows += [("removed", _total(removed))] if unwanted else []
    print_table(console, [*rows, ("in use by a process", "yes" if in_use else "no")])
    left = [file for file in found if file.state == "damaged" and file not in removed]
    raise typer.Exit(1 if left else 0)


def _shown(console: Console, found: Iterable[FoundFile]) -> Iterator[FoundFile]:
    """Prints each file when it has been checked, and passes it on."""
    for file in found:
        what = file.reason
        if file.key is not None:
            what = f"{counted(file.token_count or 0, 'token')}, {file.key!r}"
        facts = f"{format_size(file.size_bytes)}: {what}"
        line = f": {file.path}: {facts}"
        text = Text.assemble((file.state, _STYLES[file.state]), printable(line, console.encoding))
        console.print(text, soft_wrap=True)
        yield file


def _by_state(found: list[FoundFile]) -> dict[str, list[FoundFile]]:
    from kvtide.tier.inspection import STATES

    return {state: [file for file in found if file.state == state] for state in STATES}


def _total(files: list[FoundFile]) -> str:
    size_bytes = sum(file.size_bytes for file in files)
    return f"{counted(len(files), 'file')}, {format_size(size_bytes)}"


def _to_json(
    folder: Path, found: list[FoundFile], removed: list[FoundFile], *, in_use: bool
) -> dict[str, Any]:
    gone = set(removed)
    files = [{**file._asdict(), "removed": file in gone} for file in found]
    totals = {
        state: {"files": len(some), "bytes": sum(file.size_bytes for file in some)}
        for state, some in _by_state(found).items()
    }
    return {"folder": str(folder), "in_use": in_use, "files": files, "totals": totals}
