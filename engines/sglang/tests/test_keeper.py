"""Keeper moves a request of SGLang out of its slots and into others, or raises the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from requests_of import Place, Req, ReqToTokenPool, keeper_over, raising, same
from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
from sglang.srt.mem_cache import memory_pool

from kvtide.device import Phases
from kvtide.errors import ArenaFull, SlotError, SlotsLost, SnapshotDamaged, SnapshotMiss
from kvtide.plugin import host_memory
from kvtide.plugin.keeper import Keeper
from kvtide.plugin.ranks import Ranks
from kvtide.plugin.refusals import REASONS, DeviceFailed, RankFailed, Refused, StateAhead
from kvtide.plugin.sglang.cases.recurrent_state import CASES as STATE_CASES
from kvtide.plugin.sglang.cases.sliding_window import CASES as WINDOW_CASES
from kvtide.plugin.sglang.rules import LastTokens
from kvtide.plugin.sglang.settings import Settings

TOKEN_BYTES = 3 * 2 * 2 * 16 * 2
"""Layers, keys and values, heads, head_dim, bfloat16."""
SETTINGS = Settings(host_memory_bytes=1 << 20)


class FakeRanks(Ranks):
    """Records what this rank says; `others` are the numbers of other ranks on its host."""

    def __init__(
        self, answer: Callable[[int], int] = lambda value: value, others: Sequence[Any] = ()
    ) -> None:
        super().__init__()
        self.answer = answer
        self.asked: list[int] = []
        self.said: list[int] = []
        self._others = iter(others)

    def least(self, value: int) -> int:
        """Returns the answer of the ranks in step."""
        self.asked.append(value)
        return self.answer(value)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of all ranks, each with the host's id."""
        host, number = numbers
        self.said.append(number)
        return [[host, number], *([host, other] for other in next(self._others, ()))]


@pytest.fixture
def place() -> Place:
    """A pool of three layers, with a row for each token."""
    return Place()


@pytest.fixture
def keeper(place: Place) -> Iterator[Keeper]:
    """A keeper of that pool, with room for all of it."""
    keeper = keeper_over(place.allocator, place.request_pool, [], SETTINGS)
    yield keeper
    keeper.close()
    assert 0 == keeper.arena.used_bytes, "nothing may be left in the arena"


def test_a_request_comes_back_in_other_slots(place: Place, keeper: Keeper) -> None:
    """All bytes are equal, and its part of the arena is free again."""
    req = place.admit("a", seqlen=38)
    expected = place.rows_of(req)
    backup = keeper.save(req)
    assert (37, "a") == (backup.token_count, backup.request_id)
    assert 0 < backup.size_bytes == keeper.arena.used_bytes
    place.poison()
    place.readmit(req)
    keeper.restore(req, backup)
    assert same(expected, place.rows_of(req))
    assert (0, 0) == (backup.size_bytes, keeper.arena.used_bytes)


def test_slots_of_other_requests_do_not_change(place: Place, keeper: Keeper) -> None:
    """Only the rows of the request that comes back change."""
    req, other = place.admit("a", 20), place.admit("b", 30, row=3)
    backup = keeper.save(req)
    before = place.rows_of(other)
    place.readmit(req)
    keeper.restore(req, backup)
    assert same(before, place.rows_of(other))


@pytest.mark.parametrize("seqlen", [1, 2])
def test_the_last_token_has_nothing_to_save(place: Place, keeper: Keeper, seqlen: int) -> None:
    """Its KV is computed in the next step, so a request of one token has none at all."""
    req = place.admit("a", seqlen)
    expected = place.rows_of(req)
    backup = keeper.save(req)
    assert seqlen - 1 == backup.token_count
    place.poison()
    keeper.restore(req, backup)
    assert same(expected, place.rows_of(req))


