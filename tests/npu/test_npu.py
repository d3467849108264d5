"""The NPU pools: copies to the host and back on every device, and arguments that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvtide.device import CPUDevice
from kvtide.errors import LayoutError, UsageError
from kvtide.npu import NPUTokenToKVPool
from support.npu_pools import (
    CHUNK,
    FIRST_LAYER,
    KINDS,
    LIMIT_BYTES,
    differences,
    image_of,
    mha,
    mla,
    packed,
    poison,
    saved,
    scramble,
    slots_for,
    small_device,
    with_tokens,
)
from support.simulated import SCHEDULES, lazy_accelerator, simulated


def goes_there_and_back(
    kind: str, pool: NPUTokenToKVPool, source: list[int], target: list[int], index: Any = None
) -> list[Any]:
    """Copies, poisons the source, loads into other slots, and returns the tokens that are wrong."""
    before = image_of(pool)
    as_given = torch.tensor if index is None else index
    copy = pool.get_cpu_copy(as_given(source))
    poison(pool, source)
    poisoned = image_of(pool)
    pool.load_cpu_copy(copy, as_given(target))
    copy.release()
    return differences(with_tokens(pool, poisoned, target, before, source), image_of(pool))


# ---- round trips ---------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["run", "reversed", "scattered", "pages"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_come_back_into_other_slots(kind: str, style: str) -> None:
    """Every byte of the tokens comes back and no other byte changes; the last page is partial."""
    pool, _ = saved(kind)
    source, target = (slots_for(kind, 13, style, part) for part in (range(1, 8), range(8, 17)))
    assert [] == goes_there_and_back(kind, pool, source, target)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_come_back_on_a_device_that_works_late(kind: str, schedule: str) -> None:
    """The copy waits for earlier work on the device and runs before later work."""
    with simulated(schedule) as name:
        pool, _ = saved(kind, name)
        source, target = (slots_for(kind, 13, "any", part) for part in (range(1, 8), range(8, 17)))
        assert [] == goes_there_and_back(kind, pool, source, target)
        pool.close()


@pytest.mark.parametrize("count", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
@pytest.mark.parametrize("chunk_bytes", [40, 700, 1 << 20])
@pytest.mark.parametrize("kind", KINDS)
def test_any_count_comes_back(kind: str, chunk_bytes: int, count: int) -> None:
    """The device may move pieces of a token at once, or all tokens."""
    device = small_device("cpu", chunk_bytes)
    pool, _ = saved(kind, device, host_limit_bytes=LIMIT_BYTES + 4 * device.chunk_bytes)
    source, target = (slots_for(kind, count, "any", part) for part in (range(1, 7), range(9, 16)))
    assert [] == goes_there_and_back(kind, pool, source, target)
    device.close()


INDEX_FORMS = {
    "int32": lambda slots: torch.tensor(slots, dtype=torch.int32),
    "int64": lambda slots: torch.tensor(slots, dtype=torch.int64),
    "list": lambda slots: slots,
    "numpy": np.array,
    "device_int32": lambda slots: torch.tensor(slots, dtype=torch.int32).to("npu"),
    "device_int64": lambda slots: torch.tensor(slots, dtype=torch.int64).to("npu"),
}


@pytest.mark.parametrize("form", INDEX_FORMS)
@pytest.mark.parametrize("kind", ["mha", "mla_nz_index"])
def test_slots_may_be_given_in_any_form(kind: str, form: str) -> None:
    """Slots may be tensors of 32 or 64 bits on the host or the device, or plain integers."""
    with simulated("lazy") as name:
        pool, _ = saved(kind, name)
        source, target = (slots_for(kind, 11, "any", part) for part in (range(1, 8), range(8, 17)))
        assert [] == goes_there_and_back(kind, pool, source, target, INDEX_FORMS[form])
        pool.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_copy_waits_for_writers_on_every_stream(schedule: str) -> None:
    """The forward pass has its own stream, and SGLang's copy waits for the whole device."""
    with simulated(schedule) as name:
        pool = mha(lazy_accelerator(name))
        torch.accelerator.synchronize()
        device = torch.accelerator.current_accelerator()
        assert device is not None
        with torch.Stream(device=device):
            poison(pool, [4])
        # This write comes last, since each upload of an index waits for all earlier work.
        (_, values) = pool.get_cpu_copy([4])[2][0]
        assert {0xA5} == set(values.view(torch.uint8).view(-1).tolist())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_load_waits_for_readers_on_every_stream(schedule: str) -> None:
    """A reader on another stream reads the bytes from before the load."""
    with simulated(schedule) as name:
        pool, before = saved("mha", lazy_accelerator(name))
        copy = pool.get_cpu_copy([4, 5])
        device = torch.accelerator.current_accelerator()
        assert device is not None
        with torch.Stream(device=device):
            read = pool.get_key_buffer(FIRST_LAYER).view(torch.uint8).clone()
        pool.load_cpu_copy(copy, [8, 9])
        torch.accelerator.synchronize()
        assert (before["k", 0] == read.cpu().numpy().reshape(before["k", 0].shape)).all()


