"""Row rules give what plain loops give, which take one id after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import LayoutError, SlotError
from kvtide.layout import (
    Counts,
    EveryNth,
    EveryToken,
    Mapped,
    OfRequest,
    Rows,
    Rule,
    Striped,
    apply_rules,
)
from kvtide.seal import Seal, ranges_of
from support.values import NO_ROWS, name_of

Pairs = list[tuple[int, int]]
"""(row, the token that it stands for), in order."""


def ids(values: Sequence[int]) -> Any:
    """Makes int64 [id]."""
    return np.array(values, np.int64)


def pairs_of(rows: Rows) -> Pairs:
    """Lists the rows and tokens that a rule gave."""
    return list(zip(rows.ids.tolist(), rows.tokens.tolist(), strict=True))


def apply(
    rules: Sequence[Rule], slots: Sequence[int], maps: Any = None, row_count: int = 1 << 40
) -> Pairs:
    """Applies a chain of rules."""
    return pairs_of(apply_rules(rules, ids(slots), maps or {}, row_count))


def by_list(values: Sequence[int]) -> Any:
    """Makes a map in the form that rules are given."""
    return lambda wanted: ids([values[number] for number in wanted])


distinct = st.lists(st.integers(0, 60), unique=True, max_size=25)


@st.composite
def aligned_runs(draw: st.DrawFn, count: int) -> list[int]:
    """Draws slots that fill rows of `count` from their first slot on; some rows aren't full."""
    slots: list[int] = []
    for row in draw(st.lists(st.integers(0, 9), unique=True, max_size=7)):
        slots += range(row * count, row * count + draw(st.integers(1, count)))
    return slots


# ---- each rule -----------------------------------------------------------------------------


@given(distinct)
def test_every_token_has_its_own_row(slots: list[int]) -> None:
    """The row has the slot's number and stands for the token."""
    assert [(slot, token) for token, slot in enumerate(slots)] == apply([EveryToken()], slots)


