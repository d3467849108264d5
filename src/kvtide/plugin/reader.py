"""Reader: the attributes of an engine's objects that kvtide reads, each of them in a table.

Engines move things between releases. What isn't where the table says is found at the start, by
name, instead of in the middle of a retraction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from kvtide.plugin.refusals import Refused

Table = Mapping[str, tuple[str, ...]]
"""What is read of each class, by its name. An entry that ends in `?` may be absent or None."""


@final
class Reader:
    """Reads what the tables list for an object's class and for the classes that it derives from.

    `reads["k_buffer"]` gives the attribute; it raises Refused where the object has none of that
    name, or has None where the table doesn't allow it.
    """

    def __init__(self, owner: object, *tables: Table) -> None:
        self.owner = owner
        names = [kind.__name__ for kind in type(owner).__mro__]
        listed = [entry for table in tables for name in names for entry in table.get(name, ())]
        self._optional = {entry.removesuffix("?"): entry.endswith("?") for entry in listed}

    def __getitem__(self, name: str) -> Any:
        kind = type(self.owner).__name__
        assert name in self._optional, f"{kind}.{name} isn't in the table of what is read"
        value = getattr(self.owner, name, None)
        if value is None and not self._optional[name]:
            raise Refused(
                f"{kind} has no {name!r} here: the installed engine isn't one that kvtide knows"
            )
        return value
