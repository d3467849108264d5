"""Copies and loads that the NPU pools refuse, before a byte is written."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from kvtide.errors import LayoutError, SlotError, SnapshotDamaged, SnapshotMiss
from support.npu_pools import (
    KINDS,
    LIMIT_BYTES,
    TILED,
    AnyLayer,
    differences,
    image_of,
    mha,
    refuses,
    saved,
    scramble,
    small_device,
    with_tokens,
)
from support.values import NO_ROWS, name_of

# ---- refusals --------------------------------------------------------------------------------

STRANGERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "layers": ("mla", "mla", {"layer_num": 2}),
    "stage": ("mla", "mla", {"start_layer": 8}),
    "width": ("mla", "mla", {"kv_lora_rank": 64}),
    "rope": ("mla", "mla", {"qk_rope_head_dim": 32}),
    "dtype": ("mla", "mla", {"dtype": torch.float16}),
    "planes": ("mla", "mla_index", {}),
    "index layers": ("mla_index", "mla_index", {"indexer_layer_ids": (5, 6)}),
    "order": ("mla", "mla_nz", {}),
    "pool": ("mla", "mha", {}),
    "stage of heads": ("mha", "mha", {"start_layer": 8}),
    "layers of heads": ("mha", "mha", {"layer_num": 2}),
    "heads": ("mha", "mha", {"head_num": 1}),
    "values": ("mha", "mha", {"v_head_dim": 6}),
    "stage of records": ("packed", "packed", {"start_layer": 8}),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_copy_of_another_pool_is_refused(stranger: str) -> None:
    """The copy is refused before a byte is written."""
    kind, other_kind, changes = STRANGERS[stranger]
    pool, before = saved(kind)
    other = KINDS[other_kind]("cpu", **changes)
    with pytest.raises(SnapshotMiss, match="geometry"):
        pool.load_cpu_copy(other.get_cpu_copy([4, 5]), [4, 5])
    assert [] == differences(before, image_of(pool))


def test_fp8_kinds_are_told_apart() -> None:
    """Both are bytes in the lists, but the same bytes mean other numbers."""
    pool = mha("cpu", dtype=torch.float8_e4m3fn)
    other = mha("cpu", dtype=torch.float8_e5m2)
    with pytest.raises(SnapshotMiss, match="geometry"):
        pool.load_cpu_copy(other.get_cpu_copy([4]), [4])


@pytest.mark.parametrize("kind", ["mha", "mla_nz_index"])
def test_a_copy_of_an_equal_pool_is_loaded(kind: str) -> None:
    """This happens when a request moves to another process's pool of the same stage."""
    pool, before = saved(kind)
    other = KINDS[kind]("cpu")
    scramble(other, 9)
    theirs, copy = image_of(other), other.get_cpu_copy(list(range(4, 10)))
    pool.load_cpu_copy(copy, list(range(20, 26)))
    expected = with_tokens(pool, before, list(range(20, 26)), theirs, list(range(4, 10)))
    assert [] == differences(expected, image_of(pool))


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_that_does_not_fit_writes_nothing(kind: str) -> None:
    """Another length, invalid slots and a released copy are refused."""
    pool, _ = saved(kind)
    copy = pool.get_cpu_copy([8, 9, 10])
    refuses(pool, copy, [12, 13], SnapshotMiss, "token count")
    refuses(pool, copy, [12, 13, 14, 15], SnapshotMiss, "token count")
    refuses(pool, copy, [12, 13, -1], SlotError, "-1")
    refuses(pool, copy, [12, 13, 68], SlotError, "68")
    refuses(pool, copy, [12, 13, 13], SlotError, "13")
    refuses(pool, copy, torch.tensor([12.0, 13.0, 14.0]), SlotError, "integers")
    copy.release()
    refuses(pool, copy, [12, 13, 14], SnapshotMiss, "discarded")
    with pytest.raises(SnapshotMiss, match="released"):
        copy[0][0]


@pytest.mark.parametrize("slots", [[-1], [68], [4, 4], [[4]]])
def test_invalid_slots_are_not_copied(slots: Any) -> None:
    """They are refused, and no host memory is taken."""
    pool, _ = saved("mha")
    with pytest.raises(SlotError):
        pool.get_cpu_copy(slots)
    assert 0 == pool.host_used_bytes