@given(st.data(), st.integers(1, 8))
def test_every_nth_names_each_row_once(data: st.DataObject, count: int) -> None:
    """The row stands for the token at which it begins."""
    slots = data.draw(aligned_runs(count))
    expected: Pairs = []
    for token, slot in enumerate(slots):
        if slot % count == 0:
            expected.append((slot // count, token))
    assert expected == apply([EveryNth(count)], slots)


@given(st.data(), st.integers(2, 8))
def test_row_that_does_not_begin_at_its_first_slot_is_refused(
    data: st.DataObject, count: int
) -> None:
    """The row would be complete at the source and partial at the target."""
    slots = data.draw(aligned_runs(count))
    row, within = data.draw(st.integers(20, 30)), data.draw(st.integers(1, count - 1))
    with pytest.raises(SlotError, match=f"slot {row * count + within} at position {len(slots)}"):
        apply([EveryNth(count)], [*slots, row * count + within])


@given(st.integers(2, 8), st.integers(0, 9))
def test_row_with_a_gap_is_refused(count: int, row: int) -> None:
    """The slots of a row must follow each other."""
    slots = [row * count, row * count + count - 1]
    if count > 2:
        with pytest.raises(SlotError, match="in the middle of a row"):
            apply([EveryNth(count)], slots)
    else:
        assert [(row, 0)] == apply([EveryNth(count)], slots)


@given(distinct, st.sampled_from([-1, 0, 3]), st.randoms(use_true_random=False))
def test_mapped_rows_leave_out_the_holes(slots: list[int], hole: int, random: Any) -> None:
    """The rows that remain keep the numbers of their tokens."""
    rows = random.sample(range(hole + 1, hole + 80), 61)
    held = [row if random.random() < 0.6 else random.randint(-5, hole) for row in rows]
    expected = [(held[slot], token) for token, slot in enumerate(slots) if held[slot] > hole]
    assert expected == apply([Mapped("window", hole)], slots, {"window": by_list(held)})


@st.composite
def slots_in_their_tokens_places(draw: st.DrawFn, turns: int) -> list[int]:
    """Draws slots as an allocator gives them to ranks in turn: slot % turns == token % turns."""
    rounds = draw(st.lists(st.integers(0, 12), unique=True, max_size=25))
    return [turn * turns + token % turns for token, turn in enumerate(rounds)]


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_ranks_share_all_tokens(world: int, run: int, data: st.DataObject) -> None:
    """Each rank has its rows, every token has one rank, and row_count covers all rows."""
    slots = data.draw(slots_in_their_tokens_places(world * run))
    shared: list[int] = []
    for rank in range(world):
        rule = Striped(rank, world, run)
        expected = [
            (s // (world * run) * run + s % run, token)
            for token, s in enumerate(slots)
            if s // run % world == rank
        ]
        assert expected == apply(
            [rule], slots, row_count=rule.row_count(13 * world * run, Counts())
        )
        shared += [token for _, token in expected]
    assert sorted(shared) == [*range(len(slots))]


@given(st.integers(2, 5), st.integers(1, 3), st.data())
def test_a_slot_in_the_place_of_another_rank_is_refused(
    world: int, run: int, data: st.DataObject
) -> None:
    """Its bytes would be on one rank now, and be looked for on another later."""
    slots = data.draw(slots_in_their_tokens_places(world * run))
    astray = len(slots) + data.draw(st.integers(1, world * run - 1)) + 20 * world * run
    with pytest.raises(SlotError, match=f"token {len(slots)} has slot {astray}"):
        apply([Striped(0, world, run)], [*slots, astray])


@given(distinct, st.integers(0, 9))
def test_request_has_one_row_for_any_tokens(slots: list[int], row: int) -> None:
    """A request without tokens has the row, too."""
    assert [(row, 0)] == apply([OfRequest()], slots, {"request": lambda _: ids([row])})


# ---- chains ---------------------------------------------------------------------------------


@given(distinct, st.integers(1, 4), st.data(), st.randoms(use_true_random=False))
def test_rank_of_a_windowed_pool_has_two_rules(
    slots: list[int], world: int, data: st.DataObject, random: Any
) -> None:
    """The map comes first, then the rank's share of the map's rows."""
    rank = data.draw(st.integers(0, world - 1))
    rounds = random.sample(range(1, 80), len(slots))
    held = dict.fromkeys(range(61), 0)
    for token, slot in enumerate(slots):
        if random.random() < 0.7:
            held[slot] = rounds[token] * world + token % world
    expected = [
        (held[slot] // world, token)
        for token, slot in enumerate(slots)
        if held[slot] and held[slot] % world == rank
    ]
    rules: list[Rule] = [EveryToken(), Mapped("window", 0), Striped(rank, world)]
    assert expected == apply(rules, slots, {"window": by_list([held[slot] for slot in range(61)])})


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_ratio_and_page_multiply(data: st.DataObject, ratio: int, page: int) -> None:
    """A page of compressed rows holds all tokens of these rows."""
    slots = data.draw(aligned_runs(ratio * page))
    assert apply([EveryNth(ratio * page)], slots) == apply([EveryNth(ratio), EveryNth(page)], slots)


def test_unknown_map_is_named() -> None:
    """The error lists the known maps, too."""
    with pytest.raises(SlotError, match=r"no map 'window'; the pool has \['other'\]"):
        apply([Mapped("window")], [1], {"other": by_list([0, 0])})


def test_missing_row_of_the_request_is_refused() -> None:
    """A request's state has no row unless the caller names it."""
    with pytest.raises(SlotError, match="request=ROW"):
        apply([OfRequest()], [1])
    with pytest.raises(SlotError, match=r"each state; name it: request={'state': ROW}"):
        apply([OfRequest("state")], [1], {"request": by_list([0, 0])})


@pytest.mark.parametrize(("row", "count"), [(5, 5), (9, 5)])
def test_row_beyond_the_buffer_is_refused(row: int, count: int) -> None:
    """A map may give any number, so each is checked."""
    with pytest.raises(SlotError, match=f"token 1 names row {row}, which isn't in 0 … {count - 1}"):
        apply([Mapped("window")], [0, 1], {"window": by_list([0, row])}, row_count=count)


def test_row_that_two_tokens_name_is_refused() -> None:
    """One token would overwrite the other."""
    with pytest.raises(SlotError, match="tokens 0 and 2 both name row 4"):
        apply([Mapped("window")], [0, 1, 2], {"window": by_list([4, 3, 4])})


# ---- what a rule says about itself ----------------------------------------------------------

KNOWN = Counts(request_count=5, mapped_rows={"window": 17})


@pytest.mark.parametrize(
    ("rule", "row_count", "tokens_per_row", "unit", "is_dense"),
    [
        (EveryToken(), 24, 1, "token", True),
        (EveryNth(1), 24, 1, "token", True),
        (EveryNth(5), 5, 5, "page", True),
        (Mapped("window"), 17, 1, "token", False),
        (Mapped("other"), 0, 1, "token", False),
        (Striped(1, 5), 5, 1, "token", False),
        (Striped(1, 5, run=2), 6, 1, "token", False),
        (OfRequest("state"), 5, 0, "request", False),
    ],
    ids=str,
)
def test_a_rule_answers_for_itself(
    rule: Rule, row_count: int, tokens_per_row: int, unit: str, is_dense: bool
) -> None:
    """For 24 slots: how many rows there are, how many tokens share one, and what a row is."""
    found = (rule.row_count(24, KNOWN), rule.tokens_per_row, rule.unit, rule.is_dense)
    assert (row_count, tokens_per_row, unit, is_dense) == found


def test_a_rule_names_its_map_and_its_row_of_the_request() -> None:
    """A pool learns from it which maps and rows it needs; a prefix gives another map's name."""
    assert ("window", None) == (Mapped("window").map_name, Mapped("window").kind)
    assert (None, "state") == (OfRequest("state").map_name, OfRequest("state").kind)
    assert (None, None) == (EveryToken().map_name, EveryToken().kind)
    assert Mapped("draft.window", 0) == Mapped("window", 0).with_map_under("draft")
    assert EveryNth(4) == EveryNth(4).with_map_under("draft")


@pytest.mark.parametrize("missing", ["apply", "row_count", "tokens_per_row"])
def test_a_rule_that_does_not_answer_cannot_be_made(missing: str) -> None:
    """Such a rule would be taken for one with a row for every token."""
    answers: dict[str, Any] = {
        "form_name": f"test_rules.{missing}",
        "apply": lambda self, rows, maps: rows,
        "row_count": lambda self, count, known: count,
        "tokens_per_row": property(lambda self: 1),
    }
    whole: Any = type("Whole", (Rule,), {**answers, "form_name": f"test_rules.with_{missing}"})
    assert 1 == whole().tokens_per_row
    del answers[missing]
    with pytest.raises(TypeError, match=f"abstract .*{missing}"):
        type("Partial", (Rule,), answers)()


# ---- rows by token --------------------------------------------------------------------------


@given(distinct, distinct)
def test_rows_are_found_by_token(held: list[int], wanted: list[int]) -> None:
    """All rows are found, or none if one is missing."""
    tokens = sorted(held)
    rows = Rows(ids([100 + token for token in tokens]), ids(tokens))
    found = rows.of_tokens(ids(sorted(wanted)))
    if set(wanted) <= set(held):
        assert found is not None
        assert [100 + token for token in sorted(wanted)] == found.tolist()
    else:
        assert found is None


@pytest.mark.parametrize(
    ("rules", "rows", "tokens", "lasts"),
    [
        ([EveryNth(4)], [0, 1], [0, 4], [3, 6]),
        ([EveryNth(2), EveryNth(2)], [0, 1], [0, 4], [3, 6]),
        ([EveryNth(2), Mapped("window")], [4, 2], [2, 6], [3, 6]),
    ],
)
def test_a_row_knows_its_first_and_its_last_token(
    rules: list[Rule], rows: list[int], tokens: list[int], lasts: list[int]
) -> None:
    """This holds whichever rules led to the row, and whichever rows were left out."""
    maps = {"window": by_list([-1, 4, -1, 2])}
    found = apply_rules(rules, ids(range(7)), maps, 5)
    assert found.lasts is not None
    assert (rows, tokens, lasts) == (
        found.ids.tolist(),
        found.tokens.tolist(),
        found.lasts.tolist(),
    )


@given(st.lists(st.integers(0, 300), unique=True).map(sorted))
def test_tokens_come_back_from_their_ranges(tokens: list[int]) -> None:
    """A seal keeps tokens as few ranges, and loses none."""
    ranges = ranges_of(ids(tokens))
    assert tokens == [token for span in ranges for token in span]
    seal = Seal("{}", "", 0, (ranges,), (), 1, ())
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
    """All tokens, a window, every n-th token and a rank's share are each one range."""
    assert expected == ranges_of(ids(tokens))


@pytest.mark.parametrize("value", [*NO_ROWS, 0], ids=name_of)
def test_a_rule_with_an_invalid_number_is_refused(value: Any) -> None:
    """The declaration is refused: a row of no slots would divide by zero later."""
    with pytest.raises(LayoutError, match="EveryNth: count must be an integer from 1"):
        EveryNth(value)
    with pytest.raises(LayoutError, match="Striped: world must be an integer from 1"):
        Striped(0, value)
    with pytest.raises(LayoutError, match="Striped: run must be an integer from 1"):
        Striped(0, 2, value)


@pytest.mark.parametrize("rank", [*NO_ROWS, 4], ids=name_of)
def test_an_invalid_rank_is_refused(rank: Any) -> None:
    """Such a rank would own nothing, without an error."""
    with pytest.raises(LayoutError, match="Striped: rank"):
        Striped(rank, 4)


@pytest.mark.parametrize("hole", [None, 0.5, "0", True, float("nan")], ids=name_of)
def test_an_invalid_hole_is_refused(hole: Any) -> None:
    """Tokens that lead to a hole are left out of a snapshot."""
    with pytest.raises(LayoutError, match="Mapped: hole"):
        Mapped("window", hole)


@pytest.mark.parametrize(
    ("rules", "ids", "text"),
    [
        # Token 2 is left out in the middle of a page, and token 3 takes its place.
        ([Mapped("window"), EveryNth(4)], [4, 5, -1, 6], "slot 6 at position 2 .*tokens before it"),
        ([Mapped("window"), EveryNth(4)], [4, 5, -1, 7], "slot 7 at position 2"),
        ([Mapped("window"), EveryNth(4)], [4, 5, 6, -1], None),
        ([Mapped("window"), EveryNth(4)], [-1, -1, 4, 5], None),
        # The next page begins where it should, whatever is left out before.
        ([Mapped("window"), EveryNth(2)], [4, -1, 6, 7], None),
        ([Mapped("window"), EveryNth(2)], [4, 5, -1, -1, 6, 7], None),
        # A page of two pairs: the first pair isn't full, or a pair between is left out.
        ([Mapped("window"), EveryNth(2), EveryNth(2)], [4, 5, 6, 7], None),
        ([Mapped("window"), EveryNth(2), EveryNth(2)], [4, 6, 7], "slot 3 at position 1"),
        (
            [Mapped("window"), EveryNth(2), EveryNth(2)],
            [4, 5, -1, -1, 6, 7],
            "slot 3 at position 1",
        ),
        # What a rank leaves out is the same wherever the request lies.
        ([Striped(0, 2), EveryNth(2)], [8, 9, 10, 11], None),
        ([Mapped("window"), Striped(0, 2), EveryNth(2)], [8, -1, 10, 11], "slot 5 at position 1"),
        ([Mapped("window"), Striped(0, 2), EveryNth(2)], [8, 9, 10, -1], None),
    ],
)
def test_no_token_is_left_out_inside_a_row(
    rules: list[Rule], ids: list[int], text: str | None
) -> None:
    """The tokens after it would be in other places of the row than in the snapshot.

    A row moves whole, so a restore would give other tokens' bytes, and no later check could tell.
    """
    window = np.array([ids[slot] if slot < len(ids) else slot for slot in range(12)])
    slots = np.arange(len(ids)) if any(rule.map_name for rule in rules) else np.array(ids)
    if text is None:
        assert apply_rules(rules, slots, {"window": lambda held: window[held]}, 12).ids.size
        return
    with pytest.raises(SlotError, match=text):
        apply_rules(rules, slots, {"window": lambda held: window[held]}, 12)


@given(st.lists(st.booleans(), min_size=4, max_size=16), st.sampled_from((2, 4)), st.data())
def test_a_token_has_one_place_in_its_row(
    held: list[bool], count: int, data: st.DataObject
) -> None:
    """A map may pack its rows in any way: the rows are refused, or each token has its place.

    Its distance from the row's first token is then the difference of their numbers.
    """
    starts = data.draw(st.lists(st.booleans(), min_size=len(held), max_size=len(held)))
    ids, packed = [], 0
    for is_held, starts_row in zip(held, starts, strict=True):
        packed = -(-packed // count) * count if starts_row else packed
        ids.append(packed if is_held else -1)
        packed += is_held
    window = np.array(ids)
    try:
        rows = apply_rules(
            [Mapped("window"), EveryNth(count)],
            np.arange(len(held)),
            {"window": lambda slots: window[slots]},
            len(held) * count,
        )
    except SlotError:
        return
    for row, first in zip(rows.ids.tolist(), rows.tokens.tolist(), strict=True):
        for token, place in enumerate(ids):
            if place >= 0 and place // count == row:
                assert token - first == place % count