def test_moves_are_counted(place: Place, keeper: Keeper) -> None:
    """Bytes and seconds are counted in each direction, and followers are called for each move."""
    seen: list[tuple[int, int, int]] = []
    counters = keeper.counters
    keeper.follow(lambda _: seen.append((counters.saves, counters.restores, counters.discards)))
    req, other = place.admit("a", 11), place.admit("b", 5, row=3)
    backup, forgotten = keeper.save(req), keeper.save(other)
    keeper.restore(req, backup)
    keeper.discard(forgotten)
    keeper.discard(forgotten)
    assert [(0, 0, 0), (1, 0, 0), (2, 0, 0), (2, 1, 0), (2, 1, 1)] == seen[:5]
    assert (14 * TOKEN_BYTES, 10 * TOKEN_BYTES) == (counters.saved_bytes, counters.restored_bytes)
    assert counters.save_s > 0
    assert counters.restore_s > 0
    assert TOKEN_BYTES == keeper.token_bytes


def test_a_full_arena_takes_nothing(place: Place) -> None:
    """The request keeps its slots, and the reason is counted."""
    settings = Settings(host_memory_bytes=1000)
    keeper = keeper_over(place.allocator, place.request_pool, [], settings)
    with pytest.raises(ArenaFull, match="0 of 1000 in use"):
        keeper.save(place.admit("a", 40))
    assert Counter(arena_full=1) == keeper.counters.refused_saves
    assert (0, 0) == (keeper.arena.used_bytes, keeper.counters.saves)
    keeper.close()


def test_a_changed_byte_is_found_before_anything_is_written(place: Place, keeper: Keeper) -> None:
    """The backup is discarded, since nobody can use it."""
    req = place.admit("a", 38)
    backup = keeper.save(req)
    backup.snapshot.lease.blocks[0].bytes_view(8)[7] ^= 4
    before = place.rows_of(req)
    with pytest.raises(SnapshotDamaged):
        keeper.restore(req, backup)
    assert same(before, place.rows_of(req))
    assert Counter(damaged=1) == keeper.counters.failed_restores


def test_a_backup_of_another_request_or_length_is_a_miss(place: Place, keeper: Keeper) -> None:
    """Otherwise KV of other tokens would be used for the request."""
    req = place.admit("a", 20)
    backup = keeper.save(req)
    with pytest.raises(SnapshotMiss, match="key"):
        keeper.restore(place.admit("b", 20, row=3), backup)
    backup = keeper.save(req)
    req.seqlen += 1
    place.readmit(req)
    with pytest.raises(SnapshotMiss, match="token count"):
        keeper.restore(req, backup)
    assert Counter(missing=2) == keeper.counters.failed_restores


def test_invalid_slots_are_an_error(place: Place, keeper: Keeper) -> None:
    """The request's row of the table was never filled in."""
    with pytest.raises(SlotError, match="slot -1"):
        keeper.save(Req("a", 20, row=5))
    assert Counter(slots=1) == keeper.counters.refused_saves


def test_a_token_without_a_slot_is_not_saved(place: Place, keeper: Keeper) -> None:
    """SGLang's table has 0 there, the padding slot, which holds other requests' dummy output."""
    req = place.admit("a", 20)
    backup = keeper.save(req)
    table = place.request_pool.req_to_token[req.kv.req_pool_idx]
    table[7] = 0
    before = [buffer.clone() for buffer in (*place.pool.k_buffer, *place.pool.v_buffer)]
    with pytest.raises(SlotError, match="slot 0 at position 7 is padding"):
        keeper.save(req)
    with pytest.raises(SlotError, match="slot 0 at position 7 is padding"):
        keeper.restore(req, backup)
    assert Counter(slots=1) == keeper.counters.refused_saves == keeper.counters.failed_restores
    assert same(before, [*place.pool.k_buffer, *place.pool.v_buffer])


def test_a_recurrent_state_without_a_pool_is_not_dropped(place: Place, keeper: Keeper) -> None:
    """Otherwise the request would come back without its state and answer wrongly."""
    req = place.admit("a", 20)
    backup = keeper.save(req)
    req.kv.mamba_pool_idx = torch.tensor(3)
    with pytest.raises(SlotError, match=r"recurrent state, in row .*3.* none beside MHATokenToKVP"):
        keeper.save(req)
    with pytest.raises(SlotError, match="recurrent state"):
        keeper.restore(req, backup)
    assert Counter(slots=1) == keeper.counters.refused_saves == keeper.counters.failed_restores


