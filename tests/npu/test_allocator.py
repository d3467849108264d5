from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import LayoutError, SlotError
from kvtide.npu import NPUPagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from support.npu_pools import differences, image_of, mha, scramble, with_tokens
from support.simulated import SCHEDULES, simulated
from support.values import NO_ROWS, name_of


def make(size: int = 64, page_size: int = 4, device: str = "cpu", **changes: Any) -> Any:
    """Makes an allocator of 16 pages of 4 tokens, without a pool."""
    arguments = {"dtype": torch.bfloat16, "kvcache": None, "need_sort": False, **changes}
    return NPUPagedTokenToKVPoolAllocator(size, page_size, device=device, **arguments)


def extend(allocator: Any, prefixes: list[int], totals: list[int], last: list[int]) -> Any:
    """Calls `alloc_extend` with plain integers."""
    count = sum(totals) - sum(prefixes)
    before, after = torch.tensor(prefixes), torch.tensor(totals)
    device = allocator.device
    lasts = torch.tensor(last, dtype=torch.int64).to(device)
    return allocator.alloc_extend(before.to(device), before, after.to(device), after, lasts, count)


def decode(allocator: Any, totals: list[int], last: list[int]) -> Any:
    """Calls `alloc_decode` with plain integers."""
    after = torch.tensor(totals)
    lasts = torch.tensor(last, dtype=torch.int32).to(allocator.device)
    return allocator.alloc_decode(after.to(allocator.device), after, lasts)


def test_whole_pages_are_handed_out_but_not_the_first() -> None:
    """Slots 0 to 3 are padding, and `size` other slots can be had."""
    allocator = make()
    assert 64 == allocator.available_size()
    slots = allocator.alloc(64)
    assert list(range(4, 68)) == sorted(slots.tolist())
    assert torch.int64 == slots.dtype
    assert 0 == allocator.available_size()
    assert allocator.alloc(4) is None
    allocator.clear()
    assert 64 == allocator.available_size()


def test_zero_slots_are_a_valid_request() -> None:
    """Every call accepts zero slots."""
    allocator = make()
    assert [] == allocator.alloc(0).tolist()
    assert [] == extend(allocator, [], [], []).tolist()
    assert [] == extend(allocator, [3], [3], [6]).tolist()
    assert [] == decode(allocator, [], []).tolist()
    allocator.free(torch.empty(0, dtype=torch.int64))
    assert 64 == allocator.available_size()


@pytest.mark.parametrize("where", ["cpu", *SCHEDULES])
def test_a_request_fills_its_page_before_it_takes_another(where: str) -> None:
    """Two requests grow at once; the slots come one request after the other."""
    with simulated("lazy" if where == "cpu" else where) as name:
        allocator = make(device="cpu" if where == "cpu" else name)
        slots = extend(allocator, [0, 0], [6, 2], [-1, -1])
        assert [4, 5, 6, 7, 8, 9, 12, 13] == slots.tolist()
        assert torch.int32 == slots.dtype
        assert [10, 11, 16, 14] == extend(allocator, [6, 2], [9, 3], [9, 13]).tolist()
        assert [17, 15] == decode(allocator, [10, 4], [16, 14]).tolist()
        assert [18, 20] == decode(allocator, [11, 5], [17, 15]).tolist()
        assert 64 - 5 * 4 == allocator.available_size()


def test_requests_that_do_not_fit_take_nothing() -> None:
    """If the second request doesn't fit, the first takes nothing either."""
    allocator = make(size=12)
    extend(allocator, [0], [5], [-1])
    assert extend(allocator, [0, 0], [4, 1], [-1, -1]) is None
    assert decode(allocator, [9, 9], [11, 11]) is None
    assert 4 == allocator.available_size()


def test_freeing_any_slot_frees_its_page() -> None:
    """SGLang frees pages like this, since requests own whole pages."""
    allocator = make()
    slots = allocator.alloc(12)
    allocator.free(slots[1:6].to(torch.int32))
    assert 64 - 4 == allocator.available_size()
    allocator.free(slots[8:])
    assert 64 == allocator.available_size()


