"""Classes of SGLang are known by module and name; pools that lack a layer's tensor are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtide.npu import NPUMHATokenToKVPool
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.cases.all_cases import CASES
from kvtide.plugin.sglang.cases.round_trips import Built, Case
from kvtide.plugin.sglang.package import name_of
from kvtide.plugin.sglang.pools.describe import describe
from kvtide.plugin.sglang.pools.draft_model import describe_with_draft
from kvtide.plugin.sglang.pools.subject import Subject


def case(name: str) -> Case:
    """Returns the case of that name."""
    return next(found for found in CASES if found.name == name)


def disguise(thing: Any) -> None:
    """Gives the object a class of another package with the same name and another buffer."""
    kind = type(thing)
    more = {"__module__": "vendor.pools", "more": torch.zeros(4)}
    thing.__class__ = type(kind.__name__, (kind,), more)


HELD: dict[str, Callable[[Built], Any]] = {
    "MHA, page 1": lambda built: built.pool,
    "MHA beside state": lambda built: built.pool.mamba_pool,
    "MLA beside state": lambda built: built.pool.full_kv_pool,
    "state, a short convolution and n-grams": lambda built: built.pool.mamba_pool._slot_siblings[1],
    "SWA and state in the request pool": lambda built: built.request_pool.mamba_pool,
    "MHA beside MiniCPM's compressed keys": lambda built: built.request_pool._aux_cache,
    "unified SWA beside state": lambda built: built.request_pool.mamba_pool,
    "NPU MHA": lambda built: built.pool,
}


@pytest.mark.parametrize("name", HELD)
def test_a_class_of_another_package_is_unknown(name: str) -> None:
    """Such a class may hold bytes that aren't moved, though it has the same name."""
    built = case(name).build()
    try:
        subject = Subject(built.pool, built.allocator, built.request_pool, built.window_tokens)
        describe_with_draft(subject, built.draft_pools)
        disguise(HELD[name](built))
        with pytest.raises(Refused, match=r"vendor\.pools\."):
            describe_with_draft(subject, built.draft_pools)
    finally:
        built.undo()


def test_a_pool_of_kvtide_is_unknown_in_sglang() -> None:
    """Two of kvtide's pools have names of SGLang's."""
    pool = NPUMHATokenToKVPool(64, 4, torch.bfloat16, 1, 8, 1, "cpu", False)
    assert "kvtide.npu.mha.NPUMHATokenToKVPool" == name_of(pool)
    with pytest.raises(Refused, match=r"kvtide\.npu\.mha\.NPUMHATokenToKVPool isn't known"):
        describe(Subject(pool))
    pool.close()


SHORT: dict[str, Callable[[Built], list[Any]]] = {
    "MHA, page 1": lambda built: built.pool.v_buffer,
    "MHA beside state": lambda built: built.pool.full_kv_pool.k_buffer,
    "unified SWA, page 1": lambda built: built.pool.swa_kv_pool.v_buffer,
}


@pytest.mark.parametrize("name", SHORT)
def test_a_layer_without_one_of_its_tensors_is_refused(name: str) -> None:
    """With three layers of keys and two of values, nobody knows which values are missing."""
    built = case(name).build()
    SHORT[name](built).pop()
    with pytest.raises(Refused, match=r"a tensor of each kind, and the tensors are \{'k': \d, 'v'"):
        describe(Subject(built.pool, built.allocator, built.request_pool, built.window_tokens))
    built.undo()
