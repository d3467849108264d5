from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import safetensors.numpy

from kvtide.arena import HostArena
from kvtide.conformance import TierTests
from kvtide.device import CPUDevice
from kvtide.errors import (
    ProcessForked,
    SnapshotDamaged,
    SnapshotMiss,
    TierFull,
    TierRetry,
    UsageError,
)
from kvtide.layout import GQA
from kvtide.pool import Pool
from kvtide.seal import Seal
from kvtide.snapshot import Snapshot
from kvtide.tide import Tide
from kvtide.tier import MooncakeTier, Tier, mooncake, mooncake_client
from kvtide.tier.mooncake_client import TRANSFER_FAILED, UNREACHABLE
from tier.fake_mooncake import FakeStore


class TestMooncakeTier(TierTests):
    """Against a fake, whose bytes can be damaged; engines/mooncake has the real store."""

    def make_tier(self) -> MooncakeTier:
        self.store = FakeStore()
        return MooncakeTier("", open_client=self.store.open_client)

    def close_tier(self, tier: Tier) -> None:
        assert isinstance(tier, MooncakeTier)
        tier.close()
        tier.close()
        assert all(client.is_closed for client in self.store.clients)

    def _object(self) -> bytearray:
        (content,) = self.store.objects.values()
        return content

    def stored_bytes(self, tier: Tier, key: str) -> int:
        return len(self._object())

    def set_stored(self, tier: Tier, key: str, place: int, flip: int) -> None:
        content = self._object()
        if flip:
            content[place] ^= flip
        else:
            del content[place:]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    """A store that makes room at once, or never."""
    monkeypatch.setattr(mooncake, "_ROOM_WAITS_S", (0.0, 0.0))
    return FakeStore()


@pytest.fixture
def tier(store: FakeStore) -> Iterator[MooncakeTier]:
    """A tier over `store`."""
    with closing(MooncakeTier("", open_client=store.open_client)) as tier:
        yield tier


@pytest.fixture
def tide() -> Iterator[Tide]:
    """A pool of 256 tokens of 128 bytes, and an arena whose blocks hold 64 of them."""
    with closing(CPUDevice(lanes=1)) as device:
        geometry = GQA.bind(dtype="bfloat16", token=4, layer=2, head=2, head_dim=8, v_head_dim=8)
        pool = Pool.create(geometry, device, page_count=64)
        for number, buffer in enumerate(pool.buffers):
            buffer.fill_(number + 65)
        yield Tide(pool, HostArena(device, limit_bytes=1 << 20, block_bytes=64 * 128))


@pytest.fixture
def snapshot(tide: Tide) -> Iterator[Snapshot]:
    """A snapshot of 200 tokens, in four chunks."""
    snapshot = tide.offload(range(200), key="request")
    yield snapshot
    tide.discard(snapshot)


def load(tier: MooncakeTier, key: str, tide: Tide) -> list[bytes]:
    """The bytes that the tier has for a key. Nothing is left in the arena."""
    snapshot = tier.load(key, tide.arena)
    chunks = [bytes(chunk) for chunk in snapshot.chunks]
    tide.discard(snapshot)
    return chunks


# ---- objects ------------------------------------------------------------------------------------


def test_nothing_is_left_of_what_was_removed_or_replaced(
    tier: MooncakeTier, store: FakeStore, snapshot: Snapshot
) -> None:
    """A snapshot is one object, so that the store never has a part of it."""
    for _ in range(3):
        tier.save("a", snapshot)
        assert 1 == len(store.objects)
    tier.remove("a")
    assert {} == store.objects


def test_object_is_a_snapshots_file(
    tier: MooncakeTier, store: FakeStore, snapshot: Snapshot
) -> None:
    """A tool that reads the files of a disk tier can read an object."""
    tier.save("a", snapshot)
    (content,) = store.objects.values()
    tensors = safetensors.numpy.load(bytes(content))
    found = {name: tensor.tobytes() for name, tensor in tensors.items() if "chunk" in name}
    assert [bytes(chunk) for chunk in snapshot.chunks] == [found[name] for name in sorted(found)]


