"""RequestStore: an engine's store, in which a later engine finds a request's KV again.

A snapshot's key in the tiers is made of all that decides its bytes: see Namespace. Its request's
name is in it, and that has a hash of the prompt, of the model and of all settings of the answer.
"""

from __future__ import annotations

from typing import final

from kvtide.arena import HostArena
from kvtide.errors import SnapshotMiss
from kvtide.layout import Geometry
from kvtide.serve import progress
from kvtide.serve.live import Live
from kvtide.serve.models import OpenModel
from kvtide.serve.options import EngineOptions
from kvtide.tier import Namespace, Store


def namespace_of(source: OpenModel, geometry: Geometry, options: EngineOptions) -> Namespace:
    """What decides the bytes of KV that an engine computes. Reads all weights, the first time."""
    mode = "exact" if options.exact else "fast"
    kind = options.device.partition(":")[0]
    return Namespace(
        model=source.identity,
        weights="",  # the model's hash has them
        layout=geometry.fingerprint.hex(),
        engine=f"kvtide {mode} {kind} {options.chunk_tokens}",
        stage="0/1",
        rank="0/1",
        adapter="",
        salt=options.salt,
    )


@final
class RequestStore:
    """The store of an engine, and the names that requests' snapshots have in its tiers."""

    def __init__(
        self, arena: HostArena, options: EngineOptions, source: OpenModel, geometry: Geometry
    ) -> None:
        """Opens the tiers that the options name. Raises the errors of Store."""
        self.store = Store(
            arena,
            options.disk_dir,
            options.disk_memory_bytes,
            mooncake=options.mooncake,
            name_of=lambda text: self._key_of(progress.name_of(text)),
        )
        has_tiers = self.store.spill is not None
        self._namespace = namespace_of(source, geometry, options) if has_tiers else None

    def text_of(self, live: Live) -> str:
        """The key of a snapshot of the request now. Only in a tier it outlives this process."""
        if self.store.spill is None:
            return live.request.id
        return progress.to_text(live.request, live.sampler)

    def take_over(self, live: Live, *, vocab_size: int, needs_digests: bool) -> bool:
        """Sets a request to where an earlier engine left it; False if nothing is left of it."""
        request, spill = live.request, self.store.spill
        key = self._key_of(progress.name_for(request))
        snapshot = None if spill is None or key is None else spill.find(key)
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

    def _key_of(self, name: str | None) -> str | None:
        """The key in the tiers of the snapshot with this name; None if nobody shall find it."""
        if name is None or self._namespace is None:
            return None
        return self._namespace.key_of(name)
