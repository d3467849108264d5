"""MooncakeClient: a client of a Mooncake store, and the memory that it may use. Codes stay codes.

Memory is registered where it lies, once, so nothing is copied on its way. A transfer that failed
may still write later (a card on the network does it by itself), so its client is closed before the
caller gets its memory back, and the next call opens another client.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, final

import numpy as np

from kvtide.errors import ProcessForked, TierRetry
from kvtide.tier.file_io import batches

_CLOSE_WAIT_S = 5.0
UNKNOWN = -1
NO_ROOM = -200
UNREACHABLE = -600
"""The node can't be reached, or the request is invalid: the store has one code for both."""
MISSING = -704
IN_USE = -705
TRANSFER_FAILED = -800
CODES = {
    UNKNOWN: "another number of bytes moved",
    NO_ROOM: "no node has room",
    UNREACHABLE: "its node can't be reached",
    -703: "it is being written",
    MISSING: "it isn't there",
    IN_USE: "somebody else writes it",
    -706: "somebody reads it",
    -707: "the read took too long",
    TRANSFER_FAILED: "a node doesn't answer",
    -900: "the master doesn't answer",
    -901: "the master doesn't answer in time",
}
# After these codes nothing moves any more.
_ENDED = {*CODES} - {UNKNOWN, TRANSFER_FAILED}


class StoreClient(Protocol):
    """The methods of mooncake's MooncakeDistributedStore that kvtide uses. 0 is success."""

    def get_size(self, key: str) -> int:
        """Bytes of an object, or a negative code."""
        ...

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """1 for each object that is there, 0 for others, or a negative code."""
        ...

    def remove(self, key: str, force: bool) -> int:
        """Removes an object; with `force` also one that was read a moment ago."""
        ...

    def batch_put_session_start(self, keys: list[str], sizes: list[int]) -> list[int]:
        """Takes room for objects that aren't there yet. Nobody can read them before the end."""
        ...

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_dst_offsets: list[list[int]],
    ) -> list[int]:
        """Writes parts of objects; gives the bytes written."""
        ...

    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        """Makes objects readable."""
        ...

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        """Gives objects up that were begun."""
        ...

    def batch_get_session_start(self, keys: list[str]) -> list[int]:
        """Finds where objects are, and keeps them there for some seconds."""
        ...

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_src_offsets: list[list[int]],
    ) -> list[int]:
        """Reads parts of objects; gives the bytes read."""
        ...

    def batch_get_session_end(self, keys: list[str]) -> int:
        """Forgets where objects are."""
        ...

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Makes memory usable. It may not overlap with other registered memory."""
        ...

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Undoes `register_buffer`."""
        ...

    def close(self) -> int:
        """Ends all transfers."""
        ...


@dataclass(slots=True)
class _Range:
    """Registered memory. With an `owner`, which it keeps alive, it stays registered."""

    owner: object
    users: int = 0


class _OpenClient:
    """An open client. `users` counts the calls under way; the last one closes what is left."""

    def __init__(self, store: StoreClient) -> None:
        self.store = store
        self.users = 0
        self.is_left = self.is_closed = False
        self._ranges: dict[int, _Range] = {}
        self._change = threading.Lock()

    def close(self) -> None:
        """Gives all memory back and closes the client; no call is under way. Repeatable."""
        if self.is_closed:
            return
        self.is_closed = True
        for address in tuple(self._ranges):
            self.store.unregister_buffer(address)
        self._ranges.clear()
        self.store.close()

    def write(self, name: str, parts: Sequence[memoryview]) -> int:
        """See MooncakeClient."""
        store = self.store
        size_bytes = sum(part.nbytes for part in parts)
        code = _only(store.batch_put_session_start([name], [size_bytes]))
        if code:
            return code
        is_whole = False
        try:
            place = 0
            for batch in batches(parts):
                code = self._move(store.batch_put_from_multi_buffer_ranges, name, place, batch)
                if code:
                    return code
                place += sum(part.nbytes for part in batch)
            code = _only(store.batch_put_session_end([name]))
            is_whole = not code
            return code
        finally:
            if not is_whole:
                store.batch_put_session_revoke([name])

    def read(self, name: str, place: int, parts: Sequence[memoryview]) -> int:
        """See MooncakeClient."""
        store = self.store
        for batch in batches(parts):
            # Each batch begins anew, since the store keeps an object in its place only for seconds.
            code = _only(store.batch_get_session_start([name]))
            if not code:
                code = self._move(store.batch_get_into_multi_buffer_ranges, name, place, batch)
                store.batch_get_session_end([name])
            if code:
                return code
            place += sum(part.nbytes for part in batch)
        return 0

    def _move(self, call: Any, name: str, place: int, parts: Sequence[memoryview]) -> int:
        """Moves parts that lie one behind the other in an object, from byte `place` on."""
        sizes = [part.nbytes for part in parts]
        places = list(accumulate(sizes, initial=place))[:-1]
        with self._registered(parts) as addresses:
            moved = _only(call([name], [addresses], [sizes], [places]))
        return moved if moved < 0 else 0 if moved == sum(sizes) else UNKNOWN

    @contextmanager
    def _registered(self, views: Sequence[memoryview]) -> Iterator[list[int]]:
        """Within, the store may use the memory of `views`; gives their addresses."""
        used: list[int] = []
        try:
            for view in views:
                used.append(self._register(view))
            yield [_address_of(view) for view in views]
        finally:
            with self._change:
                for address in used:
                    self._release(address)

    def _register(self, view: memoryview) -> int:
        """Registers the whole allocation that a view is part of; gives its address."""
        address, size_bytes, owner = _allocation_of(view)
        with self._change:
            if address not in self._ranges:
                code = self.store.register_buffer(address, size_bytes)
                if code:
                    raise TierRetry(
                        f"mooncake tier: cannot register {size_bytes} bytes of memory (code "
                        f"{code}); over RDMA `ulimit -l` must allow as many locked bytes"
                    )
                self._ranges[address] = _Range(owner)
            self._ranges[address].users += 1
        return address

    def _release(self, address: int) -> None:
        found = self._ranges[address]
        found.users -= 1
        if not found.users and found.owner is None:
            del self._ranges[address]
            self.store.unregister_buffer(address)


