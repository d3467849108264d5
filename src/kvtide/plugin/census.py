"""All classes of KV pools that an engine's source has, and what becomes of each.

A class that kvtide doesn't know is left to the engine when a server starts with it; here it is
found before.
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
    """How an engine's pools are told from its other classes, and what kvtide knows of each.

    A pool is what derives from one of `roots`, or has a method of its own of the name of one of
    `copy_methods`, but for what derives from `allocators`.
    """

    roots: Collection[str]
    copy_methods: Collection[str]
    allocators: str
    moved: Collection[str]
    """The classes that a describer knows."""
    refused: Mapping[str, str]
    """Classes that are never moved, and why."""
    within: Mapping[str, str]
    """Classes whose objects are part of another's, which describes them."""
    abstract: Mapping[str, str]
    """Classes without objects of their own, and what they are for."""


@final
@dataclass(frozen=True, slots=True)
class PoolClass:
    """A class of the engine's, in `file` below its package's folder.

    `verdict` is `known`, `refused` (whatever the pool is like), `within` or `abstract` (never a
    server's pool), or `unknown`; `reason` says why, or of which pool it is a part.
    """

    name: str
    file: str
    verdict: str
    reason: str = ""


def census(source: Source, package: EnginePackage, kinds: PoolKinds) -> list[PoolClass]:
    """Each class of pools in the source, by name."""
    verdicts = [_verdict(found, package, kinds) for found in _pools(source, kinds)]
    return sorted(verdicts, key=lambda verdict: (verdict.name, verdict.file))


def _pools(source: Source, kinds: PoolKinds) -> list[SourceClass]:
    """The classes that are pools: by what they derive from, or by a copy method of their own."""
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
