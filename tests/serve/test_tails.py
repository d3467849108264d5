"""The end of a prompt that fills no whole block is shared, too; no model is needed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvtide.serve.request import Request
from serve.prefix_bench import PAGE_SIZE, Bench, close_benches, make, numbers


@pytest.fixture(autouse=True)
def _nothing_is_held_at_the_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test all is free. In these, one token is worth to be copied."""
    monkeypatch.setattr("kvtide.serve.finder._WORTH_TOKENS", 1)
    yield
    close_benches()


@pytest.mark.parametrize("length", range(1, 18))
def test_a_next_turn_computes_its_own_tokens_alone(length: int) -> None:
    """Wherever the last turn ended: in a page, with a page, with a block."""
    bench = Bench(16)
    bench.answer(make("a", numbers(length)))
    bench.answer(make("b", [*numbers(length), 90, 91]))
    assert [length, length + 1] == bench.computed["b"]


def test_the_same_prompt_computes_its_last_token_alone() -> None:
    """Its logits are wanted; all before it is copied from the first one's tail."""
    bench = Bench(16)
    for name in "abc":
        bench.answer(make(name, numbers(7)))
    assert [[6], [6]] == [bench.computed["b"], bench.computed["c"]]


def test_choices_of_one_prompt_compute_it_once() -> None:
    """They come together; the others wait for the first, and copy its end while it goes on."""
    bench = Bench(32)
    choices = [make(name, numbers(14), 6) for name in "abc"]
    bench.answer(*choices)
    computed = {name: [n for n in tokens if n < 14] for name, tokens in bench.computed.items()}
    assert {"a": numbers(14), "b": [13], "c": [13]} == computed


def test_two_next_turns_at_once_compute_what_is_new_once() -> None:
    """The second waits for the first, though the first has taken the pages of the tail."""
    bench = Bench(32)
    bench.answer(make("a", numbers(11)))
    turns = [make(name, [*numbers(14), number]) for name, number in (("b", 77), ("c", 78))]
    bench.answer(*turns)
    assert {"b": [11, 12, 13, 14], "c": [14]} == {name: bench.computed[name] for name in "bc"}


def test_a_prompt_that_leaves_a_block_has_what_is_before() -> None:
    """A block that goes on in another way has tokens that can be copied."""
    bench = Bench(16)
    bench.answer(make("a", numbers(17)))
    bench.answer(make("b", [*numbers(13), 90, 91]))
    assert [13, 14] == bench.computed["b"]


def test_few_tokens_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy and a wait cost something, too; a whole tail is worth it, since it costs no copy."""
    monkeypatch.setattr("kvtide.serve.finder._WORTH_TOKENS", 4)
    bench = Bench(32)
    bench.answer(make("a", numbers(17)))
    bench.answer(make("b", [*numbers(3), 90, 91]))
    assert numbers(5) == bench.computed["b"]
    bench.answer(make("c", [*numbers(3), 90, 91, 92]))
    assert [5] == bench.computed["c"]
    bench.answer(make("d", [1, 2, 3, 60]), make("e", [1, 2, 3, 70]))
    assert numbers(4) == bench.computed["e"]


def test_tenants_do_not_share_tails() -> None:
    """The beginning of a block isn't shared either, even of the first."""
    bench = Bench(32)
    for name, salt in (("a", b""), ("b", b"x"), ("c", b"y"), ("d", b"x")):
        bench.answer(make(name, [*numbers(7), ord(name)], salt=salt))
    spared = {name: 8 - len(tokens) for name, tokens in bench.computed.items()}
    assert {"a": 0, "b": 0, "c": 0, "d": 7} == spared


def test_a_tail_is_taken_over_without_a_page_more() -> None:
    """Where the pool has no page for a copy, the next turn goes on in the same pages."""
    bench = Bench(2)
    bench.answer(make("a", numbers(5)))
    bench.answer(make("b", [*numbers(5), 90, 91]))
    assert [5, 6] == bench.computed["b"]


def test_what_has_no_room_to_be_copied_is_computed() -> None:
    """The tail's pages are the only ones that are left."""
    bench = Bench(2)
    bench.answer(make("a", numbers(8)))
    bench.answer(make("b", numbers(8)))
    assert numbers(8) == bench.computed["b"]


def test_a_tail_comes_back_from_host_memory() -> None:
    """It leaves the device like a block, with as many tokens as it has."""
    bench = Bench(8, host_blocks=8)
    bench.answer(make("a", numbers(13)))
    bench.answer(make("b", numbers(32, 50)))
    below = bench.prefixes.blocks.below.values()
    assert [5, 8] == [block.snapshot.token_count for block in below if block.snapshot is not None]
    bench.answer(make("c", [*numbers(13), 90]))
    assert [13] == bench.computed["c"]
    assert 13 == bench.prefixes.stats.cached_tokens["host"]


