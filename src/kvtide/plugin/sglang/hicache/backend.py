"""Storage: what SGLang calls of a storage. Each call ends before a deadline, and none raises.

A failure is a shorter prefix, or a page that isn't kept. SGLang computes it again. It asks:

    batch_exists, batch_exists_v2    how long a prefix is there?
    batch_get_v1, batch_set_v1       pages of the pool `kv`, in place
    batch_get_v2, batch_set_v2       pages of several pools, in place
    batch_get, batch_set             pages of `kv` as flat tensors, without `interface_v1`
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache, wraps
from typing import Any, TypeVar

import torch

from kvtide.plugin.sglang.hicache.counts import StorageCounts
from kvtide.plugin.sglang.hicache.hooks import require_hooks
from kvtide.plugin.sglang.hicache.identity import Identity
from kvtide.plugin.sglang.hicache.moves import HIT, PRESENT, WRITTEN, PageMove, PageMoves
from kvtide.plugin.sglang.hicache.pages import HostPage, HostPages, TensorPage
from kvtide.plugin.sglang.hicache.places import Places
from kvtide.plugin.sglang.hicache.presence import leading, with_all, with_last
from kvtide.plugin.sglang.hicache.served_model import ServedModel
from kvtide.plugin.sglang.hicache.settings import StorageSettings
from kvtide.tier.base import Tier

logger = logging.getLogger(__name__)

KV = "kv"
_READ, _WRITE = 0, 1
"""The place of a pool's tiers to read from, and of those to write to."""
T = TypeVar("T")


