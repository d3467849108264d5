"""Finds all classes of KV pools in an engine's source, and says what kvtide does with each.

kvtide leaves a pool of an unknown class to the engine. A census finds such a class before a server
starts with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import final

from kvtide.plugin.package import EnginePackage
from kvtide.plugin.source import Source, SourceClass


@final
@dataclass(frozen=True, slots=True)
class PoolKinds:
    """How to find an engine's pools, and what kvtide knows about each class.

    A class is a pool if it derives from one of `roots` or defines one of `copy_methods`, unless it
    derives from `allocators`.
    """

    roots: Collection[str]
    copy_methods: Collection[str]
    allocators: str
    moved: Collection[str]
    """The classes that a describer knows."""
    refused: Mapping[str, str]
    """Classes that are never moved, and why."""
    within: Mapping[str, str]
    """Classes whose objects are parts of another pool, which describes them."""
    abstract: Mapping[str, str]
    """Abstract classes, and their purpose."""


@final
@dataclass(frozen=True, slots=True)
class PoolClass:
    """A class of the engine, in `file` below its package's folder.

    `verdict` is `known`, `refused` (every pool of that class), `within` or `abstract` (never a
    server's pool), or `unknown`. `reason` says why, or to which pool it belongs.
    """

    name: str
    file: str
    verdict: str
    reason: str = ""


def census(source: Source, package: EnginePackage, kinds: PoolKinds) -> list[PoolClass]:
    """All classes of pools in the source, sorted by name."""
    verdicts = [_verdict(found, package, kinds) for found in _pools(source, kinds)]
    return sorted(verdicts, key=lambda verdict: (verdict.name, verdict.file))


def _pools(source: Source, kinds: PoolKinds) -> list[SourceClass]:
    """The classes that are pools: they derive from a root or define a copy method."""
    found = [kind for method in kinds.copy_methods for kind in source.defining(method)]
    names = {*kinds.roots, *kinds.within, *(kind.name for kind in found)}
    for name in sorted(names):
        found += [*source.named(name), *source.derived(name)]
    hand_out = {kinds.allocators, *(kind.name for kind in source.derived(kinds.allocators))}
    distinct = {(kind.name, kind.file): kind for kind in found if kind.name not in hand_out}
    return list(distinct.values())


def _verdict(found: SourceClass, package: EnginePackage, kinds: PoolKinds) -> PoolClass:
    name, file = found.name, found.file
    if not package.is_at_home(name, file):
        return PoolClass(name, file, "unknown")
    if name in kinds.refused:
        return PoolClass(name, file, "refused", kinds.refused[name])
    if name in kinds.moved:
        return PoolClass(name, file, "known")
    if name in kinds.within:
        return PoolClass(name, file, "within", f"part of {kinds.within[name]}")
    if name in kinds.abstract:
        return PoolClass(name, file, "abstract", kinds.abstract[name])
    return PoolClass(name, file, "unknown")
