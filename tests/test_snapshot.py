from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.arena import HostArena
from kvtide.device import CPUDevice
from kvtide.errors import SnapshotDamaged, SnapshotMiss
from kvtide.layout import Layout, Mapped, Plane, Striped
from kvtide.layout.gqa import GQA_HND
from kvtide.layout.mla import MLA_NZ
from kvtide.pool import Pool
from kvtide.seal import Seal
from kvtide.snapshot import Snapshot
from kvtide.ticket import Ticket
from kvtide.tide import Tide
from support.jobs import submit
from support.lazy_device import LazyDevice
from support.pools import (
    fill,
    image_of,
    make_pool,
    poison,
    same_image,
    small_geometry,
    with_rows,
)

SOURCE = (9, 2, 3, 7, 6)
TARGET = (12, 0, 19, 1, 5)
TOKEN_BYTES = 36
WINDOW_OF_SLOTS = Layout("window", Plane("k", "layer page token 3", rows=(Mapped("window", 0),)))
CHUNK_TOKENS = 2


@pytest.fixture(scope="module")
def device() -> Iterator[CPUDevice]:
    """A CPU device of two lanes."""
    device = CPUDevice(lanes=2)
    yield device
    device.close()


@pytest.fixture
def tide(device: CPUDevice) -> Tide:
    """A tide of five pages of random bytes, with blocks of two tokens and five bytes."""
    case = make_pool("created", small_geometry(), device, 5)
    fill(case, 1)
    block_bytes = CHUNK_TOKENS * TOKEN_BYTES + 5
    return Tide(case.pool, HostArena(device, limit_bytes=20 * block_bytes, block_bytes=block_bytes))


@pytest.fixture
def snapshot(tide: Tide) -> Iterator[Snapshot]:
    """A snapshot of five tokens in two full chunks and a partial chunk."""
    snapshot = tide.offload(SOURCE, key="request")
    yield snapshot
    tide.discard(snapshot)


def views(snapshot: Snapshot) -> list[memoryview]:
    """Returns the bytes of each chunk, which can be written."""
    counts = [CHUNK_TOKENS, CHUNK_TOKENS, 1]
    return [
        block.bytes_view(count * TOKEN_BYTES)
        for block, count in zip(snapshot.lease.blocks, counts, strict=True)
    ]


def restored(tide: Tide, snapshot: Snapshot) -> bool:
    """Returns whether a restore succeeds; if not, it must not have changed anything."""
    before = image_of(tide.pool)
    try:
        tide.restore(snapshot, TARGET, key="request")
    except SnapshotDamaged:
        assert same_image(before, image_of(tide.pool)), "damaged, but something was written"
        return False
    return True


def test_every_flipped_bit_is_caught(tide: Tide, snapshot: Snapshot) -> None:
    """Every bit is flipped and the restore writes nothing; flipped back, the snapshot is whole."""
    flips = [
        (view, place, bit)
        for view in views(snapshot)
        for place in range(len(view))
        for bit in range(8)
    ]
    assert 5 * TOKEN_BYTES * 8 == len(flips)
    missed = []
    for view, place, bit in flips:
        view[place] ^= 1 << bit
        if restored(tide, snapshot):
            missed.append((place, bit))
        view[place] ^= 1 << bit
    assert [] == missed
    assert restored(tide, snapshot)


@pytest.mark.parametrize("value", [0x00, 0xFF])
def test_every_overwritten_byte_is_caught(tide: Tide, snapshot: Snapshot, value: int) -> None:
    """A page of zeros may be read in the place of the right bytes."""
    for view in views(snapshot):
        for place in range(len(view)):
            kept, view[place] = view[place], value
            assert (kept == value) == restored(tide, snapshot)
            view[place] = kept


def test_bytes_after_a_chunk_do_not_matter(tide: Tide, snapshot: Snapshot) -> None:
    """The rest of a block belongs to nobody."""
    for block, view in zip(snapshot.lease.blocks, views(snapshot), strict=True):
        rest = block.bytes_view(tide.arena.block_bytes)[len(view) :]
        rest[:] = bytes(len(rest))
    assert restored(tide, snapshot)


