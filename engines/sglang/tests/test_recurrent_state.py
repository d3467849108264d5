from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvtide.errors import SlotError
from kvtide.layout import EveryNth, Mapped, Rule, apply_rules
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.cases import keys_values, recurrent_state, sliding_window, unified_memory
from kvtide.plugin.sglang.cases.round_trips import Case, KvtideWay, Refusal, round_trip
from kvtide.plugin.sglang.pools.describe import describe
from kvtide.plugin.sglang.pools.draft_model import describe_with_draft
from kvtide.plugin.sglang.pools.page_table import PageTable
from kvtide.plugin.sglang.pools.subject import Subject
from kvtide.plugin.sglang.rules import LastTokens

REFUSED = [*recurrent_state.REFUSED, *sliding_window.REFUSED, *unified_memory.REFUSED]


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.name)
def test_what_cannot_be_moved_is_refused_with_its_reason(refusal: Refusal) -> None:
    """At the start, by the class's name."""
    built = refusal.build()
    name = type(built.pool).__name__
    with pytest.raises(Refused, match=f"^{name}: .*{refusal.reason}"):
        describe(Subject(built.pool, built.allocator))


def kept(count: int, page_size: int, token_count: int, *more: Rule) -> list[int]:
    """The tokens of a request that have a row, by a rule of its last ones and others after it."""
    rules = [LastTokens(count, page_size), *more]
    slots = np.arange(16, 16 + token_count)
    maps = {"shifted": lambda ids: ids + 16}
    tokens: list[int] = apply_rules(rules, slots, maps, 1000).tokens.tolist()
    return tokens


@pytest.mark.parametrize(
    ("count", "page_size", "expected"),
    [(5, 1, [8, 9, 10, 11, 12]), (5, 4, [8, 9, 10, 11, 12]), (6, 8, [*range(13)]), (0, 1, [])],
)
def test_the_last_tokens_of_a_request_begin_with_a_page(
    count: int, page_size: int, expected: list[int]
) -> None:
    """Of 13."""
    assert expected == kept(count, page_size, 13)


def test_a_request_within_its_window_has_all_of_its_tokens() -> None:
    """Or none at all."""
    assert ([0, 1, 2], []) == (kept(5, 4, 3), kept(5, 4, 0))


def test_pages_of_a_window_move_whole() -> None:
    """Through a map, and four to a row."""
    assert [8, 12] == kept(5, 4, 13, Mapped("shifted"), EveryNth(4))


def test_more_rows_than_the_target_has_are_lost_only_if_the_window_is_known() -> None:
    """Else they may be needed: the restore is refused."""

    def build() -> Any:
        built = sliding_window.with_tail(sliding_window.windowed(16, 16))
        built.window_tokens = None
        return built

    outcome = round_trip(Case("", build, "exact", 61), KvtideWay())
    assert "crash" == outcome.verdict
    assert outcome.detail.startswith("SnapshotMiss: snapshot has a row for token 16")


def test_rows_for_what_had_left_the_window_are_left_alone_only_if_it_is_known() -> None:
    """Else they would be taken for the request's, with what somebody else left in them."""

    def build() -> Any:
        built = sliding_window.windowed(16, 32)
        assert built.window_tokens is None
        return built

    outcome = round_trip(Case("", build, "exact", 61), KvtideWay())
    assert "crash" == outcome.verdict
    assert outcome.detail.startswith("SnapshotMiss: the target has a row for token 0 of 61")


def test_a_slot_without_a_row_is_an_error_where_each_must_have_one() -> None:
    """A window's slots may lack one."""
    allocator = unified_memory.hybrid_bundle().token_to_kv_pool_allocator
    slots = allocator.alloc(16).numpy()
    owner = allocator.full_attn_allocator
    rows = PageTable(owner, "full")(slots)
    assert owner.translate_kv_loc(torch.from_numpy(slots)).tolist() == rows.tolist()
    allocator.free(torch.from_numpy(slots))
    assert [-1] * 16 == PageTable(owner, "full", may_lack=True)(slots).tolist()
    with pytest.raises(SlotError, match=f"virtual slot {slots[0]} has no full row"):
        PageTable(owner, "full")(slots)


def test_a_draft_must_have_all_of_the_targets_slots() -> None:
    """The one that has too few is named, with both numbers."""
    target, allocator = keys_values.mha()
    draft, _ = keys_values.mha(size=128)
    with pytest.raises(Refused, match=r"^MHATokenToKVPool: .* 144 slots, .* 272:"):
        describe_with_draft(Subject(target, allocator), [target, draft])


def test_a_draft_that_is_refused_refuses_its_target_with_it() -> None:
    """All or nothing."""
    target, allocator = keys_values.mha()
    with pytest.raises(Refused, match=r"^pool class builtins.object isn't known"):
        describe_with_draft(Subject(target, allocator), [object()])


def test_without_a_draft_it_is_the_targets_description() -> None:
    """By its parts."""
    target, allocator = keys_values.mha()
    found = describe_with_draft(Subject(target, allocator), [])
    assert ["k", "v"] == [part.name for part in found.parts]