def test_a_damaged_tail_is_computed() -> None:
    """It is a miss like a damaged block."""
    bench = Bench(8, host_blocks=8)
    bench.answer(make("a", numbers(13)))
    bench.answer(make("b", numbers(32, 50)))
    (tail,) = (block for block in bench.prefixes.blocks.below.values() if len(block.tokens) == 5)
    assert tail.snapshot is not None
    tail.snapshot.lease.blocks[0].bytes_view(1)[0] ^= 1
    bench.answer(make("c", [*numbers(13), 90]))
    assert numbers(6, 8) == bench.computed["c"]
    assert 1 == bench.prefixes.stats.failed


@pytest.mark.parametrize("host_blocks", [0, 8])
def test_a_retracted_request_keeps_its_end_for_itself(host_blocks: int) -> None:
    """Its pages go with it. If they can't, its end stays, and it reads that when it is back."""
    bench = Bench(16, host_blocks=host_blocks)
    first = make("a", numbers(13), 6)
    bench.scheduler.add(first)
    for _ in range(3):
        bench.step()
    tails = [first.tail]
    bench.scheduler.retract(first)
    tails.append(first.tail)
    assert [False, True] == [tail is None for tail in tails]
    while bench.step():
        bench.end_those_that_are_done()
    assert numbers(13) == [number for number in bench.computed["a"] if number < 13]
    bench.answer(make("b", [*numbers(13), 90]))
    assert [13] == bench.computed["b"]


def test_an_aborted_request_leaves_what_it_has_computed() -> None:
    """In blocks, and the end of its prompt."""
    bench = Bench(16)
    request = make("a", numbers(13), 50)
    bench.scheduler.add(request)
    for _ in range(3):
        bench.step()
    bench.scheduler.remove(request)
    bench.answer(make("b", [*numbers(13), 90]))
    assert [13] == bench.computed["b"]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("page_count", [400, 24])
@pytest.mark.parametrize("seed", range(4))
def test_conversations_compute_each_token_once(exact: bool, page_count: int, seed: int) -> None:
    """Turns of conversations that begin alike, fork, and are sent again, in chunks of any length.

    `Bench.step` compares every byte that a request reads. Where nothing leaves the pool, what is
    computed is the least that can be: all that no prompt before began with, and one last token.
    """
    dice = random.Random(seed)
    bench = Bench(
        page_count,
        exact=exact,
        host_blocks=2 if page_count < 100 else 0,
        block_tokens=2 * PAGE_SIZE,
        chunk_tokens=8 * dice.randint(1, 4),
    )
    known: set[tuple[int, ...]] = set()
    histories: list[list[int]] = [numbers(5)]
    for number in range(60):
        history = dice.choice(histories[-6:])
        history = [*history[: dice.choice([1000, len(history) - 2])], *_words(dice, 12)]
        request = make(str(number), history[:80], dice.randint(1, 9))
        bench.answer(request)
        if page_count == 400:
            assert _least(request, known) == len(_of_prompt(bench, request))
        whole = [*request.prompt_ids, *request.output_ids]
        end = len(request.prompt_ids) if exact else len(whole) - 1
        known.update(tuple(whole[:count]) for count in range(1, end + 1))
        histories += dice.choice([[whole], [whole, history]])


@pytest.mark.parametrize("seed", range(6))
def test_requests_that_come_together_compute_each_token_once(seed: int) -> None:
    """Conversations and choices at once: whoever comes second waits a step, and copies."""
    dice = random.Random(seed)
    bench = Bench(400, chunk_tokens=256)
    known: set[tuple[int, ...]] = set()
    histories: list[list[int]] = [[1]]
    for turn in range(8):
        requests = []
        for number in range(dice.randint(1, 5)):
            history = [*dice.choice(histories[-4:]), *_words(dice, 10)][:70]
            name = f"{turn} {number}"
            for choice in range(dice.randint(1, 2)):
                requests.append(make(f"{name} {choice}", history, dice.randint(1, 4)))
            histories.append(history)
        bench.answer(*requests)
        least = 0
        for request in requests:
            least += _least(request, known)
            prompt = request.prompt_ids
            known.update(tuple(prompt[:count]) for count in range(1, len(prompt) + 1))
        assert least == sum(len(_of_prompt(bench, request)) for request in requests)


def _words(dice: random.Random, most: int) -> list[int]:
    return [dice.randrange(3) for _ in range(dice.randint(0, most))]


def _of_prompt(bench: Bench, request: Request) -> list[int]:
    return [number for number in bench.computed[request.id] if number < len(request.prompt_ids)]


def _least(request: Request, known: set[tuple[int, ...]]) -> int:
    """How many tokens of the prompt no other has computed; the last one counts always."""
    prompt = request.prompt_ids
    counts = (count for count in range(len(prompt)) if tuple(prompt[:count]) in known)
    return len(prompt) - max(counts, default=0)
