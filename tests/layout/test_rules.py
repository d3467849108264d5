"""Row rules against naive ones: one id after the other, in plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import LayoutError, SlotError
from kvtide.layout import EveryNth, EveryToken, Mapped, OfRequest, Owned, Rows, Rule, rows_of
from kvtide.snapshot import Seal, ranges_of
from support.values import NO_ROWS, name_of

Pairs = list[tuple[int, int]]
"""(row, the token that it stands for), in order."""


def ids(values: Sequence[int]) -> Any:
    """int64 [id]."""
    return np.array(values, np.int64)


def pairs_of(rows: Rows) -> Pairs:
    """What a rule gave."""
    return list(zip(rows.ids.tolist(), rows.tokens.tolist(), strict=True))


def apply(
    rules: Sequence[Rule], slots: Sequence[int], maps: Any = None, row_count: int = 1 << 40
) -> Pairs:
    """What a chain of rules gives."""
    return pairs_of(rows_of(rules, ids(slots), maps or {}, row_count))


def by_list(values: Sequence[int]) -> Any:
    """A map as the rules are given it."""
    return lambda wanted: ids([values[one] for one in wanted])


distinct = st.lists(st.integers(0, 60), unique=True, max_size=25)


@st.composite
def aligned_runs(draw: st.DrawFn, count: int) -> list[int]:
    """Slots that fill rows of `count` from their first slot on; some rows not to their end."""
    slots: list[int] = []
    for row in draw(st.lists(st.integers(0, 9), unique=True, max_size=7)):
        slots += range(row * count, row * count + draw(st.integers(1, count)))
    return slots


# ---- each rule -----------------------------------------------------------------------------


@given(distinct)
def test_every_token_names_its_own_row(slots: list[int]) -> None:
    """And stands for itself."""
    assert [(slot, at) for at, slot in enumerate(slots)] == apply([EveryToken()], slots)


@given(st.data(), st.integers(1, 8))
def test_every_nth_names_each_row_once(data: st.DataObject, count: int) -> None:
    """With the token at which it begins."""
    slots = data.draw(aligned_runs(count))
    expected: Pairs = []
    for token, slot in enumerate(slots):
        if slot % count == 0:
            expected.append((slot // count, token))
    assert expected == apply([EveryNth(count)], slots)


@given(st.data(), st.integers(2, 8))
def test_row_that_is_not_begun_at_its_first_slot_is_refused(
    data: st.DataObject, count: int
) -> None:
    """It would be whole at the source and in part at the target."""
    slots = data.draw(aligned_runs(count))
    row, within = data.draw(st.integers(20, 30)), data.draw(st.integers(1, count - 1))
    with pytest.raises(SlotError, match=f"slot {row * count + within} at position {len(slots)}"):
        apply([EveryNth(count)], [*slots, row * count + within])


@given(st.integers(2, 8), st.integers(0, 9))
def test_row_with_a_gap_in_it_is_refused(count: int, row: int) -> None:
    """Its slots follow each other."""
    slots = [row * count, row * count + count - 1]
    if count > 2:
        with pytest.raises(SlotError, match="in the middle of a row"):
            apply([EveryNth(count)], slots)
    else:
        assert [(row, 0)] == apply([EveryNth(count)], slots)


@given(distinct, st.sampled_from([-1, 0, 3]), st.randoms(use_true_random=False))
def test_mapped_rows_leave_out_the_holes(slots: list[int], hole: int, random: Any) -> None:
    """And those that stay keep the numbers of their tokens."""
    rows = random.sample(range(hole + 1, hole + 80), 61)
    held = [row if random.random() < 0.6 else random.randint(-5, hole) for row in rows]
    expected = [(held[slot], at) for at, slot in enumerate(slots) if held[slot] > hole]
    assert expected == apply([Mapped("window", hole)], slots, {"window": by_list(held)})


@given(distinct, st.integers(1, 5), st.data())
def test_ranks_share_all_tokens(slots: list[int], world: int, data: st.DataObject) -> None:
    """Each has its own, every token has one rank."""
    owned: list[int] = []
    for rank in range(world):
        found = apply([Owned(rank, world)], slots)
        expected = [(s // world, at) for at, s in enumerate(slots) if s % world == rank]
        assert expected == found
        owned += [token for _, token in found]
    assert sorted(owned) == [*range(len(slots))]


@given(distinct, st.integers(0, 9))
def test_request_has_one_row_whatever_its_tokens(slots: list[int], row: int) -> None:
    """Without any, too."""
    assert [(row, 0)] == apply([OfRequest()], slots, {"request": lambda _: ids([row])})


# ---- chains ---------------------------------------------------------------------------------


@given(distinct, st.integers(1, 4), st.data(), st.randoms(use_true_random=False))
def test_rank_of_a_windowed_pool_is_two_rules(
    slots: list[int], world: int, data: st.DataObject, random: Any
) -> None:
    """The map first, then the share."""
    rank = data.draw(st.integers(0, world - 1))
    held = [row if random.random() < 0.7 else 0 for row in random.sample(range(1, 80), 61)]
    expected: Pairs = []
    for token, slot in enumerate(slots):
        row = held[slot]
        if row > 0 and row % world == rank:
            expected.append((row // world, token))
    rules: list[Rule] = [EveryToken(), Mapped("window", 0), Owned(rank, world)]
    assert expected == apply(rules, slots, {"window": by_list(held)})


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_ratio_and_page_multiply(data: st.DataObject, ratio: int, page: int) -> None:
    """A page of compressed rows stands for all their tokens."""
    slots = data.draw(aligned_runs(ratio * page))
    assert apply([EveryNth(ratio * page)], slots) == apply([EveryNth(ratio), EveryNth(page)], slots)


def test_map_that_is_not_there_is_named() -> None:
    """With those that are."""
    with pytest.raises(SlotError, match=r"no map 'window'; the pool has \['other'\]"):
        apply([Mapped("window")], [1], {"other": by_list([0, 0])})


def test_request_that_is_not_named_is_refused() -> None:
    """Its state isn't any row's."""
    with pytest.raises(SlotError, match="request=ROW"):
        apply([OfRequest()], [1])
    with pytest.raises(SlotError, match=r"each state; name it: request={'state': ROW}"):
        apply([OfRequest("state")], [1], {"request": by_list([0, 0])})


@pytest.mark.parametrize(("row", "count"), [(5, 5), (9, 5)])
def test_row_beyond_the_buffer_is_refused(row: int, count: int) -> None:
    """Whatever the map says."""
    with pytest.raises(SlotError, match=f"token 1 names row {row}, which isn't in 0 … {count - 1}"):
        apply([Mapped("window")], [0, 1], {"window": by_list([0, row])}, row_count=count)


def test_row_that_two_tokens_name_is_refused() -> None:
    """One would overwrite the other."""
    with pytest.raises(SlotError, match="tokens 0 and 2 both name row 4"):
        apply([Mapped("window")], [0, 1, 2], {"window": by_list([4, 3, 4])})


# ---- rows by token --------------------------------------------------------------------------


@given(distinct, distinct)
def test_rows_are_found_by_token(held: list[int], wanted: list[int]) -> None:
    """All of them, or none where one is missing."""
    tokens = sorted(held)
    rows = Rows(ids([100 + token for token in tokens]), ids(tokens))
    found = rows.of_tokens(ids(sorted(wanted)))
    if set(wanted) <= set(held):
        assert found is not None
        assert [100 + token for token in sorted(wanted)] == found.tolist()
    else:
        assert found is None


@given(st.lists(st.integers(0, 300), unique=True).map(sorted))
def test_tokens_come_back_from_their_ranges(tokens: list[int]) -> None:
    """A seal keeps them as few ranges, and loses none."""
    ranges = ranges_of(ids(tokens))
    assert tokens == [token for one in ranges for token in one]
    seal = Seal(b"", "", 0, (ranges,), 1, ())
    assert tokens == seal.tokens_of(0).tolist()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], ()),
        ([7], (range(7, 8),)),
        ([*range(100)], (range(100),)),
        ([*range(3, 40, 4)], (range(3, 40, 4),)),
    ],
)
def test_regular_tokens_are_one_range(tokens: list[int], expected: tuple[range, ...]) -> None:
    """All tokens, a window, every n-th, a rank's share: one range each, however many they are."""
    assert expected == ranges_of(ids(tokens))


@pytest.mark.parametrize("value", [*NO_ROWS, 0], ids=name_of)
def test_a_rule_of_what_is_no_number_is_refused(value: Any) -> None:
    """When it is declared: rows of no slots divide by zero later, and ranks of none own nothing."""
    with pytest.raises(LayoutError, match="EveryNth: count must be an integer from 1"):
        EveryNth(value)
    with pytest.raises(LayoutError, match="Owned: world must be an integer from 1"):
        Owned(0, value)


@pytest.mark.parametrize("rank", [*NO_ROWS, 4], ids=name_of)
def test_a_rank_that_is_not_there_is_refused(rank: Any) -> None:
    """It would own nothing, silently."""
    with pytest.raises(LayoutError, match="Owned: rank"):
        Owned(rank, 4)


@pytest.mark.parametrize("hole", [None, 0.5, "0", True, float("nan")], ids=name_of)
def test_a_hole_that_is_no_number_is_refused(hole: Any) -> None:
    """What leads to a hole is left out of a snapshot."""
    with pytest.raises(LayoutError, match="Mapped: hole"):
        Mapped("window", hole)
