"""Which SGLang kvtide was tested with, and whether another one still has what kvtide reads of it.

An attribute that may be absent is left out where it is: under a new name in a later SGLang it would
be left out, too, and a request would come back without those bytes. So what the tables list is
looked for in the source first.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import PackageNotFoundError, version

from kvtide.errors import first_line
from kvtide.plugin import sglang as plugin
from kvtide.plugin.description import Refused
from kvtide.plugin.reader import Table
from kvtide.plugin.sglang import ordinary, pools
from kvtide.plugin.source import Source, gone

TESTED = ("0.5.23",)
_NAMED_COUNT = 5


def installed_version(package: str = "sglang") -> str:
    """Of SGLang, or another package, in this environment, as the package says."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def tables() -> list[Table]:
    """What kvtide reads of SGLang: the `READS` of all modules of the plugin that have one."""
    packages = (plugin, pools, ordinary)
    names = [
        found.name
        for package in packages
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    ]
    modules = [importlib.import_module(name) for name in names]
    return [module.READS for module in modules if hasattr(module, "READS")]


def what_is_gone() -> list[str]:
    """All of it that the installed SGLang doesn't define: `Class.attribute`, or `class Class`.

    Takes two seconds. Raises ImportError where there is no SGLang, and OSError, ValueError or
    SyntaxError for source that can't be read.
    """
    return gone(Source.of_installed(), tables())


def refuse_if_moved() -> None:
    """Raises Refused if this SGLang isn't a tested one, and lacks something that kvtide reads."""
    found = installed_version()
    if found in TESTED:
        return
    tested = f"kvtide was tested with SGLang {', '.join(TESTED)}"
    try:
        lost = what_is_gone()
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        raise Refused(
            f"SGLang {found}: whether it still has what kvtide reads can't be told, its source "
            f"can't be read ({first_line(error)}); {tested}"
        ) from error
    if lost:
        more = len(lost) - _NAMED_COUNT
        named = ", ".join(lost[:_NAMED_COUNT]) + (f" and {more} more" if more > 0 else "")
        raise Refused(
            f"SGLang {found} lacks what kvtide reads: {named}; {tested}; `kvtide doctor --sglang` "
            "names all that is gone"
        )