@pytest.mark.parametrize("slot", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_slots_are_refused(kind: str, slot: int) -> None:
    """A table of slots has 0 where a token has none; slot 0 holds other requests' dummy output."""
    pool, before = saved(kind)
    copy = pool.get_cpu_copy([8, 9])
    used_bytes = pool.host_used_bytes
    with pytest.raises(SlotError, match=f"slot {slot} at position 1 is padding.*begin at 4"):
        pool.get_cpu_copy([8, slot])
    refuses(pool, copy, [12, slot], SlotError, "is padding")
    assert used_bytes == pool.host_used_bytes
    assert [] == differences(before, image_of(pool))
    copy.release()


@pytest.mark.parametrize("kind", TILED)
def test_pages_in_tiles_are_copied_from_their_first_slot(kind: str) -> None:
    """A whole page is the row, so its middle can't move alone."""
    pool, _ = saved(kind)
    for slots in ([5, 6], [4, 6], [5, 4]):
        with pytest.raises(SlotError, match="middle of a row"):
            pool.get_cpu_copy(slots)


def test_pages_that_hold_other_tokens_are_refused() -> None:
    """Tokens of one page can't go into two pages, nor tokens of two pages into one."""
    pool, _ = saved("mla_nz")
    copy = pool.get_cpu_copy(list(range(4, 12)))
    refuses(
        pool,
        copy,
        [20, 21, 24, 25, 28, 29, 30, 31],
        SnapshotMiss,
        "row of the target begins at token 2",
    )
    refuses(pool, copy, [20, 21, 24, 25, 26, 27, 32, 33], SnapshotMiss, "token 4")
    short_pages = pool.get_cpu_copy([4, 5, 8, 9])
    refuses(pool, short_pages, [20, 21, 22, 23], SnapshotMiss, "token 2")
    assert short_pages[0][0][0].shape == (4, 1, 32)


def test_pages_that_are_not_full_come_back() -> None:
    """The target's pages must hold equally many tokens; the copy's lists have single tokens."""
    pool, before = saved("mla_nz_index")
    source, target = [4, 5, 8, 9, 10], [20, 21, 16, 17, 18]
    copy = pool.get_cpu_copy(source)
    rows = before["k", 1][source]
    assert rows.tobytes() == copy[1][0][0].view(torch.uint8).numpy().tobytes()
    pool.load_cpu_copy(copy, target)
    assert [] == differences(with_tokens(pool, before, target, before, source), image_of(pool))


@pytest.mark.parametrize("kind", ["mha", "mla_nz"])
def test_damage_is_found_before_a_byte_is_read_or_written(kind: str) -> None:
    """One bit of the last block is flipped."""
    device = small_device("cpu", 200)
    pool, _ = saved(kind, device, host_limit_bytes=LIMIT_BYTES + 4 * device.chunk_bytes)
    copy = pool.get_cpu_copy(list(range(4, 20)))
    copy.snapshot.lease.blocks[-1].bytes_view(1)[0] ^= 1
    refuses(pool, copy, list(range(24, 40)), SnapshotDamaged, "sealed as")
    with pytest.raises(SnapshotDamaged, match="use nothing of the snapshot"):
        [copy[layer][chunk] for layer in range(3) for chunk in range(2)]
    device.close()


# ---- what is invalid ------------------------------------------------------------------------


def test_rows_that_a_pool_lacks_are_logged_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang names them to every pool, and saves the state in those rows itself."""
    said: list[str] = []
    log = logging.getLogger("kvtide.npu.planes")
    monkeypatch.setattr(log, "warning", lambda text, name: said.append(text % name))
    pool = mha("cpu")
    first = pool.get_cpu_copy([4], mamba_indices=torch.tensor(1))
    pool.load_cpu_copy(first, [5], mamba_indices=torch.tensor(1), req_pool_index=3)
    pool.get_cpu_copy([4], mamba_indices=torch.tensor(1), req_pool_index=3)
    assert ["mamba_indices", "req_pool_index"] == [text.split(": ")[1].split()[0] for text in said]
    assert all("has no rows of requests" in text for text in said)
    first.release()


SIZES = ("size", "page_size", "layer_num", "start_layer", "end_layer", "host_limit_bytes")
WIDTHS = {
    "mha": ("head_num", "head_dim", "v_head_dim", "swa_head_num", "swa_head_dim", "swa_v_head_dim"),
    "mla_index": ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim"),
    "mla_nz": ("kv_lora_rank", "qk_rope_head_dim"),
    "packed": ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "kv_cache_dim"),
}


@pytest.mark.parametrize("value", NO_ROWS, ids=name_of)
@pytest.mark.parametrize("kind", WIDTHS)
def test_an_invalid_size_makes_no_pool(kind: str, value: Any) -> None:
    """The error is kvtide's, whichever size is invalid."""
    for name in (*SIZES, *WIDTHS[kind]):
        with pytest.raises(LayoutError):
            KINDS[kind]("cpu", **{name: value})
    if kind == "mla_index":
        for layers in ([value], [5, value]):
            with pytest.raises(LayoutError, match="indexer_layer_ids"):
                KINDS[kind]("cpu", indexer_layer_ids=layers)


@pytest.mark.parametrize("value", NO_ROWS, ids=name_of)
def test_an_invalid_layer_has_no_buffer(value: Any) -> None:
    """For example, 5.0 isn't layer 5."""
    pool = KINDS["mla_index"]("cpu", start_layer=0, indexer_layer_ids=(0, 1))
    for name in ("key", "value", "kv", "index_k"):
        with pytest.raises(LayoutError, match="layer"):
            getattr(pool, f"get_{name}_buffer")(value)
    with pytest.raises(LayoutError, match="cpu_offloading_chunk_size"):
        pool.cpu_offloading_chunk_size = value


@pytest.mark.parametrize(
    "loc",
    [None, 4, "4", [4, 5], torch.tensor([4.0, 5.5]), torch.tensor([True, False]), np.array([4, 5])],
    ids=name_of,
)
def test_invalid_slots_are_not_written_to(loc: Any) -> None:
    """4.5 isn't slot 4, and a mask isn't slots 0 and 1. Whether a slot exists isn't checked."""
    pool, before = saved("mla_index")
    good, keys = torch.tensor([4, 5]), torch.ones(2, 1, 48, dtype=torch.bfloat16)
    with pytest.raises(SlotError, match="integers"):
        pool.set_kv_buffer(AnyLayer(5), loc, keys)
    with pytest.raises(SlotError, match="integers"):
        pool.set_index_k_buffer(5, loc, torch.ones(2, 8, dtype=torch.bfloat16))
    for pair in ((loc, good), (good, loc)):
        with pytest.raises(SlotError, match="integers"):
            pool.move_kv_cache(*pair)
    assert [] == differences(before, image_of(pool))
