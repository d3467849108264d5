"""Every public method of the classes in kvtide.pool and kvtide.npu works with its base's signature.

The classes are found by looking through the packages. A new class without a maker here fails, and
so does a new method without a call.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kvtide.npu
import kvtide.pool
from kvtide.device import CPUDevice
from kvtide.errors import LayoutError
from kvtide.npu import (
    CPUCopy,
    NPUMHATokenToKVPool,
    NPUMLATokenToKVPool,
    NPUPagedTokenToKVPoolAllocator,
    NPUTokenToKVPool,
    TokenToKVPoolAllocator,
)
from kvtide.npu.copy import CopyPart, LayerCopy
from kvtide.npu.planes import PlaneBuffer
from kvtide.pool import PageAllocator, Pool
from kvtide.pool.maps import EngineMap
from kvtide.pool.memory import PlaneMemory, allocated
from support.npu_pools import AnyLayer, mha, mla, packed
from support.pools import small_geometry

Call = Callable[[Any], Any]


def paged() -> NPUPagedTokenToKVPoolAllocator:
    """Makes an allocator of pages over a pool; two pages are taken."""
    allocator = NPUPagedTokenToKVPoolAllocator(64, 4, torch.bfloat16, "cpu", mha("cpu"), False)
    allocator.alloc(8)
    return allocator


def tokens() -> TokenToKVPoolAllocator:
    """Makes an allocator of tokens over a pool; eight tokens are taken."""
    pool = mha("cpu", page_size=1)
    allocator = TokenToKVPoolAllocator(64, torch.bfloat16, "cpu", pool, False)
    allocator.alloc(8)
    return allocator


def part_in_tiles() -> CopyPart:
    """Makes a part of a copy with tokens in two tiles and pages of 4."""
    return CopyPart("latent", 0, 0, (1, 32), torch.bfloat16, 2, 4)


def taken_pages() -> PageAllocator:
    """Makes an allocator that holds page 0."""
    pages = PageAllocator(3)
    pages.acquire(1)
    return pages


MAKERS: dict[type, list[Callable[[], Any]]] = {
    Pool: [lambda: Pool.create(small_geometry(), CPUDevice(lanes=1), page_count=2)],
    PageAllocator: [taken_pages],
    EngineMap: [lambda: EngineMap("moved", [0])],
    PlaneMemory: [lambda: allocated(small_geometry().planes[0], 0, 4, CPUDevice(lanes=1))],
    NPUMHATokenToKVPool: [lambda: mha("cpu"), lambda: mha("cpu", use_fia=True)],
    NPUMLATokenToKVPool: [
        lambda: mla("cpu", index_head_dim=8),
        lambda: mla("cpu", use_fia_nz=True, index_head_dim=8),
        lambda: packed("cpu"),
    ],
    NPUPagedTokenToKVPoolAllocator: [paged],
    TokenToKVPoolAllocator: [tokens],
    CPUCopy: [lambda: mha("cpu").get_cpu_copy([4])],
    LayerCopy: [lambda: mha("cpu").get_cpu_copy([4])[0]],
    CopyPart: [part_in_tiles],
    PlaneBuffer: [lambda: PlaneBuffer("k", torch.zeros(1, 2, 4, 2, 3), (5,))],
}
ABSTRACT = {NPUTokenToKVPool}


def has_index_keys(pool: Any) -> bool:
    """Returns whether the pool may have index keys."""
    return isinstance(pool, NPUMLATokenToKVPool)


def refused(call: Callable[[], Any]) -> None:
    """Asserts that a pool names what it doesn't have."""
    with pytest.raises(LayoutError, match="has no 'index_"):
        call()


def on_index(call: Call, needs_scales: bool = False) -> Call:
    """A call that pools without index keys, or without their scales, must refuse."""

    def ask(pool: Any) -> None:
        there = has_index_keys(pool) and (not needs_scales or pool.dsa_kv_cache_store_fp8)
        if there:
            call(pool)
        else:
            refused(lambda: call(pool))

    return ask


def write_kv(pool: Any) -> None:
    """Writes ones in the form of the layer's buffers."""
    keys, values = pool.get_kv_buffer(5)
    widths = [buffer.shape[-2:] for buffer in (keys, values)]
    if not widths[1][-1]:
        widths = [torch.Size((1, 128)), torch.Size((1, 8))]
    pool.set_kv_buffer(AnyLayer(5), torch.tensor([4, 5]), *(torch.ones(2, *w) for w in widths))
    assert pool.get_key_buffer(5).view(torch.uint8).any()