def test_two_copies_of_the_same_slots_are_independent() -> None:
    """Each copy keeps the bytes from the time when it was made."""
    pool, before = saved("mla_index")
    first = pool.get_cpu_copy([4, 5, 6])
    scramble(pool, 2)
    later = image_of(pool)
    second = pool.get_cpu_copy([4, 5, 6])
    pool.load_cpu_copy(first, [20, 21, 22])
    pool.load_cpu_copy(second, [30, 31, 32])
    expected = with_tokens(pool, later, [20, 21, 22], before, [4, 5, 6])
    expected = with_tokens(pool, expected, [30, 31, 32], later, [4, 5, 6])
    assert [] == differences(expected, image_of(pool))


@pytest.mark.parametrize("layer_counts", [(21, 23), (1, 4)])
def test_stages_may_be_uneven(layer_counts: tuple[int, int]) -> None:
    """Callers use the model's numbers of layers, wherever the stage begins."""
    first_layer = 0
    for count in layer_counts:
        pool = mha("cpu", layer_num=count, start_layer=first_layer, end_layer=first_layer + count)
        for layer in range(first_layer, first_layer + count):
            key, value = torch.full((2, 2, 6), float(layer)), torch.full((2, 2, 3), -float(layer))
            pool.set_kv_buffer(layer_of(layer), torch.tensor([4, 9]), key, value)
        copy = pool.get_cpu_copy([9, 4])
        found = [
            [float(tensor.float().mean()) for tensor in copy[number][0]] for number in range(count)
        ]
        assert [[layer, -layer] for layer in range(first_layer, first_layer + count)] == found
        assert count == len(copy)
        first_layer += count


def layer_of(layer_id: int) -> Any:
    """Makes an attention layer with that number."""
    return type("AnyLayer", (), {"layer_id": layer_id})()


# ---- construction ------------------------------------------------------------------------------

UNSUPPORTED = [
    (mha, {"enable_memory_saver": True}, "enable_memory_saver"),
    (mha, {"quant_method": object()}, "quant_method"),
    (mha, {"post_capture_active": True}, "post_capture_active"),
    (mha, {"kv_cache_layout": "hnd"}, "hnd"),
    (mha, {"dtype": torch.float64}, "float64"),
    (mha, {"head_num": 0}, "head"),
    (mha, {"layer_num": 0}, "layer"),
    (mha, {"size": 3}, "size 3"),
    (mha, {"page_size": 0}, "page_size must be an integer from 1, not 0"),
    (mha, {"end_layer": 6}, "end_layer 6"),
    (mha, {"start_layer": -1}, "start_layer must be an integer from 0, not -1"),
    (mla, {"enable_memory_saver": True}, "enable_memory_saver"),
    (mla, {"kv_lora_rank": 40, "use_fia_nz": True}, "16"),
    (mla, {"index_head_dim": 8, "indexer_layer_ids": [4]}, r"\[4\]"),
    (mla, {"index_head_dim": 8, "indexer_layer_ids": [5, 5]}, r"\[5, 5\]"),
    (mla, {"index_size": 128}, "index_size 128"),
    (mla, {"index_page_size": 8}, "index_page_size 8"),
    (mla, {"kv_cache_dim": 47}, "kv_cache_dim 47"),
    (packed, {"kv_cache_dim": 147}, "kv_cache_dim 147"),
    (packed, {"use_fia_nz": True}, "use_fia_nz"),
]


@pytest.mark.parametrize(("make", "changes", "text"), UNSUPPORTED)
def test_unsupported_arguments_are_refused_at_once(make: Any, changes: Any, text: str) -> None:
    """The constructor's error names the argument."""
    with pytest.raises(LayoutError, match=text):
        make("cpu", **changes)


@pytest.mark.parametrize("make", [mha, mla])
def test_unknown_keywords_are_refused(make: Any) -> None:
    """Python itself refuses them."""
    with pytest.raises(TypeError, match="cache_heads"):
        make("cpu", cache_heads=2)


def test_window_sizes_override_the_others() -> None:
    """A window's pool has other heads than the pool of full attention."""
    pool = mha("cpu", swa_head_num=1, swa_head_dim=4, swa_v_head_dim=2)
    assert ((17, 4, 1, 4), (17, 4, 1, 2)) == tuple(tensor.shape for tensor in pool.get_kv_buffer(5))
    same = mha("cpu", v_head_dim=None)
    assert same.get_key_buffer(5).shape == same.get_value_buffer(5).shape


def test_a_stage_may_have_no_index_keys() -> None:
    """Other stages may have some."""
    pool = mla("cpu", index_head_dim=8, indexer_layer_ids=[])
    assert [2, 2, 2] == [len(pool.get_cpu_copy([4])[layer][0]) for layer in range(3)]


def test_a_device_that_was_given_is_not_closed() -> None:
    """Pools that share a device share its threads, and closing a pool doesn't end them."""
    device = CPUDevice(lanes=1)
    first, second = mha(device), mla(device)
    assert ("cpu", "cpu") == (first.device, second.device)
    first.close()
    assert 1 == len(second.get_cpu_copy([4])[0])
    device.close()
    pool = mha(torch.device("cpu"))
    pool.close()
    with pytest.raises(RuntimeError, match="is closed"):
        pool.get_cpu_copy([4])


def test_unknown_devices_are_refused() -> None:
    """The error names the device."""
    with pytest.raises(UsageError, match="abacus"):
        mha("abacus")
