"""Chunks of vLLM's own host memory: to a tier and back, and what goes wrong on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvtide.plugin.vllm.chunks import ChunkMoves, EndedChunks
from kvtide.plugin.vllm.timely import TimelyJob, TimelyThreads
from kvtide.seal import Seal
from kvtide.snapshot import MakeRoom
from kvtide.tier import DiskTier, Tier

ROW, POISON = 5000, 0x5A
KEYS = (b"a", b"b", b"c")


@contextmanager
def opened(tier: Tier, *, deadline_s: float = 60) -> Iterator[ChunkMoves]:
    """Moves of rows to a tier."""
    readers, writers = (TimelyThreads(2, deadline_s) for _ in range(2))
    moves = ChunkMoves(tier, ROW, readers, writers)
    yield moves
    moves.close()


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """A disk tier with room for all."""
    tier = DiskTier(tmp_path / "kv", limit_bytes=1 << 20)
    yield tier
    tier.close()


def rows(memory: bytearray) -> list[tuple[bytes, str, memoryview]]:
    """A row of vLLM's memory for each key."""
    view = memoryview(memory)
    return [
        (key, f"name {key.decode()}", view[number * ROW : (number + 1) * ROW])
        for number, key in enumerate(KEYS)
    ]


def ended(moves: ChunkMoves) -> EndedChunks:
    """The only move, once it has ended."""
    moves.drain()
    (found,) = moves.take_ended()
    return found


def jobs_of(moves: ChunkMoves, job_id: int) -> list[TimelyJob[bool]]:
    """The calls of a move; each has ended when its thread can't write any more."""
    return [job for job in moves._moves[job_id].jobs if job is not None]


def filled() -> bytearray:
    """Memory with other bytes in each row."""
    return bytearray(number * 7 % 251 for number in range(len(KEYS) * ROW))


