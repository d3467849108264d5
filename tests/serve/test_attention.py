"""Attention over pool slots is right, and doesn't depend on who shares a bucket."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvtide.serve import query_blocks
from kvtide.serve.attention import (
    MOST_IN_BUCKET,
    AttentionPlan,
    Bucket,
    Sharing,
    Workspace,
    attend,
    padded_length,
    plan_attention,
)
from kvtide.serve.batch import RowCounts, Segment
from kvtide.serve.probes import AttentionSizes, CutProbe
from kvtide.serve.query_blocks import QUERY_ROWS, WHOLE_BLOCKS, QueryBlocks, cut
from kvtide.serve.selfcheck import _agreeing_queries

HEADS, KV_HEADS, DIM, SLOTS = 6, 2, 16, 4096
SCALE = DIM**-0.5
SOME_QUERIES = RowCounts((8, 16, QUERY_ROWS))


def planes(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns keys and values whose sums cancel, so that another order of additions shows."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(SLOTS, KV_HEADS, DIM, generator=generator).to(dtype)
    values = torch.randn(SLOTS, KV_HEADS, DIM, generator=generator).to(dtype)
    keys[1::2] = keys[::2]
    values[1::2] = -values[::2]
    return keys, values


def segments_of(*shapes: tuple[int, int], seed: int = 0) -> list[Segment]:
    """Makes segments of (count, context) in random slots that don't overlap."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(SLOTS, generator=generator)
    segments, first, used = [], 0, 0
    for count, context in shapes:
        segments.append(Segment(first, count, slots[used : used + context]))
        first, used = first + count, used + context
    return segments


def rows_of(segments: list[Segment]) -> int:
    """Counts the packed rows of all segments."""
    return sum(segment.count for segment in segments)


def cut_probes(dtype: torch.dtype) -> list[CutProbe]:
    """Makes the self-check's probes of attention that is cut, for the sizes here."""
    sizes = AttentionSizes(HEADS, KV_HEADS, DIM, DIM, dtype)
    return [
        CutProbe(sizes, torch.device("cpu"), length, of_scores=of_scores)
        for length in (64, 288, 544)
        for of_scores in (True, False)
    ]


def run(plan: AttentionPlan, query: Tensor, pool: tuple[Tensor, Tensor]) -> Tensor:
    """Computes the attention of one layer with a new workspace."""
    return attend(plan, query, *pool, SCALE, Workspace())


def expected(segments: list[Segment], query: Tensor, pool: tuple[Tensor, Tensor]) -> Tensor:
    """Computes the formula in float64, one query at a time."""
    rows = []
    for segment in segments:
        for number in range(segment.count):
            seen = segment.slots[: len(segment.slots) - segment.count + number + 1]
            group = HEADS // KV_HEADS
            k = pool[0][seen].double().repeat_interleave(group, 1)
            v = pool[1][seen].double().repeat_interleave(group, 1)
            weights = torch.einsum("hd,shd->hs", query[segment.first + number].double(), k)
            rows.append(torch.einsum("hs,shd->hd", (weights * SCALE).softmax(-1), v))
    return torch.stack(rows)


@given(st.integers(1, 20_000))
def test_padding_covers_the_context_and_wastes_little(context: int) -> None:
    """The padded length covers the context and is longer by less than 64 or an eighth."""
    padded = padded_length(context)
    assert context <= padded < context + max(64, context / 8 + 1)


@given(st.integers(1, 20_000))
def test_padded_lengths_stay_as_they_are(context: int) -> None:
    """A length that padding gives isn't padded again, so there are few different buckets."""
    assert padded_length(context) == padded_length(padded_length(context))


