"""Packed steps over a pool give the right tokens, and the same bits in any company."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtide.device import CPUDevice
from kvtide.errors import UsageError
from kvtide.pool import Pool
from kvtide.serve import paged as paged_module
from kvtide.serve.attention import Sharing, plan_attention
from kvtide.serve.batch import ExactRules, PackedBatch, RowCounts, Segment
from kvtide.serve.paged import PagedModel
from kvtide.serve.query_blocks import WHOLE_BLOCKS
from kvtide.serve.selfcheck import find_rows
from serve.small_models import NEW_TOKENS, generated, model_of, pool_of

CHUNK = 40
LENGTHS = (1, 2, 17, 40, 41, 63, 64, 65, 130)


@functools.cache
def safe_rules(family: str, dtype: torch.dtype, threads: int) -> ExactRules:
    """Returns the rules of the self-check. Without a safe row count there is no exact mode."""
    assert torch.get_num_threads() == threads
    rules = find_rows(model_of(family, dtype), CPUDevice()).rules
    assert rules is not None
    return rules


def from_to(least: int, most: int, *, share_attention: bool = True) -> ExactRules:
    """Makes rules that allow passes of `least` to `most` rows."""
    rows = RowCounts(tuple(range(least, most + 1)))
    return ExactRules(rows, rows, share_attention)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Sets torch's thread count, and restores it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@dataclass
class Answer:
    """A request under way in a test."""

    tokens: list[int]
    slots: Tensor
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)

    def next_count(self) -> int:
        """Returns the next chunk's length, which depends on this request only."""
        return min(len(self.tokens) - self.done, CHUNK - self.done % CHUNK)


