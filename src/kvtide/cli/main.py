"""The command `kvtide` and its exit codes.

0: done. 1: something failed, or a check of `kvtide doctor` did. 2: bad input, with one line on
standard error. 3: `--verify` found a difference. 130: Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kvtide.cli.bench import bench
from kvtide.cli.display import printable
from kvtide.cli.doctor import doctor
from kvtide.cli.plan import plan
from kvtide.cli.run import run
from kvtide.cli.serving import Serving
from kvtide.cli.session import EXIT_INTERRUPTED
from kvtide.errors import KvtideError, UsageError

EXIT_FAILED = 1
EXIT_USAGE = 2

app = typer.Typer(
    name="kvtide",
    help="Serve many requests in little KV memory: move their KV off and back, byte for byte.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(run)
app.command()(doctor)
app.command()(plan)
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from kvtide import __version__

        typer.echo(f"kvtide {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None, *, serving: Serving | None = None) -> int:
    """Runs the command line (`sys.argv` unless given) and returns the exit code.

    Tests give `serving` in place of the library.
    """
    try:
        code: int = app(arguments, prog_name="kvtide", obj=serving, standalone_mode=False) or 0
        # typer turns KeyboardInterrupt into this code without a message.
        return _complain("interrupted", code) if code == EXIT_INTERRUPTED else code
    except typer.TyperException as error:
        return _complain(error.format_message(), EXIT_USAGE)
    except UsageError as error:
        return _complain(str(error), EXIT_USAGE)
    except KvtideError as error:
        return _complain(str(error), EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", EXIT_INTERRUPTED)


def _complain(message: str, code: int) -> int:
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    typer.echo(f"kvtide: {printable(message, encoding)}", err=True)
    return code
