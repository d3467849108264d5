"""Checks the version of an engine: is it tested, or does it have all that kvtide reads?

Some attributes may be absent, and then kvtide leaves them out. If a later version renamed such an
attribute, a request would come back without its bytes. So for an untested version all names in the
tables are first looked up in the source.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version

from kvtide.errors import first_line
from kvtide.plugin.reader import Table
from kvtide.plugin.refusals import Refused

_NAMED_COUNT = 5


def installed_version(package: str) -> str:
    """The installed version of a package, whatever the distribution is called that it came in.

    A wheel for other hardware may have another name than the package that it installs.
    """
    with suppress(PackageNotFoundError):
        return version(package)
    names = sorted(set(packages_distributions().get(package, ())))
    if names:
        return " ".join(version(name) for name in names)
    loaded = sys.modules.get(package)  # it may be no distribution, but a folder
    return str(getattr(loaded, "__version__", "of unknown version"))


def package_of(thing: object) -> str:
    """The package that defines an object's class."""
    return type(thing).__module__.partition(".")[0]


def tables_in(packages: Sequence[str]) -> list[Table]:
    """The tables of what a plugin reads: the `READS` of these packages and of their modules."""
    names = [
        f"{package}.{module.name}"
        for package in packages
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__)
    ]
    modules = [importlib.import_module(name) for name in (*packages, *names)]
    return [module.READS for module in modules if hasattr(module, "READS")]


def refuse_if_gone(
    title: str,
    found: str,
    tested: Sequence[str],
    what_is_gone: Callable[[], Sequence[str]],
    *,
    names_all: str,
) -> None:
    """Raises Refused if an engine's version isn't tested and lacks something that kvtide reads.

    `found` is the installed version. `what_is_gone` lists the missing names (`source.gone`). It is
    only called for an untested version, since it takes seconds. `names_all` is the command that
    prints all of them.
    """
    if found in tested:
        return
    known = f"kvtide was tested with {title} {', '.join(tested)}"
    try:
        lost = what_is_gone()
    except (ImportError, OSError, SyntaxError, ValueError) as error:
        raise Refused(
            f"{title} {found}: whether it still has what kvtide reads can't be told, its source "
            f"can't be read ({first_line(error)}); {known}"
        ) from error
    if lost:
        more = len(lost) - _NAMED_COUNT
        named = ", ".join(lost[:_NAMED_COUNT]) + (f" and {more} more" if more > 0 else "")
        raise Refused(
            f"{title} {found} lacks what kvtide reads: {named}; {known}; "
            f"`{names_all}` names all that is gone"
        )