def test_the_object_of_another_key_is_damage(
    tier: MooncakeTier, store: FakeStore, tide: Tide, snapshot: Snapshot
) -> None:
    """A snapshot says which key it was put with, so an answer for another key is found."""
    for key in "ab":
        tier.save(key, snapshot)
    a, b = store.objects
    store.objects[b] = store.objects[a]
    with pytest.raises(SnapshotDamaged, match="its key is 'a', not 'b'"):
        tier.load("b", tide.arena)
    assert [a] == list(store.objects)
    assert [bytes(chunk) for chunk in snapshot.chunks] == load(tier, "a", tide)


def test_keys_are_not_in_names(tier: MooncakeTier, store: FakeStore, snapshot: Snapshot) -> None:
    """A name is a hash: a tenant's salt in a key can't be read off it."""
    for key in ("salt/1", "salt/2"):
        tier.save(key, snapshot)
    assert 2 == len(store.objects)
    assert not any("salt" in name for name in store.objects)


def test_long_header_is_read_whole(
    tier: MooncakeTier, store: FakeStore, tide: Tide, snapshot: Snapshot
) -> None:
    """A header may be longer than what is read first."""
    key = "long" * 20000
    tier.save(key, snapshot)
    assert [bytes(chunk) for chunk in snapshot.chunks] == load(tier, key, tide)


# ---- room ---------------------------------------------------------------------------------------


def test_what_has_no_room_leaves_nothing(
    tier: MooncakeTier, store: FakeStore, snapshot: Snapshot
) -> None:
    """A snapshot that no node takes is refused, and what the key had is gone."""
    tier.save("a", snapshot)
    store.limit_bytes = 8000
    with pytest.raises(TierFull, match="no node has room for 32768 bytes"):
        tier.save("a", snapshot)
    assert not tier.contains("a")
    assert not store.begun


def test_a_busy_store_is_asked_again(
    tier: MooncakeTier, store: FakeStore, tide: Tide, snapshot: Snapshot
) -> None:
    """The master makes room in the background, a moment after it refused."""
    for store.busy_count in (1, 2):
        tier.save("a", snapshot)
    assert [bytes(chunk) for chunk in snapshot.chunks] == load(tier, "a", tide)


# ---- faults -------------------------------------------------------------------------------------


def test_without_its_master_the_store_is_asked_later(
    tier: MooncakeTier, store: FakeStore, tide: Tide, snapshot: Snapshot
) -> None:
    """Each call raises TierRetry, and what was stored is there when the master is back."""
    tier.save("a", snapshot)
    store.is_master_away = True
    for call in (
        lambda: tier.save("a", snapshot),
        lambda: tier.load("a", tide.arena),
        lambda: tier.remove("a"),
        lambda: tier.contains("a"),
    ):
        with pytest.raises(TierRetry, match=r"the master doesn't answer \(code -900\)"):
            call()
    store.is_master_away = False
    assert [bytes(chunk) for chunk in snapshot.chunks] == load(tier, "a", tide)


def test_a_key_of_which_the_store_cant_say_costs_the_others_nothing(
    tier: MooncakeTier, store: FakeStore, snapshot: Snapshot
) -> None:
    """It isn't there. A store that can say nothing of any key is asked later."""
    tier.save("a", snapshot)
    store.unsaid = {*store.objects}
    tier.save("b", snapshot)

    assert [False, True, False] == tier.contains_each(["a", "b", "c"])
    assert [] == tier.contains_each([])
    store.unsaid = {*store.objects}
    with pytest.raises(TierRetry, match=r"cannot look for an object.*\(code -900\)"):
        tier.contains_each(["a", "b"])


