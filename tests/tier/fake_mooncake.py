"""A Mooncake store in this process, with the manners that were seen in the real one."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from kvtide.tier.mooncake_client import IN_USE, MISSING, NO_ROOM, UNREACHABLE

AWAY = -900
BEING_WRITTEN = -703


class FakeStore:
    """What the nodes have; `open_client` gives clients of it. Faults are set as attributes."""

    def __init__(self, limit_bytes: int = 64 << 20) -> None:
        self.objects: dict[str, bytearray] = {}
        self.begun: dict[str, bytearray] = {}
        self.limit_bytes = limit_bytes
        self.is_master_away = False
        self.unsaid: set[str] = set()
        """Objects of which nobody can say whether they are there."""
        self.node_code = 0
        """What moves give while the node is away."""
        self.lost_bytes = 0
        """How many bytes less a move says that it moved."""
        self.has_no_memory = False
        """Whether it registers none."""
        self.busy_count = 0
        """How many writes are refused before the master has made room."""
        self.clients: list[FakeClient] = []
        self.before_read: Callable[[int], None] = lambda place: None
        self.before_end: Callable[[str], object] = lambda name: None
        self.lock = threading.Lock()

    def open_client(self) -> FakeClient:
        self.clients.append(FakeClient(self))
        return self.clients[-1]

    def begin(self, key: str, size: int) -> int:
        """Takes room for an object. The store is a cache: the oldest objects leave."""
        if key in self.objects or key in self.begun:
            return IN_USE
        if self.busy_count or size > self.limit_bytes:
            self.busy_count -= bool(self.busy_count)
            return NO_ROOM
        while self.objects and sum(map(len, self.objects.values())) + size > self.limit_bytes:
            del self.objects[next(iter(self.objects))]
        self.begun[key] = bytearray(size)
        return 0


class FakeClient:
    """Moves bytes only between registered memory and the store, and only until it is closed."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.ranges: dict[int, int] = {}
        self.is_closed = False
        self._found: set[str] = set()

    def get_size(self, key: str) -> int:
        with self.store.lock:
            return self._code(key) or len(self.store.objects[key])

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        with self.store.lock:
            codes = [AWAY if key in self.store.unsaid else self._code(key) for key in keys]
        return [code if code == AWAY else int(code == 0) for code in codes]

    def remove(self, key: str, force: bool) -> int:
        assert force, "an object that was read a moment ago isn't removed without force"
        with self.store.lock:
            code = self._code(key)
            if not code:
                del self.store.objects[key]
            return code

    def batch_put_session_start(self, keys: list[str], sizes: list[int]) -> list[int]:
        with self.store.lock:
            if self.store.is_master_away:
                return [AWAY] * len(keys)
            return list(map(self.store.begin, keys, sizes))

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_dst_offsets: list[list[int]],
    ) -> list[int]:
        (key,), (addresses,), (sizes,), (places,) = (
            keys,
            all_buffer_ptrs,
            all_sizes,
            all_dst_offsets,
        )
        self._require_registered(addresses, sizes)
        if self.store.node_code:
            return [self.store.node_code]
        for address, size, place in zip(addresses, sizes, places, strict=True):
            content = ctypes.string_at(address, size)
            with self.store.lock:
                assert place + size <= len(self.store.begun[key])
                self.store.begun[key][place : place + size] = content
        return [sum(sizes) - self.store.lost_bytes]

    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        self.store.before_end(keys[0])
        with self.store.lock:
            self.store.objects[keys[0]] = self.store.begun.pop(keys[0])
            return [0]

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        with self.store.lock:
            return [0 if self.store.begun.pop(keys[0], None) is not None else UNREACHABLE]

    def batch_get_session_start(self, keys: list[str]) -> list[int]:
        with self.store.lock:
            code = self._code(keys[0])
        if not code:
            assert keys[0] not in self._found
            self._found.add(keys[0])
        return [code]

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_src_offsets: list[list[int]],
    ) -> list[int]:
        (key,), (addresses,), (sizes,), (places,) = (
            keys,
            all_buffer_ptrs,
            all_sizes,
            all_src_offsets,
        )
        self._require_registered(addresses, sizes)
        assert key in self._found
        self.store.before_read(places[0])
        if self.store.node_code:
            return [self.store.node_code]
        for address, size, place in zip(addresses, sizes, places, strict=True):
            with self.store.lock:
                content = bytes(self.store.objects[key][place : place + size])
            if len(content) != size:
                return [UNREACHABLE]
            ctypes.memmove(address, content, size)
        return [sum(sizes) - self.store.lost_bytes]

    def batch_get_session_end(self, keys: list[str]) -> int:
        self._found.discard(keys[0])
        return 0

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        if self.store.has_no_memory:
            return UNREACHABLE
        stop = buffer_ptr + size
        if any(first < stop and buffer_ptr < first + n for first, n in self.ranges.items()):
            return UNREACHABLE
        self.ranges[buffer_ptr] = size
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        del self.ranges[buffer_ptr]
        return 0

    def close(self) -> int:
        assert not self.is_closed
        assert not self.ranges
        self.is_closed = True
        return 0

    def _code(self, key: str) -> int:
        if self.store.is_master_away:
            return AWAY
        if key in self.store.begun:
            return BEING_WRITTEN
        return 0 if key in self.store.objects else MISSING

    def _require_registered(self, addresses: list[int], sizes: list[int]) -> None:
        assert not self.is_closed
        for address, size in zip(addresses, sizes, strict=True):
            assert any(
                first <= address and address + size <= first + n for first, n in self.ranges.items()
            )
