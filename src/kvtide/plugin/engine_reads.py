"""EngineReads: all that a plugin reads of its engine, and whether the installed one has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from kvtide.plugin.package import EnginePackage
from kvtide.plugin.reader import Table
from kvtide.plugin.source import gone
from kvtide.plugin.versions import refuse_if_gone, tables_in


@final
@dataclass(frozen=True)
class EngineReads:
    """The tables of a plugin: the `READS` of these packages and of their modules.

    `names_all` is the command that prints all that is gone.
    """

    engine: EnginePackage
    packages: tuple[str, ...]
    names_all: str

    def tables(self) -> list[Table]:
        """All tables. Imports the modules, and so maybe the engine."""
        return tables_in(self.packages)

    def what_is_gone(self) -> list[str]:
        """The names that the installed engine doesn't define: `Class.attribute`, or `class Class`.

        Takes some seconds. Raises ImportError without the engine, and OSError, ValueError or
        SyntaxError for source that can't be read.
        """
        return gone(self.engine.source(), self.tables())

    def refuse_if_moved(self) -> None:
        """Raises Refused if this engine is untested and lacks something that kvtide reads."""
        refuse_if_gone(
            self.engine.title,
            self.engine.version,
            self.engine.tested,
            self.what_is_gone,
            names_all=self.names_all,
        )