def _never_raises(otherwise: Callable[..., T]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Makes a method answer `otherwise` of its arguments if it fails, and logs the error."""

    def decorate(method: Callable[..., T]) -> Callable[..., T]:
        @wraps(method)
        def call(storage: Storage, *args: Any, **kwargs: Any) -> T:
            try:
                return method(storage, *args, **kwargs)
            except Exception:
                logger.exception("kvtide's storage failed in %s", method.__name__)
                return otherwise(*args, **kwargs)

        return call

    return decorate


def _nothing(*_: Any, **__: Any) -> Any:
    return None


def _none_of(items: Sequence[Any], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(items)


def _none_of_transfers(transfers: Sequence[Any], *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


def _text(name: str) -> str:
    """SGLang's name as a plain text; it may be of an enumeration."""
    return str.__str__(name)


def _result(pages: int, found: dict[str, int], prefixes: list[int]) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

    return PoolTransferResult(pages, found, prefixes)


@cache
def storage_class() -> type[Storage]:
    """The class that SGLang makes a storage of: it must inherit from SGLang's own."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    return type("KvtideStorage", (Storage, HiCacheStorage), {"__doc__": Storage.__doc__})


class Storage:
    """Keeps SGLang's pages of KV in kvtide's tiers: sealed, verified, within limits.

    Pools, policies and transfers are named by SGLang's enumerations, whose values are texts.
    """

    def __init__(self, config: Any, _: Any = None) -> None:
        """`config` is SGLang's HiCacheStorageConfig. Raises UsageError, which ends the start."""
        self._settings = StorageSettings.read(config.extra_config)
        require_hooks()
        self._identity = Identity(config, ServedModel.running(self._settings.weights))
        self._counts = StorageCounts(self._identity.shard)
        self._pools: dict[str, HostPages] = {}
        self._tiers: dict[str, tuple[Sequence[Tier], Sequence[Tier]]] = {}
        self._places: Places | None = None
        self._moves = PageMoves(self._settings.deadline_s)
        self._is_warned = False

    # ---- the pools -----------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool `kv`. Raises UsageError if it has no pages that can be stored."""
        self._adopt(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Another pool, or `kv` again. Raises UsageError as above."""
        self._adopt(_text(host_pool_name), host_pool)

    def _adopt(self, name: str, pool: Any) -> None:
        self._pools[name] = HostPages(name, pool, is_flat=name == KV and self._settings.is_flat)
        if self._places is not None:  # a pool that SGLang brings later
            self._tiers[name] = self._tiers_of(self._pools[name], self._places)

    def on_host_pools_registered(self) -> None:
        """Opens the tiers. Raises UsageError if one can't be used."""
        places = Places(self._settings, self._identity.shard, self._disk_share())
        self._places = places
        self._tiers = {name: self._tiers_of(found, places) for name, found in self._pools.items()}
        logger.info("kvtide's storage keeps pages of %s: %s", ", ".join(self._pools), places)

    def _disk_share(self) -> float:
        """This rank's part of the limit of all ranks on this host: those that write share it."""
        identity, ranks = self._identity, self._identity.server.rank_count
        if not all(identity.is_replicated(pages) for pages in self._pools.values()):
            return 1 / ranks
        return min(1, identity.tp_size / ranks) if identity.is_writer else 0

    def _tiers_of(self, pages: HostPages, places: Places) -> tuple[Sequence[Tier], Sequence[Tier]]:
        """The tiers to read this pool's pages from, and those to write them to."""
        identity = self._identity
        if identity.is_replicated(pages) and not identity.is_writer:
            return places.of_writer(identity.writers_shard), ()
        return places.to_read, places.to_write

    # ---- what is there -------------------------------------------------------------------

    @_never_raises(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the pages of `kv`, from the first on, are there."""
        return leading(self._find(KV, keys))

    @_never_raises(lambda *_, **__: _result(0, {}, []))
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """The longest prefix that all pools can restore, what each has, and all such prefixes."""
        hits = leading(self._find(KV, keys))
        whole = list(range(1, hits + 1))
        found: dict[str, int] = {KV: hits}
        for transfer in pool_transfers or ():
            policy = _text(transfer.hit_policy)
            if policy == "block_groups":
                continue  # it never shortens a prefix, and without a verdict SGLang asks no more
            name = _text(transfer.name)
            has = self._find(name, keys[:hits])
            if policy == "trailing_pages":
                prefixes = with_last(has, max(1, len(transfer.keys or ())))
            else:
                prefixes = with_all(has)
            found[name] = max(prefixes, default=0)
            allowed = set(prefixes)
            whole = [prefix for prefix in whole if prefix in allowed]
        return _result(max(whole, default=0), found, whole)

    @_never_raises(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Whether a page of `kv` is there."""
        return self._find(KV, [key])[0]

    def _find(self, pool: str, names: list[str]) -> list[bool]:
        pages = self._pools.get(pool)
        if pages is None:
            return [False] * len(names)
        return self._moves.find(self._identity.keys_of(pages, names), self._tiers[pool][0])

    # ---- pages in place ------------------------------------------------------------------

    @_never_raises(_none_of)
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Fills pages of `kv`. Those that are true have their bytes, which were verified."""
        return self._get([self._in_place(KV, keys, host_indices, _READ)])[0]

    @_never_raises(_none_of)
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Keeps pages of `kv`. Those that are true are in a tier."""
        return self._set([self._in_place(KV, keys, host_indices, _WRITE)])[0]

    @_never_raises(_none_of_transfers)
    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """The same as batch_get_v1 for several pools, by their names."""
        answers = self._get([self._transferred(transfer, _READ) for transfer in transfers])
        return {part.name: answer for part, answer in zip(transfers, answers, strict=True)}

    @_never_raises(_none_of_transfers)
    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """The same as batch_set_v1 for several pools, by their names."""
        answers = self._set([self._transferred(transfer, _WRITE) for transfer in transfers])
        return {part.name: answer for part, answer in zip(transfers, answers, strict=True)}

    def _transferred(self, transfer: Any, way: int) -> list[PageMove | None]:
        pool, rows = _text(transfer.name), transfer.host_indices
        return self._in_place(pool, transfer.keys or [], rows, way)

    def _in_place(
        self, pool: str, names: list[str], rows: torch.Tensor | None, way: int
    ) -> list[PageMove | None]:
        """Moves of pages at rows of a pool; without a move where the rows aren't the pages'."""
        pages = self._pools.get(pool)
        found = pages.at(rows, len(names)) if pages is not None and rows is not None else None
        if pages is None or found is None:
            logger.error("kvtide's storage has no pages at these rows of the pool %r", pool)
            return [None] * len(names)
        return [*self._made(pages, names, found, way)]

    def _made(
        self, pages: HostPages, names: list[str], found: Sequence[HostPage], way: int
    ) -> Iterator[PageMove]:
        keys, tiers = self._identity.keys_of(pages, names), self._tiers[pages.name][way]
        for key, name, page in zip(keys, names, found, strict=True):
            yield PageMove(key, name, pages, page, tiers)

    # ---- pages as tensors ----------------------------------------------------------------

    @_never_raises(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fills the tensors, which are pages of `kv`; None for a page that isn't there."""
        went_well = self._get([self._flat(keys, target_locations, _READ)])[0]
        return [
            tensor if is_filled else None
            for tensor, is_filled in zip(target_locations, went_well, strict=True)
        ]

    @_never_raises(lambda *_, **__: False)
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Keeps the tensors, which are pages of `kv`. Whether all of them are in a tier."""
        return all(self._set([self._flat(keys, values, _WRITE)])[0])

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """The same as batch_get for a page."""
        found: torch.Tensor | None = self.batch_get([key], [target_location])[0]
        return found

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """The same as batch_set for a page."""
        return self.batch_set([key], [value])

    def _flat(
        self, names: list[str], tensors: Sequence[torch.Tensor], way: int
    ) -> list[PageMove | None]:
        pages = self._pools[KV]
        if not pages.is_flat or any(tensor.nbytes != pages.size_bytes for tensor in tensors):
            logger.error("kvtide's storage knows no such tensors as pages of %r", KV)
            return [None] * len(names)
        found = [TensorPage(tensor) for tensor in tensors]
        return [*self._made(pages, names, found, way)]

    # ---- both ----------------------------------------------------------------------------

    def _get(self, parts: Sequence[Sequence[PageMove | None]]) -> list[list[bool]]:
        revision = self._identity.server.revision
        answers = self._move(self._moves.get, parts, {HIT})
        if revision != self._identity.server.revision:  # the weights were changed meanwhile
            return [[False] * len(part) for part in parts]
        return answers

    def _set(self, parts: Sequence[Sequence[PageMove | None]]) -> list[list[bool]]:
        if self._identity.server.updates.are_mixed:
            if not self._is_warned:
                self._is_warned = True
                logger.warning(
                    "the weights were changed, and SGLang's cache may have KV of both: kvtide "
                    "keeps no pages until the cache is flushed (/flush_cache)"
                )
            return [[False] * len(part) for part in parts]
        self._is_warned = False
        return self._move(self._moves.put, parts, {WRITTEN, PRESENT})

    def _move(
        self,
        way: Callable[[Sequence[PageMove]], list[str]],
        parts: Sequence[Sequence[PageMove | None]],
        good: Container[str],
    ) -> list[list[bool]]:
        """Moves the pages of all parts at once; whether each went well, part by part."""
        moves = [move for part in parts for move in part if move is not None]
        outcomes = iter(self._counts.counted(way, moves))
        return [[move is not None and next(outcomes) in good for move in part] for part in parts]

    # ---- the rest ------------------------------------------------------------------------

    @_never_raises(_nothing)
    def get_stats(self) -> Any:
        """What moved since the last call, for SGLang's metrics."""
        return self._counts.to_sglang()

    def hurrying(self) -> AbstractContextManager[None]:
        """Within, calls end at once: SGLang waits for its threads. See hooks."""
        return self._moves.hurrying()

    @_never_raises(lambda *_, **__: None)
    def clear(self) -> None:
        """Forgets the pages of this rank's disk. A Mooncake store keeps what it has."""
        if self._places is not None:
            self._places.clear()

    @_never_raises(lambda *_, **__: None)
    def close(self) -> None:
        """Gives the tiers back. SGLang calls this when it detaches the storage."""
        self._moves.close()
        if self._places is not None:
            self._places.close()