def load(owner: Any) -> None:
    """Loads a copy into other slots, with every argument."""
    copy = owner.get_cpu_copy([4, 5])
    owner.load_cpu_copy(copy, [8, 9], mamba_indices=None, req_pool_index=3)
    owner.load_cpu_copy(copy, [8, 9], None, 3)


ONE, TWO = torch.tensor([1]), torch.tensor([2])
CALLS: dict[str, Call] = {
    "acquire": lambda pages: pages.acquire(2),
    "acquire_to": lambda pages: pages.acquire_to([], 2),
    "check_held": lambda pages: pages.check_held([0]),
    "give_back": lambda pages: pages.give_back([0]),
    "hold_again": lambda pages: pages.hold_again([0]),
    "release": lambda owner: owner.release([0]) if isinstance(owner, PageAllocator)
    else owner.release(),
    "plane": lambda pool: pool.plane("k", 0),
    "checked": lambda pool: pool.checked([0]),
    "slots_of": lambda pool: pool.slots_of([0]),
    "rows_of": lambda pool: pool.rows_of(np.arange(3), None),
    "create": lambda pool: type(pool).create(pool.geometry, pool.device, page_count=1),
    "adopt": lambda pool: type(pool).adopt(
        pool.geometry, pool.device, {"k": torch.zeros(2, 4, 1, 6).bfloat16(),
                                     "v": torch.zeros(2, 4, 1, 3).bfloat16()}
    ),
    "get_key_buffer": lambda pool: pool.get_key_buffer(6),
    "get_value_buffer": lambda pool: pool.get_value_buffer(6),
    "get_kv_buffer": lambda pool: pool.get_kv_buffer(6),
    "get_index_k_buffer": on_index(lambda pool: pool.get_index_k_buffer(6)),
    "get_index_k_scale_buffer": on_index(lambda pool: pool.get_index_k_scale_buffer(6), True),
    "set_kv_buffer": write_kv,
    "set_index_k_buffer": on_index(
        lambda pool: pool.set_index_k_buffer(6, torch.tensor([4]), torch.ones(1, 1, 8))
    ),
    "set_index_k_scale_buffer": on_index(
        lambda pool: pool.set_index_k_scale_buffer(6, torch.tensor([4]), torch.ones(1, 1)), True
    ),
    "move_kv_cache": lambda pool: pool.move_kv_cache(torch.tensor([4]), torch.tensor([5])),
    "get_contiguous_buf_infos": lambda pool: pool.get_contiguous_buf_infos(),
    "get_state_buf_infos": lambda pool: pool.get_state_buf_infos(),
    "get_kv_size_bytes": lambda pool: pool.get_kv_size_bytes(),
    "get_cpu_copy": lambda owner: owner.get_cpu_copy([4], mamba_indices=[1], req_pool_index=3),
    "load_cpu_copy": load,
    "close": lambda pool: pool.close(),
    "clear": lambda allocator: allocator.clear(),
    "available_size": lambda allocator: allocator.available_size(),
    "get_kvcache": lambda allocator: allocator.get_kvcache(),
    "alloc": lambda allocator: allocator.alloc(8),
    "alloc_extend": lambda allocator: allocator.alloc_extend(
        ONE, ONE, TWO, TWO, torch.tensor([4]), 1, None
    ),
    "alloc_decode": lambda allocator: allocator.alloc_decode(TWO, TWO, torch.tensor([4])),
    "free": lambda allocator: allocator.free(torch.tensor([4])),
    "to_tokens": lambda part: part.to_tokens(torch.zeros(1, 256, dtype=torch.uint8)),
    "to_rows": lambda part: part.to_rows(torch.zeros(4, 1, 32).bfloat16()),
    "rows": lambda plane: plane.rows("float32"),
    "write": lambda plane: plane.write(0, torch.tensor([1]), torch.ones(1, 2, 3)),
    "move": lambda plane: plane.move(0, torch.tensor([1]), torch.tensor([2])),
}  # fmt: skip


