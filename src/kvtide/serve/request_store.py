"""RequestStore: an engine's store, in which a later engine finds a request's KV again.

A snapshot's key in the tiers is made of all that decides its bytes: see Namespace. Its request's
name is in it, and that has a hash of the prompt, of the model and of all settings of the answer.
Blocks of beginnings, which requests share, have keys of the same kind: see `block_key_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from kvtide.arena import HostArena
from kvtide.errors import SnapshotMiss
from kvtide.layout import Geometry
from kvtide.serve import progress
from kvtide.serve.live import Live
from kvtide.serve.models import OpenModel
from kvtide.serve.options import EngineOptions
from kvtide.serve.request import Request
from kvtide.tier import Namespace, Store
from kvtide.tier.namespace import is_shared

_BUSY_S = 1.0


def namespace_of(
    source: OpenModel, geometry: Geometry, options: EngineOptions, numerics: str
) -> Namespace:
    """What decides the bytes of KV that an engine computes. Reads all weights, the first time.

    KV of a request becomes blocks that others read, so both are bound by the same `numerics`.
    """
    mode = "exact" if options.exact else "fast"
    kind = options.device.partition(":")[0]
    return Namespace(
        model=source.identity,
        weights="",  # the model's hash has them
        layout=geometry.fingerprint.hex(),
        engine=f"kvtide {mode} {kind}; {numerics}",
        stage="0/1",
        rank="0/1",
        adapter="",
        salt=options.salt,
    )


def _joined(salts: Sequence[bytes]) -> bytes:
    """One secret of several: who lacks one of them can't make a key."""
    return b"".join(b"%d:%b" % (len(salt), salt) for salt in salts)


@final
class RequestStore:
    """The store of an engine, and the names that requests' snapshots have in its tiers."""

    def __init__(
        self,
        arena: HostArena,
        options: EngineOptions,
        source: OpenModel,
        geometry: Geometry,
        numerics: str = "",
    ) -> None:
        """Opens the tiers that the options name. Raises the errors of Store.

        `numerics` is what else decides the bits of KV, which another engine may have computed.
        """
        self.store = Store(
            arena,
            options.disk_dir,
            options.disk_memory_bytes,
            mooncake=options.mooncake,
            name_of=self._name_of,
        )
        has_tiers = self.store.spill is not None
        self._namespace = namespace_of(source, geometry, options, numerics) if has_tiers else None
        self._salt = options.salt
        self._of_blocks = self._namespace or Namespace(model=source.name, weights="", layout="")

    def block_key_of(self, request: Request, chain: str) -> str:
        """The key of a block of the request, whose tokens and those before them `chain` is of.

        Without tiers it is of use in this engine alone, so it needs no hash of the weights.
        """
        salt = _joined([self._salt, request.salt])
        return replace(self._of_blocks, salt=salt).shared_key_of(chain)

    def text_of(self, live: Live) -> str:
        """The key of a snapshot of the request now. Only in a tier it outlives this process."""
        if self.store.spill is None:
            return live.request.id
        return progress.to_text(live.request, live.sampler)

    def take_over(
        self, live: Live, *, vocab_size: int, needs_digests: bool, is_busy: bool = False
    ) -> bool:
        """Sets a request to where an earlier engine left it; False if nothing is left of it.

        While other requests wait for it (`is_busy`) a tier has a second to answer.
        """
        request, spill = live.request, self.store.spill
        key = self._key_of(progress.name_for(request))
        at_most_s = _BUSY_S if is_busy else None
        snapshot = None if spill is None or key is None else spill.find(key, at_most_s)
        if spill is None or snapshot is None:
            return False
        try:
            progress.take_over(
                snapshot.seal.key,
                snapshot.token_count,
                request,
                live.sampler,
                vocab_size=vocab_size,
                needs_digests=needs_digests,
            )
        except SnapshotMiss:
            spill.remove(snapshot)
            return False
        live.recall()
        request.snapshot, request.snapshot_key = snapshot, snapshot.seal.key
        request.stored = snapshot.token_count
        return True

    def _name_of(self, text: str) -> str | None:
        """The key in the tiers of the snapshot whose seal has this text; None for one of its own"""
        return text if is_shared(text) else self._key_of(progress.name_of(text))

    def _key_of(self, name: str | None) -> str | None:
        """The key in the tiers of the snapshot with this name; None if nobody shall find it."""
        if name is None or self._namespace is None:
            return None
        return self._namespace.key_of(name)
