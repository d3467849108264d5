"""The command `kvtide` and its exit codes.

0: done. 1: something failed, or a check of `kvtide doctor` did. 2: bad input, with one line on
standard error. 3: `--verify` found a difference. 4: every request failed. 129, 130 and 143: ended
by SIGHUP, Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import typer

from kvtide.cli.bench import bench
from kvtide.cli.display import printable
from kvtide.cli.doctor import doctor
from kvtide.cli.events import event_line
from kvtide.cli.extras import describe_missing
from kvtide.cli.help import (
    DOCTOR_EXAMPLES,
    EXIT_CODES,
    INSPECT_EXAMPLES,
    PLAN_EXAMPLES,
    RUN_EXAMPLES,
    SERVE_EXAMPLES,
    SERVE_EXIT_CODES,
    VLLM_EXAMPLES,
    epilog,
)
from kvtide.cli.inspect import inspect
from kvtide.cli.interrupt import ENDINGS
from kvtide.cli.invocation import Invocation
from kvtide.cli.plan import plan
from kvtide.cli.run import run
from kvtide.cli.serve import serve
from kvtide.cli.serving import LibraryServing, Serving
from kvtide.cli.usage import describe_usage
from kvtide.cli.vllm import vllm
from kvtide.errors import KvtideError, UsageError, first_line

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="kvtide",
    help="Serve many requests in little KV memory: move their KV off and back, byte for byte.",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=epilog({}, EXIT_CODES),
    pretty_exceptions_enable=False,
)
app.command(epilog=epilog(RUN_EXAMPLES, EXIT_CODES))(run)
app.command(epilog=epilog(SERVE_EXAMPLES, SERVE_EXIT_CODES))(serve)
app.command(epilog=epilog(DOCTOR_EXAMPLES))(doctor)
app.command(epilog=epilog(PLAN_EXAMPLES))(plan)
app.command(epilog=epilog(INSPECT_EXAMPLES))(inspect)
app.command(epilog=epilog(VLLM_EXAMPLES))(vllm)
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
    words = list(sys.argv[1:] if arguments is None else arguments)
    # What can't be parsed is complained about before the option is read.
    as_json = "--log-format=json" in words or ("--log-format", "json") in pairwise(words)
    invocation = Invocation(serving or LibraryServing(), as_json)
    try:
        code: int = app(words, prog_name="kvtide", obj=invocation, standalone_mode=False) or 0
    except typer.TyperException as error:
        return _complain(invocation, describe_usage(error), EXIT_USAGE)
    except UsageError as error:
        return _complain(invocation, str(error), EXIT_USAGE)
    except KvtideError as error:
        return _complain(invocation, str(error), EXIT_FAILED)
    except ModuleNotFoundError as error:
        return _complain(invocation, describe_missing(error), EXIT_USAGE)
    except Exception as error:  # a mistake of kvtide's: its traceback is an event like any other
        if not invocation.as_json:
            raise
        trace = "".join(traceback.format_exception(error))
        return _complain(invocation, first_line(error), EXIT_FAILED, traceback=trace)
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    # typer turns KeyboardInterrupt into its code without a message.
    return _complain(invocation, ENDINGS[code], code) if code in ENDINGS else code


def _complain(invocation: Invocation, message: str, code: int, **facts: str) -> int:
    if invocation.as_json:
        typer.echo(event_line("error", message, exit_code=code, **facts), err=True)
    else:
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        typer.echo(f"kvtide: {printable(message, encoding)}", err=True)
    return code