@pytest.mark.parametrize(("left", "right"), [(0, 1), (0, 2), (1, 2)])
def test_swapped_blocks_are_caught(tide: Tide, snapshot: Snapshot, left: int, right: int) -> None:
    """Each block is intact, but in the wrong place."""
    blocks = list(snapshot.lease.blocks)
    first, second = blocks[left].bytes_view(72), blocks[right].bytes_view(72)
    first[:], second[:] = bytes(second), bytes(first)
    assert not restored(tide, snapshot)


def test_a_block_of_another_snapshot_is_caught(tide: Tide, snapshot: Snapshot) -> None:
    """The block is intact and has the same length and place, but other tokens."""
    other = tide.offload([0, 1, 4, 5, 8], key="request")
    views(snapshot)[1][:] = views(other)[1]
    tide.discard(other)
    assert not restored(tide, snapshot)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"dtype": "float16"}, "plane 'k': dtype float16 here, bfloat16 there; plane 'v': dtype"),
        ({"head_dim": 3, "v_head_dim": 6}, "'k': head_dim 3 here, 6 there; plane 'v': v_head_dim"),
        ({"layer": 1}, "plane 'k': layer 1 here, 2 there"),
        ({"layer": 1, "head": 2}, "layer 1 here, 2 there; plane 'k': head 2 here, 1 there"),
        ({"first_layer": 2}, "first layer 2 here, 0 there"),
        ({"rank": 1}, "rank 1 here, 0 there"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_pool_of_another_geometry_misses(
    device: CPUDevice, tide: Tide, snapshot: Snapshot, changes: dict[str, Any], line: str
) -> None:
    """A token may have equally many bytes; the difference is named, and nothing is written."""
    geometry = small_geometry(**changes)
    pool = Pool.create(geometry, device, page_count=5)
    before = image_of(pool)
    with pytest.raises(SnapshotMiss, match=f"here: the target, there: the snapshot.*{line}"):
        Tide(pool, tide.arena).restore(snapshot, TARGET, key="request")
    assert same_image(before, image_of(pool))


@pytest.mark.parametrize("key", ["", "other", "request "])
def test_another_key_misses(tide: Tide, snapshot: Snapshot, key: str) -> None:
    """A request never gets another request's KV."""
    before = image_of(tide.pool)
    with pytest.raises(SnapshotMiss, match="key is 'request', the target's"):
        tide.restore(snapshot, TARGET, key=key)
    assert same_image(before, image_of(tide.pool))


@pytest.mark.parametrize("slots", [(), TARGET[:4], (*TARGET, 2)])
def test_another_token_count_misses(tide: Tide, snapshot: Snapshot, slots: tuple[int, ...]) -> None:
    """No part of a snapshot is restored, and no slot stays unwritten."""
    before = image_of(tide.pool)
    with pytest.raises(SnapshotMiss, match=f"token count is 5, the target's {len(slots)}"):
        tide.restore(snapshot, slots, key="request")
    assert same_image(before, image_of(tide.pool))


@pytest.mark.parametrize("slots", [SOURCE, ()])
def test_a_discarded_snapshot_misses(tide: Tide, slots: tuple[int, ...]) -> None:
    """Its memory may belong to another by now; a snapshot of no tokens is refused, too."""
    snapshot = tide.offload(slots)
    tide.discard(snapshot)
    with pytest.raises(SnapshotMiss, match=f"{len(slots)} tokens was discarded already"):
        tide.restore(snapshot, slots)


def test_a_snapshot_states_its_size(tide: Tide, snapshot: Snapshot) -> None:
    """It takes whole blocks, and nothing after it was discarded."""
    assert (5, 3 * tide.arena.block_bytes) == (snapshot.token_count, snapshot.size_bytes)
    tide.discard(snapshot)
    assert (5, 0) == (snapshot.token_count, snapshot.size_bytes)


def test_a_seal_cannot_be_changed(snapshot: Snapshot) -> None:
    """A seal must not change after it was made."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.seal.key = "other"  # type: ignore[misc]
    assert Seal is type(snapshot.seal)


def test_a_damaged_snapshot_stays_for_its_owner(tide: Tide, snapshot: Snapshot) -> None:
    """A failed restore doesn't discard the snapshot: after a repair it can be restored."""
    before = image_of(tide.pool)
    view = views(snapshot)[2]
    view[0] ^= 1
    assert not restored(tide, snapshot)
    view[0] ^= 1
    poison(tide.pool, SOURCE)
    poisoned = image_of(tide.pool)
    assert restored(tide, snapshot)
    assert same_image(with_rows(poisoned, TARGET, before, SOURCE), image_of(tide.pool))


def test_readers_that_have_ended_are_forgotten(tide: Tide, snapshot: Snapshot) -> None:
    """A snapshot that is restored often doesn't grow."""
    for _ in range(20):
        ticket = tide.start_restore(snapshot, TARGET, key="request")
        assert [ticket] == snapshot.readers
        ticket.wait()
        assert [] == snapshot.readers


def test_a_ticket_settles_only_once() -> None:
    """Its result is made once, and each wait returns it."""
    device = LazyDevice()
    made: list[list[int]] = []

    def succeed(results: list[int]) -> int:
        made.append(results)
        return len(made)

    ticket = Ticket(submit(device, [lambda: 7]), succeed=succeed)
    assert (False, False, 1) == (ticket.done(), ticket.settled, device.queued_count)
    assert (1, 1) == (ticket.wait(), ticket.wait())
    assert (True, True, [[7]]) == (ticket.done(), ticket.settled, made)


def test_a_failed_ticket_gives_back_once_and_raises_each_time() -> None:
    """Settling it raises nothing."""
    device = LazyDevice()
    given_back: list[int] = []

    def fail() -> int:
        raise ValueError("of the job")

    ticket = Ticket(
        submit(device, [fail]), succeed=lambda _: None, fail=lambda: given_back.append(1)
    )
    ticket.settle()
    assert ticket.settled
    for _ in range(2):
        with pytest.raises(ValueError, match="of the job"):
            ticket.wait()
    assert [1] == given_back


def test_an_interrupt_does_not_become_the_outcome_of_a_move() -> None:
    """Ctrl-C may come when the job has just ended; later waits raise the job's own error."""
    errors: list[BaseException] = [KeyboardInterrupt(), *(ValueError("of the job"),) * 3]

    class Job:
        def done(self) -> bool:
            return True

        def wait(self) -> None:
            raise errors.pop(0)

    ticket: Ticket[None] = Ticket(Job(), succeed=lambda _: None)
    with pytest.raises((KeyboardInterrupt, ValueError)):
        ticket.wait()
    with pytest.raises(ValueError, match="of the job"):
        ticket.wait()


@pytest.mark.parametrize("item", [lambda: 7, lambda: 1 // 0], ids=["good", "bad"])
def test_a_settled_ticket_keeps_nothing_of_its_move(item: Any) -> None:
    """A caller may keep the ticket for long, but the move's memory must be free."""

    class Held:
        def __call__(self, *_: object) -> None:
            pass

    held = Held()
    kept = weakref.ref(held)
    job = submit(LazyDevice(), [item])
    ticket = Ticket(job, succeed=held, fail=held, forget=held)
    del held
    assert kept() is not None
    ticket.settle()
    assert kept() is None


def test_done_settles_a_ticket_whose_job_has_ended() -> None:
    """A caller that polls `done` needn't wait afterwards."""
    device = LazyDevice()
    ticket = Ticket(submit(device, [lambda: 7]), succeed=lambda results: results)
    device.close()
    assert not ticket.settled
    assert ticket.done()
    assert ticket.settled


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        (range(4, 12), [0, 1, 16, 17, 20, 21, 22, 23], "row of the target begins at token 2"),
        (range(4, 12), [0, 1, 2, 16, 20, 21, 22, 23], "row of the target begins at token 3"),
        (range(4, 12), [0, 1, 16, 17, 18, 19, 20, 21], "token 4"),
        ([4, 5, 8, 9], [12, 13, 14, 15], "token 2"),
        (range(4, 12), [12, 13, 14, 15, 0, 1, 2, 3], None),
        ([4, 5, 8, 9], [12, 13, 0, 1], None),
    ],
)
def test_tokens_that_share_a_row_stay_together(
    device: CPUDevice, source: Any, target: Any, text: str | None
) -> None:
    """The page is the row, so slots that divide tokens otherwise over pages would lose some."""
    geometry = MLA_NZ.bind(dtype="uint8", token=4, layer=1, latent_tile=2, rope_tile=1)
    pool = Pool.create(geometry, device, page_count=6)
    for number in range(6):
        pool.plane("latent", 0)[number] = pool.plane("rope", 0)[number] = number
    tide = Tide(pool, HostArena(device, limit_bytes=1 << 12, block_bytes=512))
    snapshot, before = tide.offload(source), pool.plane("latent", 0).clone()
    if text is None:
        tide.restore(snapshot, target)
    else:
        with pytest.raises(SnapshotMiss, match=text):
            tide.restore(snapshot, target)
    for slot, other in zip(target, source, strict=True):
        expected = before[other // 4] if text is None else before[slot // 4]
        assert expected.equal(pool.plane("latent", 0)[slot // 4])
    tide.discard(snapshot)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        ([2, 3], [], "token 0 holds tokens up to 1 in the snapshot, up to 3 in the target"),
        ([], [2, 3], "token 0 holds tokens up to 3 in the snapshot, up to 1 in the target"),
        ([2, 3], [2, 3], None),
        ([2, 3, 7], [2, 3, 7], None),
    ],
)
def test_a_row_holds_the_same_tokens_here_and_there(
    device: CPUDevice, here: list[int], there: list[int], text: str | None, keeps: bool
) -> None:
    """A page moves whole: bytes after its tokens are another request's."""
    layout = GQA_HND.through("window", Mapped("window"))
    geometry = layout.bind(dtype="uint8", token=4, layer=1, head=2, head_dim=3, v_head_dim=1)
    window = np.arange(40)
    window[here], window[np.array(there, int) + 16] = -1, -1
    pool = Pool.create(
        geometry, device, page_count=10, maps={"window": window}, mapped_rows={"window": 40}
    )
    keys = pool.plane("k", 0)
    keys.copy_(torch.arange(keys.numel(), dtype=torch.uint8).view(keys.shape))
    tide = Tide(pool, HostArena(device, limit_bytes=1 << 12, block_bytes=256))
    snapshot, before = tide.offload(range(8)), keys.clone()
    if text is None or (keeps and not there):
        tide.restore(snapshot, range(16, 24), keep_extra_rows=keeps)
        before[4:6] = before[:2]
    else:
        with pytest.raises(SnapshotMiss, match=text):
            tide.restore(snapshot, range(16, 24), keep_extra_rows=keeps)
    assert before.equal(keys)
    tide.discard(snapshot)


def test_pages_before_the_first_token_are_kept_if_the_caller_says_so(
    device: CPUDevice,
) -> None:
    """The target's window begins a page earlier."""
    geometry = GQA_HND.through("window", Mapped("window")).bind(
        dtype="uint8", token=4, layer=1, head=2, head_dim=3, v_head_dim=1
    )
    window = np.arange(40)
    window[:4] = -1
    pool = Pool.create(
        geometry, device, page_count=10, maps={"window": window}, mapped_rows={"window": 40}
    )
    keys = pool.plane("k", 0)
    keys.copy_(torch.arange(keys.numel(), dtype=torch.uint8).view(keys.shape))
    tide = Tide(pool, HostArena(device, limit_bytes=1 << 12, block_bytes=256))
    snapshot, before = tide.offload(range(8)), keys.clone()
    with pytest.raises(SnapshotMiss, match="a row for token 0 of 8"):
        tide.restore(snapshot, range(16, 24))
    assert before.equal(keys)
    tide.restore(snapshot, range(16, 24), keep_extra_rows=True)
    before[5] = before[1]
    assert before.equal(keys)
    tide.discard(snapshot)


def test_a_hostile_seal_without_last_tokens_is_damaged(device: CPUDevice) -> None:
    """Its geometry says that pages are rows, but not where the tokens of each end."""
    geometry = GQA_HND.bind(dtype="uint8", token=4, layer=1, head=2, head_dim=3, v_head_dim=1)
    pool = Pool.create(geometry, device, page_count=6)
    tide = Tide(pool, HostArena(device, limit_bytes=1 << 12, block_bytes=256))
    snapshot = tide.offload(range(8))
    snapshot.seal = dataclasses.replace(snapshot.seal, lasts=((),))
    for target in (range(8, 16), [*range(8, 11), *range(12, 17)]):
        with pytest.raises((SnapshotDamaged, SnapshotMiss)):
            tide.restore(snapshot, target)
    tide.discard(snapshot)


@pytest.mark.parametrize("world", [1, 2])
def test_rows_that_a_snapshot_lacks_are_kept_if_the_caller_says_so(
    device: CPUDevice, world: int
) -> None:
    """They hold another request's bytes: a restore refuses them, unless its caller allows it."""
    layout = GQA_HND.through("window", Mapped("window", hole=0), Striped(0, world))
    geometry = layout.bind(dtype="uint8", token=4, layer=1, head=2, head_dim=3, v_head_dim=1)
    window = np.arange(world * 4, world * 36)
    maps = {"window": window}
    pool = Pool.create(
        geometry, device, page_count=8 * world, maps=maps, mapped_rows={"window": 36 * world}
    )
    tide = Tide(pool, HostArena(device, limit_bytes=1 << 12, block_bytes=256))
    keys = pool.plane("k", 0)
    keys.copy_(torch.arange(keys.numel()).view(keys.shape))
    page = 4 * world
    window[page : 2 * page] = 0
    snapshot, before = tide.offload(range(3 * page)), keys.clone()
    target = range(3 * page, 6 * page)
    for restore in (tide.restore, tide.start_restore):
        with pytest.raises(SnapshotMiss, match=f"a row for token {page} of {3 * page}, the snap"):
            restore(snapshot, target)
        assert before.equal(keys)
    tide.restore(snapshot, target, keep_extra_rows=True)
    expected = before.clone()
    expected[4], expected[6] = before[1], before[3]
    assert expected.equal(keys)
    tide.discard(snapshot)


def test_an_error_of_a_signal_handler_is_not_the_jobs() -> None:
    """It ends only the wait: the move still owns its memory, and has a result later."""
    freed: list[int] = []
    device = LazyDevice()
    job = submit(device, [lambda: 7])
    ticket = Ticket(job, succeed=lambda results: results, fail=lambda: freed.append(1))

    def broken_off(_: object) -> None:
        raise TimeoutError("of an alarm")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(job), "wait", broken_off)
        with pytest.raises(TimeoutError):
            ticket.wait()
    assert (False, []) == (ticket.settled, freed)
    assert ([7], []) == (ticket.wait(), freed)


@settings(max_examples=200)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.data())
def test_a_restore_without_an_error_wrote_every_row_of_its_target(
    device: CPUDevice, held: list[bool], data: st.DataObject
) -> None:
    """Tokens may have left the window at either end: all rows are the snapshot's, or none."""
    count = len(held)
    other = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    keeps = data.draw(st.booleans())
    window = np.array([0, *(row * is_held for row, is_held in enumerate([*held, *other], 1))])
    pool = Pool.create(
        WINDOW_OF_SLOTS.bind(dtype="uint8", layer=1), device, page_count=2 * count + 1,
        maps={"window": window}, mapped_rows={"window": 2 * count + 1},
    )  # fmt: skip
    tide = Tide(pool, HostArena(device, limit_bytes=1 << 12, block_bytes=8))
    rows = pool.plane("k", 0)
    rows.copy_(torch.arange(rows.numel(), dtype=torch.uint8).view(rows.shape))
    snapshot, before = tide.offload(range(1, count + 1)), rows.clone()
    lacks = any(here and not there for here, there in zip(held, other, strict=True))
    extra = any(there and not here for here, there in zip(held, other, strict=True))
    expected = before.clone()
    try:
        tide.restore(snapshot, range(count + 1, 2 * count + 1), keep_extra_rows=keeps)
    except SnapshotMiss:
        assert lacks or (extra and not keeps)
    else:
        assert not lacks
        assert keeps or not extra
        for token in (token for token in range(count) if held[token]):
            expected[count + 1 + token] = before[1 + token]
    finally:
        tide.discard(snapshot)
    assert expected.equal(rows)