@pytest.mark.parametrize("code", [TRANSFER_FAILED, UNREACHABLE])
def test_a_node_that_is_away_makes_a_miss_and_keeps_the_store(
    tier: MooncakeTier, store: FakeStore, tide: Tide, snapshot: Snapshot, code: int
) -> None:
    """Others' snapshots can still be read, so only a write says that the store is ill."""
    tier.save("a", snapshot)
    store.node_code = code
    with pytest.raises(SnapshotMiss, match=rf"code {code}"):
        tier.load("a", tide.arena)
    with pytest.raises(TierRetry, match=rf"code {code}"):
        tier.save("b", snapshot)
    tier.remove("a")
    store.node_code = 0
    with pytest.raises(SnapshotMiss):
        tier.load("a", tide.arena)


def test_memory_comes_back_only_when_nothing_moves(
    tier: MooncakeTier, store: FakeStore, tide: Tide, snapshot: Snapshot
) -> None:
    """A transfer that failed may still write, so its client is closed before the call returns."""
    tier.save("a", snapshot)
    store.node_code = TRANSFER_FAILED
    with pytest.raises(SnapshotMiss):
        tier.load("a", tide.arena)
    assert [True] == [client.is_closed for client in store.clients]
    store.node_code = 0
    assert [bytes(chunk) for chunk in snapshot.chunks] == load(tier, "a", tide)
    assert [True, False] == [client.is_closed for client in store.clients]


