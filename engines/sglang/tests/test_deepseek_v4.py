from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtide.errors import SlotError
from kvtide.layout import Rows, apply_rules
from kvtide.plugin.sglang.cases.deepseek_v4 import CASES
from kvtide.plugin.sglang.pools.describe import describe
from kvtide.plugin.sglang.pools.subject import Subject
from kvtide.plugin.sglang.rules import PagesOfRequest

TABLE = torch.tensor([[0, 0, 0], [7, 3, 5], [2, 0, 0]])
"""Pages of three requests; the first has none, and the last has one."""


def pages_of(request: int, token_count: int) -> Rows:
    """Applies the rule to pages of 2 entries, each of 4 tokens."""
    rule, slots = PagesOfRequest("pages", 3, tokens=4, entries=2), np.arange(40, 40 + token_count)
    flat = TABLE.view(-1).numpy()
    maps = {"pages": lambda ids: flat[ids], "request": lambda _: np.array([request])}
    return apply_rules([rule], slots, maps, row_count=8)


@pytest.mark.parametrize(
    ("token_count", "pages", "firsts"),
    [(3, [], []), (4, [7], [0]), (11, [7], [0]), (12, [7, 3], [0, 8]), (24, [7, 3, 5], [0, 8, 16])],
)
def test_a_request_has_a_page_when_its_first_entry_is_complete(
    token_count: int, pages: list[int], firsts: list[int]
) -> None:
    """Its slots don't matter; tokens of a page that isn't begun are in the states' rings."""
    rows = pages_of(1, token_count)
    assert (pages, firsts) == (rows.ids.tolist(), rows.tokens.tolist())


def test_a_page_that_is_missing_in_the_table_is_named() -> None:
    """Otherwise the padding's page would be used, which belongs to nobody."""
    with pytest.raises(SlotError, match="request 2 has no page 1 of 'pages'"):
        pages_of(2, 16)


def test_more_pages_than_the_table_has_are_refused() -> None:
    """They would be the next request's pages."""
    with pytest.raises(SlotError, match="32 tokens need 4 pages of 'pages', whose table has 3"):
        pages_of(1, 32)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("DeepSeek-V4", "swa c4 c128 c4_index c4_state c128_state c4_index_state"),
        ("DeepSeek-V4.1 of ratios 1 and 2", "swa c1 c2 c1_index c2_index c2_state"),
        ("DeepSeek-V4.1, the window by request", "swa swa_tags c1 c2 c1_index c2_index c2_state"),
        (
            "DeepSeek-V4 on ROCm, unified in fp8",
            "swa c4 c128 swa_rope c4_rope c128_rope c4_index c4_state c128_state c4_index_state",
        ),
        (
            "DeepSeek-V4 on an NPU",
            "swa c4_state c128_state c4_index_state c4 c4_index c4_index_scale c128",
        ),
    ],
)
def test_each_region_is_a_part(name: str, parts: str) -> None:
    """The server's log names the parts that are covered by these names."""
    built = next(case for case in CASES if case.name == name).build()
    described = describe(Subject(built.pool, built.allocator, built.request_pool))
    assert parts.split() == [part.name for part in described.parts]
