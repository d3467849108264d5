"""Reader: reads attributes of an engine's objects. Tables list all that kvtide reads.

Engines rename things between releases. Thanks to the tables a missing attribute is found and named
at the start, and not in the middle of a retraction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from kvtide.plugin.refusals import Refused

Table = Mapping[str, tuple[str, ...]]
"""For each class name the attributes that are read. One that ends in `?` may be absent or None."""


@final
class Reader:
    """Reads the attributes that the tables list for an object's class and its base classes.

    `reads["k_buffer"]` gives the attribute. It raises Refused if the object has no such attribute,
    or if its value is None and the table doesn't allow that.
    """

    def __init__(self, owner: object, *tables: Table) -> None:
        self.owner = owner
        names = [kind.__name__ for kind in type(owner).__mro__]
        listed = [entry for table in tables for name in names for entry in table.get(name, ())]
        self._optional = {entry.removesuffix("?"): entry.endswith("?") for entry in listed}

    def __getitem__(self, name: str) -> Any:
        kind = type(self.owner).__name__
        assert name in self._optional, f"{kind}.{name} isn't in the tables"
        value = getattr(self.owner, name, None)
        if value is None and not self._optional[name]:
            raise Refused(
                f"{kind} has no {name!r} here: the installed engine isn't one that kvtide knows"
            )
        return value