@pytest.mark.parametrize("slots", [[0], [3, 4], [12], [-1], [68], [4, 8, 12]])
def test_slots_that_nobody_holds_are_refused(slots: list[int]) -> None:
    """Padding, free pages and slots that don't exist are refused, with all slots beside them."""
    allocator = make()
    allocator.alloc(8)
    with pytest.raises(SlotError):
        allocator.free(torch.tensor(slots))
    assert 64 - 8 == allocator.available_size()


def test_a_page_is_freed_only_once() -> None:
    """The second time the page may be another request's."""
    allocator = make()
    slots = allocator.alloc(4)
    allocator.free(slots)
    with pytest.raises(SlotError, match="isn't held"):
        allocator.free(slots)


def test_sorted_pages_ascend() -> None:
    """The order in which pages were freed doesn't matter."""
    allocator = make(need_sort=True)
    slots = allocator.alloc(64)
    for first in (40, 0, 20):
        allocator.free(slots[first : first + 4])
    found = allocator.alloc(12).tolist()
    assert sorted(found) == found


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"extend_num_tokens": 3}, "3 tokens to extend by"),
    ({"num_new_pages": 2}, "1 new pages are needed, num_new_pages is 2"),
    ({"prefix_lens_cpu": torch.tensor([3])}, "3"),
    ({"prefix_lens_cpu": torch.tensor([-1]), "extend_num_tokens": 3}, "-1"),
    ({"last_loc": torch.tensor([-1, -1])}, "2 last slots for 1 requests"),
]


@pytest.mark.parametrize(("changes", "text"), CONTRADICTIONS)
def test_lengths_that_contradict_each_other_are_refused(changes: dict[str, Any], text: str) -> None:
    """They are refused before a page is taken."""
    allocator = make()
    lengths = {"prefix_lens": torch.tensor([0]), "seq_lens": torch.tensor([2])}
    on_host = {f"{name}_cpu": tensor for name, tensor in lengths.items()}
    rest = {"last_loc": torch.tensor([-1]), "extend_num_tokens": 2}
    with pytest.raises(SlotError, match=text):
        allocator.alloc_extend(**{**lengths, **on_host, **rest, **changes})
    assert 64 == allocator.available_size()


def test_invalid_sizes_are_refused() -> None:
    """Parts of pages, requests of zero tokens, and pages unlike the pool's are refused."""
    with pytest.raises(SlotError, match="whole pages"):
        make().alloc(6)
    with pytest.raises(SlotError, match="-4"):
        make(page_size=1).alloc(-4)
    with pytest.raises(SlotError, match="has at least one token"):
        decode(make(), [0], [5])
    with pytest.raises(LayoutError, match="pages of 8 tokens, the pool's are of 4"):
        make(page_size=8, kvcache=mha("cpu"))
    with pytest.raises(LayoutError, match="page_size must be an integer from 1, not 0"):
        make(page_size=0)


def test_pages_of_one_token_are_tokens() -> None:
    """SGLang's other allocator follows the same rules."""
    allocator = TokenToKVPoolAllocator(5, torch.bfloat16, "cpu", None, need_sort=False)
    assert [1, 2] == allocator.alloc(2).tolist()  # type: ignore[union-attr] # there is room
    assert [3, 4] == extend(allocator, [1], [3], [1]).tolist()
    assert [5] == decode(allocator, [4], [4]).tolist()
    allocator.free(torch.tensor([2, 5]))
    assert 2 == allocator.available_size()