def prompts(seed: int = 0) -> list[list[int]]:
    """Makes random prompts with lengths around the ends of chunks and of padded lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 199, (n,), generator=generator).tolist() for n in LENGTHS]


def answers_to(
    paged: PagedModel, pool: Pool, asked: Sequence[list[int]], *, seed: int = 0, most: int = 99
) -> list[Answer]:
    """Computes greedy answers in random slots, with at most `most` requests in a step."""
    slots = torch.randperm(pool.slot_count, generator=torch.Generator().manual_seed(seed))
    each = slots.view(-1, pool.slot_count // 20).unbind()
    requests = [Answer(list(p), s) for p, s in zip(asked, each, strict=False)]
    left = list(requests)
    while left:
        step(paged, left[:most])
        left = [request for request in left if len(request.logits) < NEW_TOKENS]
    return requests


def pack(requests: Sequence[Answer]) -> tuple[PackedBatch, list[Answer]]:
    """Packs one step of these requests, and returns those that get logits from it."""
    token_ids: list[int] = []
    positions: list[int] = []
    out_slots: list[Tensor] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    ready: list[Answer] = []
    for request in requests:
        count, done = request.next_count(), request.done
        segments.append(Segment(len(token_ids), count, request.slots[: done + count]))
        token_ids += request.tokens[done : done + count]
        positions += range(done, done + count)
        out_slots.append(request.slots[done : done + count])
        request.done += count
        if request.done == len(request.tokens):
            logit_rows.append(len(token_ids) - 1)
            ready.append(request)
    batch = PackedBatch(
        torch.tensor(token_ids),
        torch.tensor(positions),
        torch.cat(out_slots),
        tuple(segments),
        torch.tensor(logit_rows, dtype=torch.int64),
    )
    return batch, ready


def step(paged: PagedModel, requests: Sequence[Answer]) -> None:
    """Runs one step and gives each request that is ready its next token."""
    batch, ready = pack(requests)
    for request, logits in zip(ready, paged.forward(batch), strict=True):
        request.tokens.append(int(logits.argmax()))
        request.logits.append(logits.clone())


def assert_same(expected: Sequence[Answer], actual: Sequence[Answer]) -> None:
    """Tokens are equal, and the logits of every step to the bit."""
    for wanted, found in zip(expected, actual, strict=True):
        assert wanted.tokens == found.tokens
        assert torch.equal(torch.stack(wanted.logits), torch.stack(found.logits))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "family",
    [
        *("Llama", "Qwen2", "Qwen3", "Mistral", "Qwen3Moe", "OPT", "GPTJ"),
        *("GPTNeoX", "Nemotron", "StableLm"),  # they drop arguments on their way to the attention
    ],
)
def test_tokens_equal_those_of_generate(family: str, exact: bool) -> None:
    """In float32, requests in one pool get the answers that the model gives each of them alone."""
    model, asked = model_of(family), prompts()
    expected = [generated(model, prompt) for prompt in asked]
    pool = pool_of(model)
    paged = PagedModel(model, pool, exact=from_to(16, 24) if exact else None)
    actual = [answer.tokens for answer in answers_to(paged, pool, asked)]
    paged.release()
    assert expected == actual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_exact_logits_do_not_depend_on_company_or_slots(
    family: str, dtype: torch.dtype, threads: int
) -> None:
    """A request gets the same bits alone, among all, and in a group of three in other slots."""
    model, asked = model_of(family, dtype), prompts()
    pool = pool_of(model)
    rules = safe_rules(family, dtype, threads)
    paged = PagedModel(model, pool, exact=rules)
    together = answers_to(paged, pool, asked)
    turned = answers_to(paged, pool, asked[::-1], seed=1, most=3)[::-1]
    alone = [answers_to(paged, pool, [prompt], seed=2)[0] for prompt in asked]
    paged.release()
    assert_same(alone, together)
    assert_same(alone, turned)


def test_a_request_moved_to_other_slots_goes_on_with_the_same_bits() -> None:
    """Its KV is copied and the old slots are overwritten, as after a retraction."""
    model = model_of()
    pool = pool_of(model)
    paged = PagedModel(model, pool, exact=from_to(16, 32))
    (expected,) = answers_to(paged, pool, [prompts()[5]])
    moved = Answer(list(prompts()[5]), torch.arange(160))
    while len(moved.logits) < NEW_TOKENS:
        step(paged, [moved])
        target = moved.slots + 160 if moved.done % 2 else torch.arange(160)
        for name in ("k", "v"):
            for layer in range(2):
                plane = pool.plane(name, layer)
                plane[target] = plane[moved.slots].clone()
                if not torch.equal(target, moved.slots):
                    plane[moved.slots] = float("nan")
        moved.slots = target
    paged.release()
    assert_same([expected], [moved])


@pytest.mark.parametrize(
    ("chunk_rows", "expected"),
    [
        (range(4, 9), [([1] * 6, 6), ([2], 4), ([3], 4), ([8], 8), ([9], 9)]),
        (range(10, 21), [([1] * 6, 6), ([2], 10), ([3, 9, 8], 20)]),
        (range(1, 2), [([1] * 6, 6), ([2], 2), ([3], 3), ([8], 8), ([9], 9)]),
    ],
)
def test_exact_passes_keep_to_the_row_counts(
    chunk_rows: range, expected: list[tuple[list[int], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments that fit share a pass with a safe row count, and a longer segment has its own pass.

    Segments of one query use passes of 4 to 8 rows. Longer segments share these passes only if
    their safe row counts are the same.
    """
    model = model_of()
    pool = pool_of(model)
    rows = ExactRules(RowCounts(tuple(range(4, 9))), RowCounts(tuple(chunk_rows)))
    paged = PagedModel(model, pool, exact=rows)
    passes: list[tuple[list[int], int]] = []

    def spy(segments: Sequence[Segment], row_count: int, *rest: Any, **named: Any) -> Any:
        assert named == {"sharing": Sharing.ALIKE, "query_rows": None}
        passes.append(([segment.count for segment in segments], row_count))
        return plan_attention(segments, row_count, *rest, **named)

    monkeypatch.setattr(paged_module, "plan_attention", spy)
    counts = (3, 9, 1, 1, 1, 8, 1, 1, 1, 2)
    slots = torch.arange(200).view(-1, 10).unbind()
    step(paged, [Answer([7] * n, s) for n, s in zip(counts, slots, strict=False)])
    paged.release()
    assert expected == sorted(passes)