def test_a_call_that_hangs_does_not_keep_its_process(
    tier: MooncakeTier,
    store: FakeStore,
    tide: Tide,
    snapshot: Snapshot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end leaves it the client, and so the memory that it writes to, until it has ended."""
    monkeypatch.setattr(mooncake_client, "_CLOSE_WAIT_S", 0.01)
    tier.save("a", snapshot)
    begun, goes_on = threading.Event(), threading.Event()

    def hang(_: int) -> None:
        begun.set()
        assert goes_on.wait(60)

    store.before_read = hang
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(load, tier, "a", tide)
        assert begun.wait(60)
        closing_it = threading.Thread(target=tier.close, daemon=True)
        closing_it.start()
        closing_it.join(10)
        was_held = closing_it.is_alive(), store.clients[0].is_closed
        store.before_read = lambda _: None
        goes_on.set()
        assert [bytes(chunk) for chunk in snapshot.chunks] == reading.result()
    assert (False, False) == was_held
    assert store.clients[0].is_closed


def test_a_write_that_fails_can_be_repeated(
    tier: MooncakeTier, store: FakeStore, tide: Tide, snapshot: Snapshot
) -> None:
    """What was begun is given up, so the name is free again."""
    store.node_code = TRANSFER_FAILED
    with pytest.raises(TierRetry):
        tier.save("a", snapshot)
    assert not store.begun
    store.node_code = 0
    tier.save("a", snapshot)
    assert [bytes(chunk) for chunk in snapshot.chunks] == load(tier, "a", tide)


def test_a_short_move_is_an_error(
    tier: MooncakeTier, store: FakeStore, tide: Tide, snapshot: Snapshot
) -> None:
    """A count that isn't the wanted one ends the move, and nothing half is kept."""
    tier.save("a", snapshot)
    store.lost_bytes = 1
    with pytest.raises(TierRetry, match="another number of bytes moved"):
        tier.load("a", tide.arena)
    with pytest.raises(TierRetry, match="another number of bytes moved"):
        tier.save("b", snapshot)
    assert not store.begun
    store.lost_bytes = 0
    assert [bytes(chunk) for chunk in snapshot.chunks] == load(tier, "a", tide)


def test_memory_that_cannot_be_registered_is_an_error(
    tier: MooncakeTier, store: FakeStore, snapshot: Snapshot
) -> None:
    """The error says what an operator can change, and nothing half is kept."""
    store.has_no_memory = True
    with pytest.raises(TierRetry, match=r"cannot register \d+ bytes of memory.*ulimit -l"):
        tier.save("a", snapshot)
    assert not store.begun


def test_a_name_that_another_process_writes_is_asked_later(
    tier: MooncakeTier, store: FakeStore, tide: Tide, snapshot: Snapshot
) -> None:
    """Nobody reads half an object, and nobody writes into it."""
    tier.save("a", snapshot)
    (name,) = store.objects
    store.begun[name] = store.objects.pop(name)
    for call in (
        lambda: tier.save("a", snapshot),
        lambda: tier.load("a", tide.arena),
        lambda: tier.remove("a"),
    ):
        with pytest.raises(TierRetry, match=r"code -703"):
            call()
    assert not tier.contains("a")


def test_an_object_replaced_by_another_process_is_never_mixed(
    tier: MooncakeTier, store: FakeStore, tide: Tide, snapshot: Snapshot
) -> None:
    """A writer elsewhere replaces it between the read of the header and that of the chunks."""
    tier.save("a", snapshot)
    for buffer in tide.pool.buffers:
        buffer.fill_(99)
    other = tide.offload(range(200), key="request")
    with closing(MooncakeTier("", open_client=store.open_client)) as elsewhere:

        def replace(place: int) -> None:
            if place:
                store.before_read = lambda place: None
                elsewhere.save("a", other)

        store.before_read = replace
        with pytest.raises(SnapshotDamaged):
            tier.load("a", tide.arena)
    tide.discard(other)


def test_child_of_a_fork_leaves_the_client_alone(
    store: FakeStore, tide: Tide, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads are the parent's: a call would wait for ever, and a close would end theirs."""
    tier = MooncakeTier("", open_client=store.open_client)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        for call in (
            lambda: tier.save("a", snapshot),
            lambda: tier.load("a", tide.arena),
            lambda: tier.remove("a"),
            lambda: tier.contains("a"),
        ):
            with pytest.raises(ProcessForked):
                call()
        tier.close()
    assert [False] == [client.is_closed for client in store.clients]
    tier.close()


# ---- memory -------------------------------------------------------------------------------------


def test_an_arenas_memory_is_registered_once(
    tier: MooncakeTier, store: FakeStore, tide: Tide, snapshot: Snapshot
) -> None:
    """A slab stays registered; a head's memory is registered for its call only."""
    for key in "abc":
        tier.save(key, snapshot)
        load(tier, key, tide)
    (client,) = store.clients
    assert [tide.arena.limit_bytes] == list(client.ranges.values())


def test_rooms_that_share_memory_are_registered_together(
    tier: MooncakeTier, store: FakeStore, snapshot: Snapshot
) -> None:
    """Chunks may lie side by side in memory that comes and goes."""
    tier.save("a", snapshot)
    memory = bytearray(sum(snapshot.seal.used_bytes))

    def make_room(seal: Seal) -> list[memoryview]:
        firsts = [sum(seal.used_bytes[:number]) for number in range(len(seal.used_bytes))]
        pairs = zip(firsts, seal.used_bytes, strict=True)
        return [memoryview(memory)[first : first + size] for first, size in pairs]

    tier.get("a", make_room)
    assert memory == b"".join(snapshot.chunks)
    assert 1 == len(store.clients[0].ranges)


# ---- the package --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("ModuleNotFoundError(\"No module named 'mooncake'\")", "pip install 'kvtide[mooncake]'"),
        (
            "ImportError('libibverbs.so.1: cannot open shared object file')",
            "apt install libibverbs1 libnl-3-200 libnl-route-3-200",
        ),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, error: str, remedy: str) -> None:
    """A package that isn't there is one thing, and libraries that it needs are another."""
    (tmp_path / "mooncake.py").write_text(f"raise {error}\n")
    done = subprocess.run(
        [sys.executable, "-c", "from kvtide import MooncakeTier; MooncakeTier('127.0.0.1:1')"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert 1 == done.returncode
    assert remedy in done.stderr


def test_master_that_is_not_there_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes at once, and names the master and what to do."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "store.py").write_text("MooncakeDistributedStore = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"no master at 127\.0\.0\.1:1.*start the master first"):
        MooncakeTier("127.0.0.1:1")