def pool_classes() -> list[type]:
    """Finds all public classes that modules of kvtide.pool and kvtide.npu define."""
    found: set[type] = set()
    for package in (kvtide.pool, kvtide.npu):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for name, kind in vars(importlib.import_module(module.name)).items():
                is_defined_here = inspect.isclass(kind) and kind.__module__ == module.name
                is_public = not name.startswith("_") and not getattr(kind, "_is_protocol", False)
                if is_defined_here and is_public:
                    found.add(kind)
    return sorted(found, key=lambda kind: kind.__name__)


def methods_of(kind: type) -> Iterator[str]:
    """Finds the public methods of a class and of its bases."""
    for name, member in inspect.getmembers(kind):
        if not name.startswith("_") and callable(member):
            yield name


def test_the_classes_are_found() -> None:
    """Every public class has a maker here, or is the base of a class that has one."""
    assert set(MAKERS) | ABSTRACT == set(pool_classes())
    assert all(any(issubclass(kind, base) for kind in MAKERS) for base in ABSTRACT)


def test_every_call_is_of_an_existing_method() -> None:
    """If a method is renamed, its call must be renamed, too."""
    assert set(CALLS) == {name for kind in MAKERS for name in methods_of(kind)}


@pytest.mark.parametrize("kind", pool_classes(), ids=lambda kind: kind.__name__)
def test_methods_have_their_bases_signatures(kind: type) -> None:
    """Names, order, kinds and defaults of all parameters are equal."""
    for base in kind.__mro__[1:-1]:
        for name in methods_of(base):
            expected, found = (inspect.signature(getattr(owner, name)) for owner in (base, kind))
            assert [*expected.parameters.values()] == [*found.parameters.values()], name


METHODS = [(kind, name) for kind in MAKERS for name in methods_of(kind)]


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_methods_work(kind: type, name: str) -> None:
    """Each method is called on objects of every kind that the makers give."""
    for make in MAKERS[kind]:
        CALLS[name](make())


SGLANG_CONSTRUCTORS = {
    NPUMHATokenToKVPool: (
        "size page_size dtype head_num head_dim layer_num device enable_memory_saver v_head_dim "
        "swa_head_num swa_head_dim swa_v_head_dim start_layer end_layer enable_alt_stream "
        "enable_kv_cache_copy kv_cache_layout quant_method post_capture_active allocation_label"
    ),
    NPUMLATokenToKVPool: (
        "size page_size dtype kv_lora_rank qk_rope_head_dim layer_num device enable_memory_saver "
        "index_head_dim index_size start_layer end_layer index_page_size indexer_layer_ids "
        "kv_cache_dim is_draft_worker"
    ),
    NPUPagedTokenToKVPoolAllocator: "size page_size dtype device kvcache need_sort",
    TokenToKVPoolAllocator: "size dtype device kvcache need_sort",
}
SGLANG_METHODS = {
    "get_key_buffer": "layer_id",
    "get_value_buffer": "layer_id",
    "get_kv_buffer": "layer_id",
    "get_index_k_buffer": "layer_id",
    "set_kv_buffer": "layer loc_info cache_k cache_v k_scale v_scale layer_id_override dcp_kv_mask",
    "set_index_k_buffer": "layer_id loc index_k",
    "get_contiguous_buf_infos": "",
    "get_state_buf_infos": "",
    "get_kv_size_bytes": "",
    "move_kv_cache": "tgt_loc src_loc",
    "get_cpu_copy": "indices mamba_indices req_pool_index",
    "load_cpu_copy": "kv_cache_cpu indices mamba_indices req_pool_index",
    "alloc": "need_size",
    "alloc_extend": (
        "prefix_lens prefix_lens_cpu seq_lens seq_lens_cpu last_loc extend_num_tokens num_new_pages"
    ),
    "alloc_decode": "seq_lens seq_lens_cpu last_loc",
    "free": "free_index",
}


@pytest.mark.parametrize("kind", SGLANG_CONSTRUCTORS)
def test_names_are_sglangs(kind: type) -> None:
    """Parameters have SGLang 0.5.23's names; parameters of kvtide are keyword-only."""
    parameters = inspect.signature(kind).parameters.values()
    shared = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert SGLANG_CONSTRUCTORS[kind].split() == shared
    for name, expected in SGLANG_METHODS.items():
        if hasattr(kind, name):
            assert ["self", *expected.split()] == [
                *inspect.signature(getattr(kind, name)).parameters
            ]