@given(st.integers(0, 2**32), st.sampled_from((1, 2, 4)))
def test_a_slot_never_has_two_requests(seed: int, page_size: int) -> None:
    """Requests grow and end in any order; free and held pages together are always all pages."""
    rng, allocator = random.Random(seed), make(size=32, page_size=page_size)
    requests: list[list[int]] = []
    for _ in range(30):
        kind = rng.choice(("new", "grow", "end"))
        if kind == "new" or not requests:
            requests.append([])
        held = rng.choice(requests)
        last = held[-1] if held else -1
        if kind == "end":
            requests.remove(held)
            allocator.free(torch.tensor(held, dtype=torch.int64))
        elif kind == "grow" and held:
            slots = decode(allocator, [len(held) + 1], [last])
            held += [] if slots is None else slots.tolist()
        else:
            slots = extend(allocator, [len(held)], [len(held) + rng.randint(0, 9)], [last])
            held += [] if slots is None else slots.tolist()
        held = [slot for request in requests for slot in request]
        assert len(set(held)) == len(held)
        assert all(page_size <= slot < 32 + page_size for slot in held)
        assert all(
            slot % page_size == i % page_size for held in requests for i, slot in enumerate(held)
        )
        pages = sum(-(-len(request) // page_size) for request in requests)
        assert 32 == allocator.available_size() + pages * page_size


class Recorder:
    """A pool that records its calls."""

    page_size = 4

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def get_cpu_copy(self, *arguments: Any, **named: Any) -> str:
        """Records the arguments."""
        self.calls.append((arguments, named))
        return "copy"

    load_cpu_copy = get_cpu_copy


def test_copies_get_every_argument() -> None:
    """The allocator passes on arguments that this pool may not use, too."""
    pool = Recorder()
    allocator = make(kvcache=pool)
    assert pool is allocator.get_kvcache()
    state = {"mamba_indices": "states", "req_pool_index": 7}
    assert "copy" == allocator.get_cpu_copy("slots", **state)
    assert "copy" == allocator.get_cpu_copy("slots", "states", 7)
    assert "copy" == allocator.load_cpu_copy("copy", "slots", **state)
    assert "copy" == allocator.load_cpu_copy("copy", "slots", "states", 7)
    assert 2 * [(("slots",), state)] + 2 * [(("copy", "slots"), state)] == pool.calls


@pytest.mark.parametrize("where", ["cpu", *SCHEDULES])
def test_a_retracted_request_resumes_in_other_slots(where: str) -> None:
    """The allocator's methods are enough; another request has the pages meanwhile."""
    with simulated("lazy" if where == "cpu" else where) as name:
        device = "cpu" if where == "cpu" else name
        pool = mha(device)
        scramble(pool, 1)
        before = image_of(pool)
        allocator = make(device=device, kvcache=pool)
        held = extend(allocator, [0], [10], [-1])
        copy = allocator.get_cpu_copy(held)
        source = held.tolist()
        allocator.free(held)
        other = allocator.alloc(12)
        new = extend(allocator, [0], [10], [-1])
        assert not set(new.tolist()) & set(other.tolist())
        allocator.load_cpu_copy(copy, new)
        expected = with_tokens(pool, before, new.tolist(), before, source)
        assert [] == differences(expected, image_of(pool))
        pool.close()


@pytest.mark.parametrize("value", NO_ROWS, ids=name_of)
def test_an_invalid_size_takes_no_slots(value: Any) -> None:
    """An invalid size is refused by the constructor and by every call."""
    allocator = make(page_size=1)
    with pytest.raises(SlotError):
        allocator.alloc(value)
    with pytest.raises(LayoutError, match="allocator: size"):
        make(size=value)
    with pytest.raises(LayoutError, match="allocator: page"):
        make(page_size=value)
    first, none = torch.tensor([1]), torch.tensor([0])
    for tokens, pages in ((value, 1), (1, value)):
        with pytest.raises(SlotError):
            allocator.alloc_extend(none, none, first, first, torch.tensor([-1]), tokens, pages)
    assert 64 == allocator.available_size()


@pytest.mark.parametrize(
    "value",
    [None, 4, 4.0, "4", [4.5], [True], [None], torch.tensor([4.0]), torch.tensor([True]), {4}],
    ids=name_of,
)
def test_invalid_slots_and_lengths_are_refused(value: Any) -> None:
    """4.5 is no slot of page 1, and True is no length; the held pages stay held."""
    allocator = make()
    slots = allocator.alloc(4)
    assert [4, 5, 6, 7] == slots.tolist()
    with pytest.raises(SlotError):
        allocator.free(value)
    length, last = torch.tensor([5]), torch.tensor([7])
    for lengths in ((value, length), (length, value)):
        with pytest.raises(SlotError):
            allocator.alloc_extend(length, lengths[0], length, lengths[1], last, 0)
    with pytest.raises(SlotError):
        allocator.alloc_decode(length, value, last)
    with pytest.raises(SlotError):
        allocator.alloc_decode(length, length, value)
    with pytest.raises(SlotError, match=r"2 .* 1"):
        allocator.alloc_extend(length, torch.tensor([5, 5]), length, length, last, 0)
    assert 60 == allocator.available_size()
    allocator.free(slots)
