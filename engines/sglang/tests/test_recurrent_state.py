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
def test_pools_that_cannot_be_moved_are_refused_with_the_reason(refusal: Refusal) -> None:
    """The refusal comes at the start, and names the class."""
    built = refusal.build()
    name = type(built.pool).__name__
    with pytest.raises(Refused, match=f"^{name}: .*{refusal.reason}"):
        describe(Subject(built.pool, built.allocator))


def kept(count: int, page_size: int, token_count: int, *more: Rule) -> list[int]:
    """Returns the tokens of a request that have a row, by LastTokens and the rules after it."""
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
    """The request has 13 tokens."""
    assert expected == kept(count, page_size, 13)


def test_a_request_shorter_than_its_window_has_all_of_its_tokens() -> None:
    """A request without tokens has none."""
    assert ([0, 1, 2], []) == (kept(5, 4, 3), kept(5, 4, 0))


def test_pages_of_a_window_move_whole() -> None:
    """The rows go through a map, and four tokens share a row."""
    assert [8, 12] == kept(5, 4, 13, Mapped("shifted"), EveryNth(4))


def test_rows_that_the_target_lacks_are_dropped_only_if_the_window_is_known() -> None:
    """Otherwise they may be needed, so the restore is refused."""

    def build() -> Any:
        built = sliding_window.with_tail(sliding_window.windowed(16, 16))
        built.window_tokens = None
        return built

    outcome = round_trip(Case("", build, "exact", 61), KvtideWay())
    assert "crash" == outcome.verdict
    assert outcome.detail.startswith("SnapshotMiss: snapshot has a row for token 16")


def test_rows_outside_of_the_window_stay_only_if_the_window_is_known() -> None:
    """Otherwise they would be used for the request, with another request's content."""

    def build() -> Any:
        built = sliding_window.windowed(16, 32)
        assert built.window_tokens is None
        return built

    outcome = round_trip(Case("", build, "exact", 61), KvtideWay())
    assert "crash" == outcome.verdict
    assert outcome.detail.startswith("SnapshotMiss: the target has a row for token 0 of 61")


def test_a_slot_without_a_row_is_an_error_where_each_must_have_one() -> None:
    """A slot may have no row if the table is a window's."""
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
    """The error names the pool with too few slots, and both numbers."""
    target, allocator = keys_values.mha()
    draft, _ = keys_values.mha(size=128)
    with pytest.raises(Refused, match=r"^MHATokenToKVPool: .* 144 slots, .* 272:"):
        describe_with_draft(Subject(target, allocator), [target, draft])


def test_a_draft_that_is_refused_refuses_its_target_with_it() -> None:
    """Either both are described or neither."""
    target, allocator = keys_values.mha()
    with pytest.raises(Refused, match=r"^pool class builtins.object isn't known"):
        describe_with_draft(Subject(target, allocator), [object()])


def test_without_a_draft_it_is_the_targets_description() -> None:
    """The description has the target's parts."""
    target, allocator = keys_values.mha()
    found = describe_with_draft(Subject(target, allocator), [])
    assert ["k", "v"] == [part.name for part in found.parts]