def test_a_chunk_longer_than_a_pass_runs_as_several() -> None:
    """Its logits and its KV have the same bits as in one pass, if attention is by position."""
    model = model_of()
    written = []
    for most in (64, 200):
        pool = pool_of(model)
        rows = RowCounts(tuple(range(16, most + 1)))
        paged = PagedModel(model, pool, exact=ExactRules(rows, rows, query_rows=WHOLE_BLOCKS))
        answer = Answer([7, *range(150)], torch.arange(160))
        answer.next_count = lambda: 151  # type: ignore[method-assign]
        step(paged, [answer])
        paged.release()
        kv = [pool.plane(name, layer)[:151] for name in ("k", "v") for layer in range(2)]
        written.append((torch.stack(kv), answer.logits[0]))
    assert torch.equal(written[0][0], written[1][0])
    assert torch.equal(written[0][1], written[1][1])


@pytest.mark.parametrize("exact", [True, False])
def test_a_step_writes_to_its_own_slots_only(exact: bool) -> None:
    """All other slots keep every byte; padding rows write nothing."""
    model = model_of()
    pool = pool_of(model)
    paged = PagedModel(model, pool, exact=from_to(16, 32) if exact else None)
    before = [buffer.clone() for buffer in pool.buffers]
    requests = [Answer([5, 6, 7], torch.tensor([40, 2, 77])), Answer([9], torch.tensor([0]))]
    step(paged, requests)
    paged.release()
    written = [40, 2, 77, 0]
    for buffer, old in zip(pool.buffers, before, strict=True):
        changed = buffer.view(2, pool.slot_count, -1) != old.view(2, pool.slot_count, -1)
        assert set(written) == set(changed.any(-1).any(0).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("exact", [True, False])
def test_logits_come_in_the_order_asked_for(exact: bool) -> None:
    """One step has prompts and single queries, and some of them get no logits."""
    model, asked = model_of(), prompts()
    pool = pool_of(model)
    paged = PagedModel(model, pool, exact=from_to(4, 8) if exact else None)
    alone = answers_to(paged, pool, asked)
    slots = torch.randperm(pool.slot_count).view(-1, pool.slot_count // 20).unbind()
    mixed = [Answer(list(p), s) for p, s in zip(asked, slots, strict=False)]
    for number, request in enumerate(mixed):
        for _ in range(number % 4):
            step(paged, [request])
    before = [len(request.logits) for request in mixed]
    step(paged, mixed)
    paged.release()
    assert any(len(request.logits) == had for request, had in zip(mixed, before, strict=True))
    for request, full in zip(mixed, alone, strict=True):
        for found, expected in zip(request.logits, full.logits, strict=False):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_head_computes_only_the_wanted_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head runs on the rows that need logits, padded to a safe row count."""
    model = model_of()
    pool = pool_of(model)
    rows = ExactRules(RowCounts((2, 8, 16)), RowCounts((2, 8, 16)))
    paged = PagedModel(model, pool, exact=rows)
    heads: list[int] = []
    run = paged._model.run

    def spy(*arguments: Any) -> Tensor:
        logits = run(*arguments)
        heads.append(len(logits))
        return logits

    monkeypatch.setattr(paged._model, "run", spy)
    slots = torch.arange(200).view(-1, 10).unbind()
    asked = [Answer([7] * n, s) for n, s in zip((1, 1, 1, 9), slots, strict=False)]
    step(paged, asked)
    paged.release()
    assert [8] == heads
    assert all(len(request.logits) == 1 for request in asked)


def test_requests_that_may_not_share_attention_have_a_call_each() -> None:
    """Their numbers are then those of a request alone, whatever a shared call would do."""
    model, asked = model_of(), prompts()
    expected = [generated(model, prompt) for prompt in asked]
    pool = pool_of(model)
    paged = PagedModel(model, pool, exact=from_to(16, 24, share_attention=False))
    together = answers_to(paged, pool, asked)
    alone = [answers_to(paged, pool, [prompt], seed=2)[0] for prompt in asked]
    paged.release()
    assert expected == [answer.tokens for answer in together]
    assert_same(alone, together)


def test_a_pool_of_another_shape_is_refused() -> None:
    """A pool of another dtype would take wrong bytes without an error."""
    model = model_of()
    with pytest.raises(UsageError, match="the pool holds"):
        PagedModel(model, pool_of(model_of("Llama", torch.bfloat16)), exact=None)
