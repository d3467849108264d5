"""Reads an engine's classes from its source, without importing it.

Some modules can only be imported with an accelerator. The source also shows which classes exist,
their base classes, and the attributes of their objects.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

from kvtide.plugin.reader import Table

_CLASS = re.compile(r"^[ \t]*class[ \t]+(\w+)[ \t]*(?:\(([^)]*)\))?", re.MULTILINE)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@final
@dataclass(frozen=True)
class SourceClass:
    """A class of the engine: its file below the root, and the names of its base classes."""

    name: str
    file: str
    bases: tuple[str, ...]
    node: ast.ClassDef

    @property
    def methods(self) -> list[str]:
        """The names of the methods and properties that it defines itself."""
        return [method.name for method in self.node.body if isinstance(method, _FUNCTIONS)]

    @cached_property
    def attributes(self) -> frozenset[str]:
        """The attributes that it defines: fields, properties, methods, and those it sets."""
        return frozenset(_attributes_of(self.node))


@final
class Source:
    """The classes in a folder of Python files. A file is parsed when it is needed.

    `assembled` is for classes that get fields from other classes at run time: it has the files of
    those, by a path below the folder or the common beginning of several paths.
    """

    def __init__(self, root: Path, assembled: Mapping[str, str] | None = None) -> None:
        """Reads all files. Raises OSError for a file that can't be read."""
        self.root = root
        self._assembled = assembled or {}
        self._texts = {path: path.read_text("utf-8") for path in sorted(root.rglob("*.py"))}
        self._parsed: dict[Path, list[SourceClass]] = {}
        self._defined_in: dict[str, list[Path]] = {}
        self._derived_in: dict[str, list[Path]] = {}
        for path, text in self._texts.items():
            for name, bases in _CLASS.findall(text):
                self._defined_in.setdefault(name, []).append(path)
                for base in re.findall(r"\w+", bases):
                    self._derived_in.setdefault(base, []).append(path)

    @classmethod
    def of_installed(
        cls, package: str, folder: str = "", assembled: Mapping[str, str] | None = None
    ) -> Source:
        """The classes in a folder of an installed package.

        Raises ModuleNotFoundError if the package isn't installed in this environment.
        """
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(
                f"{package} isn't installed in this environment", name=package
            )
        return cls(Path(spec.submodule_search_locations[0]) / folder, assembled)

    def named(self, name: str) -> list[SourceClass]:
        """All classes of that name, nested ones too."""
        return [found for found in self._classes_in(self._defined_in, name) if found.name == name]

    def derived(self, name: str) -> list[SourceClass]:
        """All classes that derive from a class of that name, directly or not; in no order."""
        found: dict[tuple[str, str], SourceClass] = {}
        waiting = [name]
        while waiting:
            base = waiting.pop()
            for kind in self._classes_in(self._derived_in, base):
                if base in kind.bases and (kind.name, kind.file) not in found:
                    found[kind.name, kind.file] = kind
                    waiting.append(kind.name)
        return list(found.values())

    def defining(self, method: str) -> list[SourceClass]:
        """All classes that define that method themselves."""
        paths = [path for path, text in self._texts.items() if f"def {method}(" in text]
        return [kind for path in paths for kind in self._parse(path) if method in kind.methods]

    def attributes(self, found: SourceClass) -> frozenset[str]:
        """The attributes of the class's objects, inherited ones included."""
        attributes: set[str] = set()
        seen, waiting = {found.name}, [found]
        while waiting:
            kind = waiting.pop()
            attributes |= kind.attributes
            fresh = [base for base in kind.bases if base not in seen]
            seen.update(fresh)
            waiting += [other for base in fresh for other in self.named(base)]
        folder = self._assembled.get(found.name)
        if folder is not None:
            start = (self.root / folder).as_posix()
            paths = [path for path in self._texts if path.as_posix().startswith(start)]
            attributes.update(*(kind.attributes for path in paths for kind in self._parse(path)))
        return frozenset(attributes)

    def _classes_in(self, paths: Mapping[str, Iterable[Path]], name: str) -> list[SourceClass]:
        return [kind for path in dict.fromkeys(paths.get(name, ())) for kind in self._parse(path)]

    def _parse(self, path: Path) -> list[SourceClass]:
        if path not in self._parsed:
            file = path.relative_to(self.root).as_posix()
            self._parsed[path] = [
                SourceClass(node.name, file, tuple(_names(node.bases)), node)
                for node in ast.walk(ast.parse(self._texts[path], str(path)))
                if isinstance(node, ast.ClassDef)
            ]
        return self._parsed[path]


def gone(source: Source, tables: Iterable[Table]) -> list[str]:
    """All entries of the tables that the source doesn't define, in order.

    If several classes have the same name, one of them must have all the attributes.
    """
    listed: dict[str, set[str]] = {}
    for table in tables:
        for name, entries in table.items():
            listed.setdefault(name, set()).update(entry.removesuffix("?") for entry in entries)
    lost: list[str] = []
    for name, attributes in sorted(listed.items()):
        missing = [attributes - source.attributes(kind) for kind in source.named(name)]
        fewest = min(missing, key=len, default=None)
        found = [f"{name}.{attribute}" for attribute in sorted(fewest or ())]
        lost += [f"class {name}"] if fewest is None else found
    return lost


def _names(nodes: Iterable[ast.expr]) -> Iterator[str]:
    """The last part of each name: KVCache for `memory_pool.KVCache`, Generic for `Generic[T]`."""
    for node in nodes:
        bare = node.value if isinstance(node, ast.Subscript) else node
        if isinstance(bare, ast.Attribute):
            yield bare.attr
        elif isinstance(bare, ast.Name):
            yield bare.id


def _attributes_of(node: ast.ClassDef) -> Iterator[str]:
    for member in node.body:
        if isinstance(member, _FUNCTIONS):
            yield member.name
            yield from _set_by(member)
        elif isinstance(member, ast.ClassDef):
            yield member.name
        elif isinstance(member, ast.Assign):
            yield from _names(member.targets)
        elif isinstance(member, ast.AnnAssign):
            yield from _names([member.target])


def _set_by(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The attributes that a method sets on its object, by assignment or by `setattr`."""
    parameters = [*method.args.posonlyargs, *method.args.args]
    if not parameters:
        return
    itself = parameters[0].arg
    loops = {
        name: _literals(loop.iter)
        for loop in ast.walk(method)
        if isinstance(loop, ast.For | ast.comprehension)
        for name in _names([loop.target])
    }
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if _is(node.value, itself):
                yield node.attr
        elif isinstance(node, ast.Call) and _is(node.func, "setattr") and len(node.args) == 3:
            owner, name, _ = node.args
            named = loops.get(name.id, []) if isinstance(name, ast.Name) else _literals(name)
            yield from named if _is(owner, itself) else ()


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _literals(node: ast.expr) -> list[str]:
    """The strings of a literal: a string, a tuple or a list."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List) else [node]
    values = [part.value for part in parts if isinstance(part, ast.Constant)]
    return [value for value in values if isinstance(value, str)]
