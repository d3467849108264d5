"""EnginePackage: an engine's package, and where it defines the classes that kvtide knows.

A class is known by its module and its name: another package may derive a pool from the engine's,
give it the same name, and keep more in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

from kvtide.plugin.source import Source
from kvtide.plugin.versions import installed_version


@final
@dataclass(frozen=True)
class EnginePackage:
    """A package by its `name`, under which it is installed and imported.

    `title` is what messages call it. Its classes are in `folder`. `homes` has the names of the
    known ones by their modules below the folder, each name once. `assembled` has, of classes whose
    fields come from others at run time, the files that have these (see Source). `tested` are the
    versions that kvtide was tested with.
    """

    title: str
    name: str
    folder: str = ""
    homes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    assembled: Mapping[str, str] = field(default_factory=dict)
    tested: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """The version in this environment, as the package says."""
        return installed_version(self.name)

    def source(self) -> Source:
        """The text of its classes. Raises ModuleNotFoundError where it isn't installed."""
        return Source.of_installed(self.name, self.folder, self.assembled)

    def name_of(self, thing: object) -> str:
        """The class of a thing of the engine's by its name alone, if it is a known one.

        Of any other class that is the full name, so that it is none of the engine's, whatever it is
        called.
        """
        kind = type(thing)
        if self._module_of.get(kind.__qualname__) == kind.__module__:
            return kind.__qualname__
        return f"{kind.__module__}.{kind.__qualname__}"

    def is_at_home(self, name: str, file: str) -> bool:
        """Whether a class that the package has in `file` (below its folder) is the known one."""
        module = file.removesuffix(".py").replace("/", ".")
        return name in self.homes.get(module, ())

    @cached_property
    def _module_of(self) -> Mapping[str, str]:
        root = f"{self.name}.{self.folder}" if self.folder else self.name
        return {name: f"{root}.{module}" for module, names in self.homes.items() for name in names}