@final
class MooncakeClient:
    """Calls of a store, from any thread. Each raises TierRetry if no client can be opened."""

    def __init__(self, connect: Callable[[], StoreClient]) -> None:
        """Opens a client by `connect`, and another one when the first has to be closed."""
        self._process = os.getpid()
        self._connect = connect
        self._change = threading.Condition()
        self._session: _OpenClient | None = _OpenClient(connect())

    def size_of(self, name: str) -> int:
        """Bytes of an object, or a negative code."""
        with self._using() as session:
            return session.store.get_size(name)

    def exist(self, names: Sequence[str]) -> Sequence[int]:
        """For each name 1 if an object is there, 0 if not, or a code if the master doesn't say."""
        with self._using() as session:
            codes = session.store.batch_is_exist(list(names))
        assert len(codes) == len(names), f"{len(codes)} codes for {len(names)} names"
        return codes

    def remove(self, name: str) -> int:
        """Removes an object, whoever reads it. 0, or a negative code."""
        with self._using() as session:
            return session.store.remove(name, True)

    def write(self, name: str, parts: Sequence[memoryview]) -> int:
        """Makes an object of parts, one behind the other, all of it or nothing.

        Gives 0 or a negative code, IN_USE for a name that has an object.
        """
        with self._using() as session:
            code = session.write(name, parts)
        return self._settled(session, code)

    def read(self, name: str, place: int, parts: Sequence[memoryview]) -> int:
        """Fills parts with an object's bytes from byte `place` on. 0, or a negative code."""
        with self._using() as session:
            code = session.read(name, place, parts)
        return self._settled(session, code)

    def close(self) -> None:
        """Closes the client when the calls under way have ended. Repeatable.

        Waits some seconds for them. A call that hangs keeps its memory, and nobody else waiting.
        """
        if os.getpid() != self._process:
            return  # the parent still uses it
        with self._change:
            session, self._session = self._session, None
            if session is None:
                return
            session.is_left = True
            if self._change.wait_for(lambda: not session.users, _CLOSE_WAIT_S):
                session.close()

    def require_own_process(self) -> None:
        """Raises ProcessForked in a child of the process that opened the client.

        The client's threads exist in the parent alone, so a call would wait for ever.
        """
        if os.getpid() != self._process:
            raise ProcessForked("the mooncake tier's client belongs to the process before the fork")

    @contextmanager
    def _using(self) -> Iterator[_OpenClient]:
        self.require_own_process()
        with self._change:
            if self._session is None:
                self._session = _OpenClient(self._connect())
            session = self._session
            session.users += 1
        try:
            yield session
        finally:
            with self._change:
                session.users -= 1
                if session.is_left and not session.users:
                    session.close()
                self._change.notify_all()

    def _settled(self, session: _OpenClient, code: int) -> int:
        """The code of a move, after which nothing moves any more."""
        if code and code not in _ENDED:
            with self._change:
                self._close(session)
        return code

    def _close(self, session: _OpenClient) -> None:
        """Closes a session whose calls have ended; `_change` is held."""
        if self._session is session:
            self._session = None
        self._change.wait_for(lambda: not session.users)
        session.close()


def _only(codes: Sequence[int]) -> int:
    """The code of a call for a single object."""
    return codes[0] if len(codes) == 1 else UNKNOWN


def _address_of(memory: Any) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def _allocation_of(view: memoryview) -> tuple[int, int, object]:
    """Address and bytes of the allocation that a view is part of, and who keeps it alive.

    The third is None for memory that comes and goes.
    """
    array: Any = view.obj
    while isinstance(array, np.ndarray) and isinstance(array.base, np.ndarray):
        array = array.base
    with suppress(AttributeError):
        storage = array.base.untyped_storage()  # the array is a view of a torch tensor
        return storage.data_ptr(), storage.nbytes(), array
    if isinstance(array, np.ndarray) and array.flags.owndata:
        return array.ctypes.data, array.nbytes, array
    memory: Any = view.obj
    whole = np.frombuffer(memory, np.uint8)
    return int(whole.ctypes.data), whole.nbytes, None