class TestChunkMoves:
    def test_give_every_byte_back(self, tier: DiskTier) -> None:
        source, target = filled(), bytearray([POISON]) * (len(KEYS) * ROW)
        with opened(tier) as moves:
            moves.store(1, rows(source))
            assert ended(moves).moved == KEYS
            moves.load(2, rows(target))
            found = ended(moves)

        assert ((), len(KEYS) * ROW) == (found.missed, found.size_bytes)
        assert source == target

    def test_count_what_the_tier_has_already_as_moved_and_not_as_written(
        self, tier: DiskTier
    ) -> None:
        with opened(tier) as moves:
            moves.store(1, rows(filled())[:2])
            ended(moves)
            moves.store(2, rows(filled()))
            assert KEYS == ended(moves).moved
            assert 3 == moves.take_counts()["written_blocks"]

    def test_leave_a_row_alone_whose_chunk_is_damaged_or_missing(
        self, tier: DiskTier, tmp_path: Path
    ) -> None:
        source, target = filled(), bytearray([POISON]) * (len(KEYS) * ROW)
        with opened(tier) as moves:
            moves.store(1, rows(source)[:2])
            ended(moves)
            path = sorted((tmp_path / "kv").rglob("*.safetensors"))[0]
            content = bytearray(path.read_bytes())
            content[-4096] ^= 1
            path.write_bytes(content)
            moves.load(2, rows(target))
            found = ended(moves)
            counts = moves.take_counts()

        assert 1 == len(found.moved)
        assert (1, 1) == (counts["damaged_blocks"], counts["missing_blocks"])
        for (key, _, wanted), (_, _, row) in zip(rows(source), rows(target), strict=True):
            expected = wanted if key in found.moved else bytes([POISON]) * ROW
            assert expected == row

    def test_that_come_too_late_write_into_no_row(self, tier: DiskTier) -> None:
        source, target = filled(), bytearray([POISON]) * (len(KEYS) * ROW)
        with opened(tier) as moves:
            moves.store(1, rows(source))
            ended(moves)
        now, hanging = [0.0], HangingTier(tier)
        readers, writers = (TimelyThreads(2, 60, lambda: now[0]) for _ in range(2))
        moves = ChunkMoves(hanging, ROW, readers, writers)
        moves.load(2, rows(target)[:1])
        jobs = jobs_of(moves, 2)
        hanging.wait_for(1)
        now[0] = 61
        (found,) = moves.take_ended()
        hanging.goes_on.set()
        assert readers.wait(jobs, 60)
        moves.close()

        assert ((), KEYS[:1]) == (found.moved, found.missed)
        assert {POISON} == set(target)

    def test_that_are_drained_write_into_no_row_any_more(self, tier: DiskTier) -> None:
        """vLLM resets its cache then, and gives the rows away before it asks for ends."""
        source, target = filled(), bytearray([POISON]) * (len(KEYS) * ROW)
        with opened(tier) as moves:
            moves.store(1, rows(source))
            ended(moves)
        hanging = HangingTier(tier)
        with opened(hanging, deadline_s=0.05) as moves:
            moves.load(2, rows(target)[:1])
            jobs = jobs_of(moves, 2)
            moves.drain()
            hanging.goes_on.set()
            assert moves._readers.wait(jobs, 60)
            assert {POISON} == set(target)

    def test_that_were_drained_and_hang_cost_the_next_nothing(self, tier: DiskTier) -> None:
        """Nobody waits for their calls any more, which keep the threads all the same."""
        now, hanging = [0.0], HangingTier(tier)
        readers, writers = (TimelyThreads(2, 0.05, lambda: now[0]) for _ in range(2))
        moves = ChunkMoves(hanging, ROW, readers, writers)
        moves.store(1, rows(filled())[:1])
        hanging.wait_for(1)
        assert KEYS[:1] == ended(moves).missed
        now[0] = 61
        moves.store(2, rows(filled()))
        assert [KEYS] == [found.missed for found in moves.take_ended()]
        hanging.goes_on.set()
        moves.close()

    def test_that_go_on_too_late_put_no_other_chunk_under_a_name(self, tier: DiskTier) -> None:
        """One waits for the tier's answer, and the others for a thread, while the rows change."""
        source = filled()
        hanging = HangingTier(tier)
        with opened(hanging, deadline_s=0.05) as moves:
            moves.store(1, rows(source))
            jobs = jobs_of(moves, 1)
            found = ended(moves)
            source[:] = bytes([POISON]) * len(source)
            hanging.goes_on.set()
            assert moves._writers.wait(jobs, 60)
            assert not any(job.result_or(False) for job in jobs)
        target = bytearray(len(source))
        with opened(tier) as moves:
            moves.load(3, rows(target))
            back = ended(moves)

        assert ((), KEYS) == (found.moved, found.missed)
        assert (KEYS, {0}) == (back.missed, set(target))

    def test_fail_without_waiting_where_a_call_hangs_already(self, tier: DiskTier) -> None:
        """Other rows of the same move, and those of the next, cost no further deadline."""
        now, hanging = [0.0], HangingTier(tier)
        readers, writers = (TimelyThreads(2, 60, lambda: now[0]) for _ in range(2))
        moves = ChunkMoves(hanging, ROW, readers, writers)
        moves.store(1, rows(filled()))
        hanging.wait_for(2)
        assert [] == moves.take_ended()
        now[0] = 61
        assert [KEYS] == [found.missed for found in moves.take_ended()]
        moves.store(2, rows(filled()))
        assert [KEYS] == [found.missed for found in moves.take_ended()]
        hanging.goes_on.set()
        moves.close()

    def test_of_another_size_are_missing(self, tier: DiskTier) -> None:
        source = filled()
        with opened(tier) as moves:
            moves.store(1, rows(source))
            ended(moves)
        readers, writers = (TimelyThreads(1, 60) for _ in range(2))
        narrow = ChunkMoves(tier, ROW - 1, readers, writers)
        target = bytearray([POISON]) * ROW
        narrow.load(1, [(KEYS[0], "name a", memoryview(target)[: ROW - 1])])
        found = ended(narrow)
        narrow.close()

        assert KEYS[:1] == found.missed
        assert {POISON} == set(target)


class HangingTier(Tier):
    """A tier that reads, and says what it has, only after an event."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.goes_on = threading.Event()
        self._begun = threading.Semaphore(0)

    def wait_for(self, count: int) -> None:
        """Blocks until so many calls have begun."""
        for _ in range(count):
            self._begun.acquire()

    def contains(self, key: str) -> bool:
        """See Tier."""
        self._begun.release()
        self.goes_on.wait(60)
        return self._tier.contains(key)

    def put(self, key: str, seal: Seal, chunks: Sequence[memoryview]) -> None:
        """See Tier."""
        self._tier.put(key, seal, chunks)

    def get(self, key: str, make_room: MakeRoom) -> Seal:
        """See Tier."""
        self._begun.release()
        self.goes_on.wait(60)
        return self._tier.get(key, make_room)

    def remove(self, key: str) -> None:
        """See Tier."""
        with suppress(AssertionError):
            raise AssertionError("nobody removes")
