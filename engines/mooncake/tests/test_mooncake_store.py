"""MooncakeTier against a real store that is well."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from cluster import ROOT, Cluster, environment, fill, is_filled
from commands import run, write_prompts

from kvtide.conformance import TierTests
from kvtide.errors import SnapshotMiss, TierFull
from kvtide.seal import Seal, Span
from kvtide.tide import Tide
from kvtide.tier import MooncakeTier, Spill, Tier
from kvtide.tier.mooncake_client import StoreClient

DOCUMENT = (ROOT / "docs" / "mooncake.md").read_text(encoding="utf-8")


class Shared:
    """A client that several tiers have, since it takes a second to close one."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> int:
        """Does nothing."""
        return 0


class TestMooncakeStore(TierTests):
    """The kit; tests/tier/test_mooncake.py damages each byte of a fake."""

    damage_step = 11
    numbers = count()

    @pytest.fixture(autouse=True)
    def _client(self, client: Any) -> None:
        self.client = client

    def make_tier(self) -> MooncakeTier:
        self.prefix = f"kit{next(self.numbers)}"
        return MooncakeTier("", prefix=self.prefix, open_client=self._open)

    def _open(self) -> StoreClient:
        return Shared(self.client)

    def close_tier(self, tier: Tier) -> None:
        assert isinstance(tier, MooncakeTier)
        tier.close()
        self.client.remove_by_regex(f"^{self.prefix}/", True)

    def _object(self, tier: Tier, key: str) -> tuple[str, bytearray]:
        assert isinstance(tier, MooncakeTier)
        name = tier._name_of(key)
        return name, bytearray(self.client.get(name))

    def stored_bytes(self, tier: Tier, key: str) -> int:
        return len(self._object(tier, key)[1])

    def set_stored(self, tier: Tier, key: str, place: int, flip: int) -> None:
        name, content = self._object(tier, key)
        if flip:
            content[place] ^= flip
        else:
            del content[place:]
        assert 0 == self.client.remove(name, True)
        assert not content or 0 == self.client.put(name, bytes(content))


def test_another_process_reads_what_this_one_wrote(
    cluster: Cluster, tier: MooncakeTier, tide: Tide
) -> None:
    """A snapshot outlives its writer; whoever has its key gets it."""
    fill(tide, 7)
    snapshot = tide.offload(range(200))
    tier.save("a", snapshot)
    script = (
        "import sys\n"
        "from kvtide import MooncakeTier\n"
        "rooms = []\n"
        "def make_room(seal):\n"
        "    rooms[:] = [memoryview(bytearray(n)) for n in seal.used_bytes]\n"
        "    return rooms\n"
        "tier = MooncakeTier(sys.argv[1])\n"
        "tier.get('a', make_room)\n"
        "tier.close()\n"
        "print({bytes(room).strip(b'\\7') for room in rooms}, sum(map(len, rooms)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, cluster.address],
        env=environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert f"{{b''}} {200 * 4096}\n" == done.stdout, done.stderr
    tide.discard(snapshot)


def test_a_full_store_gives_up_old_snapshots_whole(tier: MooncakeTier, tide: Tide) -> None:
    """Far more than fits is put; what is got back is right, and the rest is a miss."""
    outcomes = Counter[str]()
    for number in range(300):
        fill(tide, number % 251)
        snapshot = tide.offload(range(256))
        with suppress(TierFull):  # what was written a moment ago isn't given up
            tier.save(str(number), snapshot)
            outcomes["written"] += 1
        tide.discard(snapshot)
    for number in reversed(range(300)):
        try:
            loaded = tier.load(str(number), tide.arena)
        except SnapshotMiss:
            outcomes["misses"] += 1
            assert not tier.contains(str(number))
            continue
        outcomes["hits"] += 1
        assert is_filled(loaded, number % 251)
        tide.discard(loaded)
    assert outcomes["written"] > outcomes["hits"] > 20, outcomes


def test_what_the_store_has_no_room_for_is_refused(
    tier: MooncakeTier,
) -> None:
    """A chunk larger than a node says so, and the store goes on as before."""
    size = 70_000_000
    seal = Seal('{"groups":[]}', "", 0, (), (), size, (Span(0, 0, size, 0),))
    with pytest.raises(TierFull, match="no node has room for 70004736 bytes"):
        tier.put("large", seal, [memoryview(bytearray(size))])
    assert not tier.contains("large")


def test_a_writer_that_dies_leaves_a_whole_snapshot_or_none(
    cluster: Cluster, tier: MooncakeTier, tide: Tide
) -> None:
    """SIGKILL in the midst of a put; a head comes last, so nothing half can be read."""
    script = (
        "import sys, torch\n"
        "from kvtide import GQA, HostArena, MooncakeTier, Pool, Tide, open_device\n"
        "device = open_device('cpu')\n"
        "geometry = GQA.bind(dtype='uint8', token=4, layer=8, head=4, head_dim=64, v_head_dim=64)\n"
        "pool = Pool.create(geometry, device, page_count=64)\n"
        "tide = Tide(pool, HostArena(device, limit_bytes=8 << 20, block_bytes=64 * 4096))\n"
        "tier = MooncakeTier(sys.argv[1])\n"
        "for number in range(10**6):\n"
        "    for buffer in pool.buffers: buffer.fill_(number % 251)\n"
        "    snapshot = tide.offload(range(256))\n"
        "    tier.save(str(number % 20), snapshot)\n"
        "    tide.discard(snapshot)\n"
        "    print(number, flush=True)\n"
    )
    hits = 0
    for turn in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", script, cluster.address],
            env=environment(), stdout=subprocess.PIPE,
        ) as writer:  # fmt: skip
            assert writer.stdout is not None
            for _ in range(20 + turn):
                assert writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
        for key in range(20):
            try:
                loaded = tier.load(str(key), tide.arena)
            except SnapshotMiss:
                continue
            hits += 1
            (value,) = {bytes(chunk)[0] for chunk in loaded.chunks}
            assert value % 20 == key
            assert is_filled(loaded, value)
            tide.discard(loaded)
    assert hits >= 2 * 19