@pytest.mark.parametrize("mamba", [0, -1, 99, 1.5, "1"])
def test_an_invalid_row_of_state_is_refused(mamba: Any) -> None:
    """Row 0 is padding, and row -1 would be the last row."""
    built = next(case for case in STATE_CASES if case.name == "MHA beside state, page 1").build()
    request_pool = ReqToTokenPool()
    keeper = keeper_over(built.allocator, request_pool, [], SETTINGS)
    req = Req("a", 14, 1)
    request_pool.place(req, built.allocator.alloc(13))
    req.kv.mamba_pool_idx = torch.tensor(mamba) if isinstance(mamba, int) else mamba
    with pytest.raises(SlotError):
        keeper.save(req)
    assert 0 == keeper.arena.used_bytes
    keeper.close()


def test_a_failing_device_is_an_error_of_kvtide(
    place: Place, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises RuntimeError, which would end the scheduler."""
    req = place.admit("a", 20)
    backup = keeper.save(req)
    failure = raising(RuntimeError("no memory"))
    monkeypatch.setattr("kvtide.tide.Tide.offload", failure)
    monkeypatch.setattr("kvtide.tide.Tide.restore", failure)
    with pytest.raises(DeviceFailed, match="RuntimeError: no memory"):
        keeper.save(req)
    with pytest.raises(DeviceFailed, match="RuntimeError: no memory"):
        keeper.restore(req, backup)
    assert Counter(device=1) == keeper.counters.refused_saves == keeper.counters.failed_restores


def test_slots_lost_in_a_restore_are_counted_and_not_served(
    place: Place, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    """The device failed while it wrote: the request has no KV, and the log has the error."""
    req, other = place.admit("a", 20), place.admit("b", 30, row=3)
    backup, before = keeper.save(req), place.rows_of(other)
    device = keeper.tide.pool.device
    submit = device.submit

    def breaking(phases: Phases[Any], **options: Any) -> Any:
        return submit(lambda: broken(phases()), **options)

    def broken(phases: Iterable[Any]) -> Iterator[Any]:
        for number, phase in enumerate(phases):
            yield (
                [replace(phase[0], issue=raising(OSError("the link is down")))] if number else phase
            )

    device.submit = breaking  # type: ignore[method-assign]
    with pytest.raises(SlotsLost, match="the link is down"):
        keeper.restore(req, backup)
    assert Counter(slots_lost=1) == keeper.counters.failed_restores
    assert (0, 0) == (backup.size_bytes, keeper.counters.restores)
    assert same(before, place.rows_of(other))
    assert "OSError: the link is down" in caplog.text


def test_ranks_save_together_or_not_at_all(place: Place) -> None:
    """A rank asks even after its own failure, since the others wait for the answer."""
    ranks = FakeRanks()
    keeper = keeper_over(place.allocator, place.request_pool, ranks=ranks)
    ranks.asked.clear()
    ranks.answer = lambda value: 0
    with pytest.raises(RankFailed, match="request a: another rank couldn't save"):
        keeper.save(place.admit("a", 20))
    with pytest.raises(SlotError):
        keeper.save(Req("b", 20, row=5))
    assert [1, 0] == ranks.asked
    assert 0 == keeper.arena.used_bytes
    assert Counter(other_rank=1, slots=1) == keeper.counters.refused_saves
    keeper.close()


def test_ranks_restore_together_or_not_at_all(place: Place, keeper: Keeper) -> None:
    """The rows that this rank wrote are useless without the other ranks' share."""
    req = place.admit("a", 20)
    backup = keeper.save(req)
    keeper._ranks = FakeRanks(lambda value: 0)
    with pytest.raises(RankFailed, match="request a: another rank couldn't restore"):
        keeper.restore(req, backup)
    assert Counter(other_rank=1) == keeper.counters.failed_restores


def test_the_limit_is_shared_by_the_ranks_of_a_host(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks divide the set size or a quarter of the free memory, and use the smallest share."""
    ranks = FakeRanks(lambda limit_bytes: limit_bytes // 2, others=[[16 << 20], [64 << 20]] * 2)
    for settings in (Settings(host_memory_bytes=1 << 20, rank_count=4), Settings(rank_count=4)):
        monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: 80 << 20)
        keeper = keeper_over(place.allocator, place.request_pool, [], settings, ranks=ranks)
        assert ranks.asked[-1] // 2 == keeper.arena.limit_bytes
        keeper.close()
    assert [1 << 18, (48 << 20) // 4 // 4] == ranks.asked
    assert [0, 80 << 20] * 2 == ranks.said


def test_a_refused_pool_is_refused_on_all_ranks(place: Place) -> None:
    """Each rank asks once in the same order, whether it refuses the pool itself or not."""
    ranks = FakeRanks(lambda limit_bytes: -1)
    unknown = type("StrangeKVPool", (), {"device": "cpu"})()
    stranger = type("Allocator", (), {"get_kvcache": lambda self: unknown})()
    with pytest.raises(Refused, match="StrangeKVPool isn't known"):
        keeper_over(stranger, place.request_pool, ranks=ranks)
    with pytest.raises(RankFailed, match="MHATokenToKVPool: refused on another rank"):
        keeper_over(place.allocator, place.request_pool, ranks=ranks)
    assert [-1, 1 << 20] == ranks.asked
    assert 4 == len(ranks.said), "what is untouched and what is free, both times"


def test_an_unknown_cache_beside_the_pool_is_refused_by_name(place: Place) -> None:
    """Otherwise a request would come back without the cache's content.

    A decode server's pool may have such a cache, too: its class is another one of the same name.
    """
    rows = memory_pool.ReqToTokenPool(8, 256, "cpu", False)
    for request_pool in (rows, DecodeReqToTokenPool(8, 256, "cpu", False, pre_alloc_size=4)):
        keeper_over(place.allocator, request_pool, [], SETTINGS).close()
        request_pool._aux_cache = object()
        for draft_pools in ([], [place.pool]):
            with pytest.raises(
                Refused, match=r"MHATokenToKVPool: kvtide doesn't know builtins.object"
            ):
                keeper_over(place.allocator, request_pool, draft_pools, SETTINGS)


def test_a_drafts_kv_comes_back_with_the_targets(place: Place) -> None:
    """The draft and the target share their slots."""
    draft = Place(widths=(8, 8))
    keeper = keeper_over(place.allocator, place.request_pool, [draft.pool], SETTINGS)
    assert "" == keeper.draft_refusal
    req = place.admit("a", 20)
    draft.request_pool = place.request_pool
    expected = place.rows_of(req), draft.rows_of(req)
    backup = keeper.save(req)
    place.poison()
    draft.poison()
    place.readmit(req)
    keeper.restore(req, backup)
    assert same(expected[0], place.rows_of(req))
    assert same(expected[1], draft.rows_of(req))
    keeper.close()


def test_a_draft_that_is_refused_is_left_out(place: Place) -> None:
    """Answers stay right without the draft's KV, since the target checks each token."""
    unknown = type("StrangeDraftPool", (), {"device": "cpu"})()
    keeper = keeper_over(place.allocator, place.request_pool, [unknown], SETTINGS)
    assert "StrangeDraftPool isn't known" in keeper.draft_refusal
    assert TOKEN_BYTES == keeper.token_bytes
    keeper.close()


def test_a_window_is_saved_as_far_as_attention_looks_back() -> None:
    """SGLang may give a request that comes back no rows for older tokens that it still had."""
    case = next(case for case in WINDOW_CASES if case.build().window_tokens)
    built, request_pool = case.build(), ReqToTokenPool()
    saved = []
    for window_tokens in (None, built.window_tokens):
        keeper = keeper_over(built.allocator, request_pool, window_tokens=window_tokens)
        rules = [rule for part in keeper.description.parts for rule in part.rules]
        saved.append(any(isinstance(rule, LastTokens) for rule in rules))
        keeper.close()
    assert [False, True] == saved


def test_slots_that_left_the_window_of_all_layers_are_not_read() -> None:
    """SGLang has handed them out again, even to the same request."""
    built = next(case for case in WINDOW_CASES if case.name == "windows alone").build()
    request_pool, pool = ReqToTokenPool(), built.pool
    keeper = keeper_over(built.allocator, request_pool, [], SETTINGS, window_tokens=20)
    slots, others = built.allocator.alloc(30), built.allocator.alloc(30)
    req = Req("a", 41, 1)
    request_pool.place(req, torch.cat([slots[10:20], slots]))
    for probe in built.probes:
        for buffer in probe.buffers:
            buffer.normal_()
    keys = pool.swa_kv_pool.k_buffer[0]
    expected, untouched = keys[slots[10:]].clone(), keys[others[:10]].clone()
    backup = keeper.save(req)
    assert 20 == backup.token_count
    keys[slots] = 777.0
    req.kv.req_pool_idx = 2
    request_pool.place(req, torch.cat([others[:10], others]))
    keeper.restore(req, backup)
    assert expected.equal(keys[others[10:]])
    assert untouched.equal(keys[others[:10]])
    keeper.close()


def test_recurrent_state_is_found_by_its_row() -> None:
    """SGLang gives the row as a tensor of one element."""
    built = next(case for case in STATE_CASES if case.name == "MHA beside state").build()
    request_pool: Any = built.request_pool or ReqToTokenPool()
    keeper = keeper_over(built.allocator, request_pool, [], SETTINGS)
    slots, others = built.allocator.alloc(32), built.allocator.alloc(32)
    req = Req("a", 33, built.sources["request"], built.sources["mamba"])
    request_pool.req_to_token[req.kv.req_pool_idx, :32] = slots.int()
    for probe in built.probes:
        for buffer in probe.buffers:
            buffer.copy_(torch.randn(buffer.shape))
    expected = [probe.read(slots, built.sources) for probe in built.probes]
    backup = keeper.save(req)
    for probe in built.probes:
        for buffer in probe.buffers:
            buffer.fill_(777.0)
    req.kv.req_pool_idx = built.targets["request"]
    req.kv.mamba_pool_idx = torch.tensor(built.targets["mamba"])
    request_pool.req_to_token[req.kv.req_pool_idx, :32] = others.int()
    keeper.restore(req, backup)
    assert same(expected, [probe.read(others, built.targets) for probe in built.probes])
    keeper.close()


def test_a_state_that_is_a_step_ahead_isnt_saved(place: Place) -> None:
    """Its state would continue from the wrong token; without state a step more doesn't matter."""
    built = next(case for case in STATE_CASES if case.name == "MHA beside state").build()
    request_pool: Any = built.request_pool or ReqToTokenPool()
    ahead = keeper_over(built.allocator, request_pool, [], SETTINGS, is_ahead=lambda req: True)
    req = Req("a", 33, built.sources["request"], built.sources["mamba"])
    request_pool.req_to_token[req.kv.req_pool_idx, :32] = built.allocator.alloc(32).int()
    with pytest.raises(StateAhead, match="its recurrent state is a step ahead of its answer"):
        ahead.save(req)
    assert (1, 0) == (ahead.counters.refused_saves["request"], ahead.arena.used_bytes)
    ahead.close()
    stateless = keeper_over(
        place.allocator, place.request_pool, [], SETTINGS, is_ahead=lambda req: True
    )
    assert 32 == stateless.save(place.admit("b", 33)).token_count
    stateless.close()


def test_a_declined_request_counts_as_a_refusal(keeper: Keeper) -> None:
    """Followers of the counters are called."""
    seen: list[int] = []
    keeper.follow(lambda told: seen.append(told.counters.refused_saves["request"]))
    keeper.decline()
    assert [0, 1] == seen
    assert "request" in REASONS
