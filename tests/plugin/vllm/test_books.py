"""The scheduler's books of blocks: who is here, who comes, who leaves."""

from __future__ import annotations

from collections import Counter

import pytest

from kvtide.plugin.vllm.books import Asker, BlockBooks, BlockPlace
from kvtide.plugin.vllm.messages import BlockReport, Start

A, B, C = b"a", b"b", b"c"


def opened(
    block_count: int, *, rank_count: int = 1, names: str = "", tier_blocks: int = 8
) -> BlockBooks:
    """Books with room for `block_count` blocks, whose keys are the names of `names`."""
    books = BlockBooks(rank_count)
    books.open(Start(block_count, frozenset(names.split()), tier_blocks), bytes.decode)
    return books


def save(books: BlockBooks, *keys: bytes) -> list[bytes]:
    """Saves blocks, and gives those that are here now."""
    books.begin_save(keys)
    return books.end_save(keys)


def place_of(books: BlockBooks, key: bytes) -> BlockPlace:
    """What a request of its own is told of a block."""
    return books.look_up(key, Asker())


def step(books: BlockBooks, count: int = 1) -> None:
    """Goes some steps of the scheduler on."""
    for _ in range(count):
        books.end_step()


class TestSaves:
    def test_makes_room_by_what_was_used_least_recently(self) -> None:
        books = opened(2, tier_blocks=0)
        save(books, A, B)
        place_of(books, A)
        step(books, 2)

        assert [C] == books.begin_save([C])
        assert [B] == books.take_orders().forget
        assert BlockPlace.SAVING is place_of(books, C)

    def test_takes_the_first_where_not_all_have_room(self) -> None:
        books = opened(1)

        assert [A] == books.begin_save([A, B, C])

    def test_never_drives_out_what_is_offered_with_it(self) -> None:
        books = opened(1)
        save(books, A)

        assert [] == books.begin_save([A, B])
        assert BlockPlace.HERE is place_of(books, A)

    def test_that_a_worker_lost_is_nowhere(self) -> None:
        books = opened(2, tier_blocks=0)
        books.begin_save([A, B])
        books.note(BlockReport(lost={B}))

        assert [A] == books.end_save([A, B])
        assert BlockPlace.NOWHERE is place_of(books, B)

    def test_of_a_block_that_comes_takes_its_place(self) -> None:
        """The request computed it because the block before is gone; the tier's may be damaged."""
        books = opened(1, names="a")
        place_of(books, A)

        assert [A] == books.begin_save([A])
        assert [A] == books.take_orders().forget
        books.note(BlockReport(missing={A}))
        assert [A] == books.end_save([A])
        assert not books.is_waiting


class TestLoads:
    def test_keep_their_blocks_until_they_end(self) -> None:
        books = opened(1, tier_blocks=0)
        save(books, A)
        books.begin_load([A])
        step(books, 3)
        assert [] == books.begin_save([B])

        books.end_load([A])
        assert [B] == books.begin_save([B])

    def test_that_failed_lose_the_blocks_that_are_bad(self) -> None:
        books = opened(2, tier_blocks=0)
        save(books, A, B)
        books.begin_load([A, B])
        books.note(BlockReport(lost={A}))
        books.end_load([A, B])

        assert BlockPlace.NOWHERE is place_of(books, A)
        assert BlockPlace.HERE is place_of(books, B)
        assert [A] == books.take_orders().forget


class TestFetches:
    def test_begin_for_what_an_earlier_process_left(self) -> None:
        books = opened(2, names="a")

        assert BlockPlace.COMING is place_of(books, A)
        assert BlockPlace.NOWHERE is place_of(books, B)
        assert [A] == books.take_orders().fetch
        assert books.is_waiting

    def test_end_when_all_ranks_have_the_block(self) -> None:
        books = opened(2, rank_count=2, names="a")
        place_of(books, A)
        books.note(BlockReport(fetched=Counter([A])))
        assert BlockPlace.COMING is place_of(books, A)

        books.note(BlockReport(fetched=Counter([A])))
        assert BlockPlace.HERE is place_of(books, A)
        assert books.came_from_tier(A)

    @pytest.mark.parametrize("was_saved_here", [False, True])
    def test_that_find_nothing_are_not_begun_again(self, was_saved_here: bool) -> None:
        books = opened(1, names="a")
        if was_saved_here:
            save(books, A)
            save(books, B)
        assert BlockPlace.COMING is place_of(books, A)
        books.note(BlockReport(missing={A}))

        assert BlockPlace.NOWHERE is place_of(books, A)
        books.take_orders()
        assert not books.is_waiting

    def test_do_not_drive_out_blocks_that_the_same_request_waits_for(self) -> None:
        """A request with more blocks than there is room for gets the first, and isn't stuck."""
        books = opened(1, names="a b")
        for _ in range(3):
            assert BlockPlace.COMING is place_of(books, A)
            assert BlockPlace.NOWHERE is place_of(books, B)
            step(books)
        books.note(BlockReport(fetched=Counter([A])))

        assert BlockPlace.HERE is place_of(books, A)
        assert BlockPlace.NOWHERE is place_of(books, B)

    def test_of_what_left_host_memory_begin_while_a_tier_may_have_it(self) -> None:
        books = opened(1)
        save(books, A)
        save(books, B)

        step(books, 2)
        assert BlockPlace.COMING is place_of(books, A)

    def test_are_remembered_for_as_many_blocks_as_the_tier_holds(self) -> None:
        books = opened(1, tier_blocks=1)
        save(books, A)
        save(books, B)
        step(books, 2)

        assert BlockPlace.NOWHERE is place_of(books, A)


class TestWaiting:
    def test_ends_with_the_last_block_that_a_request_was_told_to_wait_for(self) -> None:
        books, asker = opened(3, rank_count=1, names="a b"), Asker()
        for key in (A, B):
            books.look_up(key, asker)
        assert books.must_wait(asker)
        assert not books.must_wait(Asker())

        books.note(BlockReport(fetched=Counter([A])))
        assert books.must_wait(asker)
        books.note(BlockReport(fetched=Counter([B])))
        assert not books.must_wait(asker)

    def test_ends_for_a_block_that_no_tier_has(self) -> None:
        books, asker = opened(1, names="a"), Asker()
        books.look_up(A, asker)
        books.note(BlockReport(missing={A}))

        assert not books.must_wait(asker)

    def test_keeps_the_blocks_that_came_first(self) -> None:
        books, asker = opened(2, names="a b c"), Asker()
        for key in (A, B):
            books.look_up(key, asker)
        books.note(BlockReport(fetched=Counter([A])))
        for _ in range(3):
            step(books)
            assert books.must_wait(asker)

        assert BlockPlace.NOWHERE is place_of(books, C)
        assert BlockPlace.HERE is books.look_up(A, asker)


class TestClear:
    def test_leaves_nothing_to_be_found(self) -> None:
        books = opened(2, names="c")
        save(books, A)
        books.begin_load([A])
        place_of(books, C)
        books.clear()

        assert 1 == books.take_orders().reset_number == books.reset_number
        assert [BlockPlace.NOWHERE] * 2 == [place_of(books, key) for key in (A, C)]
        books.end_load([A])
        books.note(BlockReport(fetched=Counter([C])))
        assert not len(books)
        assert not books.is_waiting