def test_the_store_takes_what_the_arena_has_no_room_for(tier: MooncakeTier, tide: Tide) -> None:
    """Twice the arena's bytes are kept, and each snapshot restores its own."""
    with closing(Spill(tide.arena, [tier])) as spill:
        under = Tide(tide.pool, tide.arena, spill=spill)
        snapshots = []
        for value in range(60):
            fill(tide, value)
            snapshots.append(under.offload(range(256)))
        for value, snapshot in enumerate(snapshots):
            fill(tide, 255)
            under.restore(snapshot, range(256))
            assert all(bool((buffer == value).all()) for buffer in tide.pool.buffers)
        assert spill.stats.spills >= 28
        for snapshot in snapshots:
            under.discard(snapshot)


# ---- the document -------------------------------------------------------------------------------


@pytest.fixture
def started() -> Iterator[None]:
    """Runs the two commands of the document, and ends what they started."""
    (block,) = re.findall(r"```sh\n(mooncake_master.*?)```", DOCUMENT, re.DOTALL)
    commands = block.strip().split("\n\n")
    assert 2 == len(commands)
    running = [
        subprocess.Popen(
            ["/bin/sh", "-c", command],
            env=environment(), stderr=subprocess.DEVNULL, start_new_session=True,
        )
        for command in commands
    ]  # fmt: skip
    yield
    for process in running:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_commands_of_the_document_work(started: None, tide: Tide, tmp_path: Path) -> None:
    """Two commands start a store, the example keeps a snapshot in it, and `kvtide run` its KV."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    names: dict[str, Any] = {"arena": tide.arena, "snapshot": tide.offload(range(100))}
    error: Exception | None = None
    for _ in range(100):
        try:
            exec(compile(code, "docs/mooncake.md", "exec"), names)
            break
        except Exception as again:  # it isn't up yet
            error = again
            time.sleep(0.1)
    else:
        pytest.fail(str(error))
    assert names["snapshot"].seal == names["again"].seal
    for name in ("snapshot", "again"):
        tide.discard(names[name])
    names["tier"].close()
    (command,) = re.findall(r"```sh\n(kvtide run.*?)```", DOCUMENT, re.DOTALL)
    write_prompts(tmp_path)
    words = shlex.split(command.replace("\\\n", ""))[1:]
    done = run(tmp_path, *words, "--model", "tiny-random", "--verify")
    assert 0 == done.returncode, done.stderr
    assert 1 == done.stderr.count(".cpp:"), done.stderr  # Mooncake says less than it would
