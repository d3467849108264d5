"""EnginePackage: an engine's package, and the modules of the classes that kvtide knows.

kvtide identifies a class by its module and its name, because another package may derive a pool with
the same name that holds more.
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
    """An engine's package, which is installed and imported as `name`.

    Messages call it `title`. Its classes are in `folder`. `homes` has the names of the known
    classes by their modules below the folder, each name once. `assembled` is for classes that get
    fields from other classes at run time: it has the files of those (see Source). `tested` has the
    versions with which kvtide was tested.
    """

    title: str
    name: str
    folder: str = ""
    homes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    assembled: Mapping[str, str] = field(default_factory=dict)
    tested: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """The version that is installed in this environment."""
        return installed_version(self.name)

    def source(self) -> Source:
        """The source of its classes. Raises ModuleNotFoundError if it isn't installed."""
        return Source.of_installed(self.name, self.folder, self.assembled)

    def name_of(self, thing: object) -> str:
        """The name of an object's class: the bare name if kvtide knows the class, else the full.

        A full name never equals a known bare name, so an unknown class is never taken for a known.
        """
        kind = type(thing)
        if self._module_of.get(kind.__qualname__) == kind.__module__:
            return kind.__qualname__
        return f"{kind.__module__}.{kind.__qualname__}"

    def is_at_home(self, name: str, file: str) -> bool:
        """Whether kvtide knows the class of that name in `file`, below the package's folder."""
        module = file.removesuffix(".py").replace("/", ".")
        return name in self.homes.get(module, ())

    @cached_property
    def _module_of(self) -> Mapping[str, str]:
        root = f"{self.name}.{self.folder}" if self.folder else self.name
        return {name: f"{root}.{module}" for module, names in self.homes.items() for name in names}