@pytest.mark.parametrize("query_rows", [WHOLE_BLOCKS, SOME_QUERIES, None])
@pytest.mark.parametrize("sharing", list(Sharing))
def test_attention_follows_the_formula(sharing: Sharing, query_rows: RowCounts | None) -> None:
    """Single queries of different contexts, a first chunk and a later chunk equal float64."""
    segments = segments_of((1, 1), (1, 64), (1, 65), (1, 300), (70, 70), (30, 130))
    pool = planes(torch.float32)
    query = torch.randn(rows_of(segments), HEADS, DIM)
    plan = plan_attention(
        segments, len(query), torch.float32, sharing=sharing, query_rows=query_rows
    )
    torch.testing.assert_close(
        run(plan, query, pool), expected(segments, query, pool).float(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_request_gets_the_same_bits_in_any_company(dtype: torch.dtype, threads: int) -> None:
    """A request gets the same bits alone, among 24 others, and as the last one."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pool = planes(dtype)
        segments = segments_of(*[(1, 70 + 2 * number) for number in range(25)])
        query = torch.randn(25, HEADS, DIM).to(dtype)
        together = run(plan_attention(segments, 25, dtype), query, pool)
        for number, segment in enumerate(segments):
            only = [Segment(0, 1, segment.slots)]
            alone = run(plan_attention(only, 1, dtype), query[number : number + 1], pool)
            assert torch.equal(alone[0], together[number])
        backwards = [
            Segment(row, 1, segment.slots) for row, segment in enumerate(reversed(segments))
        ]
        turned = run(plan_attention(backwards, 25, dtype), query.flip(0), pool)
        assert torch.equal(turned.flip(0), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_request_gets_the_same_bits_from_other_slots(dtype: torch.dtype) -> None:
    """The rows move to other slots, as in a restore, and all other slots hold NaN."""
    pool = planes(dtype)
    (segment,) = segments_of((1, 200))
    query = torch.randn(1, HEADS, DIM).to(dtype)
    here = run(plan_attention([segment], 1, dtype), query, pool)
    (moved,) = segments_of((1, 200), seed=1)
    other = [torch.full_like(plane, float("nan")) for plane in pool]
    for plane, source in zip(other, pool, strict=True):
        plane[moved.slots] = source[segment.slots]
    assert torch.equal(here, run(plan_attention([moved], 1, dtype), query, (other[0], other[1])))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_gets_the_same_bits_however_it_is_cut(dtype: torch.dtype, threads: int) -> None:
    """In blocks of positions, in one step or many, some of a single query; other slots hold NaN.

    It has the bits of whole blocks, too, whatever the numbers of queries that are found safe here.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (segment,) = segments_of((300, 300))
        pool = planes(dtype)
        for plane in pool:
            plane[~torch.isin(torch.arange(SLOTS), segment.slots)] = float("nan")
        query = torch.randn(300, HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
        whole = run(plan_attention([segment], 300, dtype, query_rows=WHOLE_BLOCKS), query, pool)
        (query_rows, *_), _ = _agreeing_queries(cut_probes(dtype))
        for ends in ((1, 300), (31, 33, 64, 299, 300), (100, 200, 300), tuple(range(7, 301, 13))):
            for first, last in itertools.pairwise((0, *ends)):
                part = Segment(0, last - first, segment.slots[:last], of_prompt=True)
                plan = plan_attention([part], last - first, dtype, query_rows=query_rows)
                assert torch.equal(whole[first:last], run(plan, query[first:last], pool))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("count", "context", "queries"), [(5, 69, 8), (1, 64, 8), (17, 96, 32)])
def test_a_part_of_a_block_has_a_call_of_few_queries(
    count: int, context: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has as few queries as are safe, so the short end of a prompt is cheap."""
    seen = []

    def spy(query: Tensor, keys: Tensor, *rest: Any, **named: Any) -> Tensor:
        seen.append((query.shape[1] * query.shape[2] // HEADS, keys.shape[2]))
        return scaled_dot_product_attention(query, keys, *rest, **named)

    monkeypatch.setattr(query_blocks, "scaled_dot_product_attention", spy)
    (segment,) = segments_of((count, context))
    segment = replace(segment, of_prompt=True)
    plan = plan_attention([segment], count, torch.float32, query_rows=SOME_QUERIES)
    query = torch.randn(count, HEADS, DIM)
    out = run(plan, query, planes(torch.float32))
    assert [(queries, -(-context // QUERY_ROWS) * QUERY_ROWS)] == seen
    torch.testing.assert_close(
        out, expected([segment], query, planes(torch.float32)).float(), rtol=1e-4, atol=1e-5
    )


def test_a_query_has_its_place_in_a_call_of_a_whole_block() -> None:
    """So its bits needn't be those of another place, where a library computes places apart."""
    (segment,) = segments_of((5, 77))
    for query_rows in (WHOLE_BLOCKS, SOME_QUERIES):
        (part,) = plan_attention([segment], 5, torch.float32, query_rows=query_rows).parts
        assert isinstance(part, QueryBlocks)
        (call,) = part.calls
        places = call.queries(torch.ones(5, HEADS, DIM)).any(-1).any(-1).nonzero().flatten()
        first = 72 - 64 if query_rows == WHOLE_BLOCKS else 0
        assert list(range(first, first + 5)) == places.tolist()


@pytest.mark.parametrize("query_rows", [WHOLE_BLOCKS, None])
def test_a_single_query_of_a_prompt_has_a_block_where_prompts_have(
    query_rows: RowCounts | None,
) -> None:
    """Elsewhere it may share a bucket with tokens of answers."""
    (segment,) = segments_of((1, 70))
    prompt = replace(segment, of_prompt=True)
    plan = plan_attention([prompt], 1, torch.float32, query_rows=query_rows)
    assert [QueryBlocks if query_rows else Bucket] == [type(part) for part in plan.parts]


@given(st.integers(1, 400), st.integers(0, 400), st.integers(2, 300))
def test_pieces_of_a_chunk_make_the_chunk(count: int, earlier: int, most: int) -> None:
    """Together they have its rows in order, none has too many, and few end within a block."""
    segment = Segment(5, count, torch.arange(earlier + count), of_prompt=True)
    pieces = cut(segment, most)
    rows = [row for piece in pieces for row in range(piece.first, piece.first + piece.count)]
    assert list(range(5, 5 + count)) == rows
    assert max(piece.count for piece in pieces) <= most
    if most >= 2 * QUERY_ROWS:
        assert all(len(piece.slots) % QUERY_ROWS == 0 for piece in pieces[:-1])


def test_padding_rows_are_zero() -> None:
    """A row that belongs to no segment is zero."""
    segments = segments_of((1, 9))
    query = torch.randn(4, HEADS, DIM)
    out = run(plan_attention(segments, 4, torch.float32), query, planes(torch.float32))
    assert torch.equal(torch.zeros(3, HEADS, DIM), out[1:])


def test_like_lengths_share_a_bucket_and_others_do_not() -> None:
    """Contexts of 3 and 64 share a bucket and 65 has another; Sharing.ANY makes one bucket."""
    segments = segments_of((1, 3), (1, 64), (1, 65))
    counts = [part.count for part in plan_attention(segments, 3, torch.float32).parts]
    assert [2, 1] == counts
    (only,) = plan_attention(segments, 3, torch.float32, sharing=Sharing.ANY).parts
    assert isinstance(only, Bucket)
    assert (3, 3 * 128) == (only.count, len(only.slots))


def test_a_bucket_has_no_more_requests_than_the_self_check_tries() -> None:
    """Seventy contexts of one length need two buckets; with Sharing.NONE each has its own."""
    segments = segments_of(*[(1, 9)] * 70)
    plan = plan_attention(segments, 70, torch.float32)
    assert [MOST_IN_BUCKET, 70 - MOST_IN_BUCKET] == [part.count for part in plan.parts]
    plan = plan_attention(segments, 70, torch.float32, sharing=Sharing.NONE)
    assert [1] * 70 == [part.count for part in plan.parts]


def test_the_workspace_serves_planes_of_any_width() -> None:
    """A longer gather or another row width gets memory of its size."""
    workspace = Workspace()
    for width, count in ((4, 3), (4, 50), (8, 2), (4, 1)):
        plane = torch.randn(64, 1, width)
        slots = torch.randperm(64)[:count]
        assert torch.equal(plane[slots], workspace.gather("k", plane, slots))
