"""Classes of SGLang's by module and name, and pools whose layers lack a tensor."""

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
    """By its name."""
    return next(found for found in CASES if found.name == name)


def disguise(thing: Any) -> None:
    """Makes it one of another package's class of the same name, with a buffer more."""
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
def test_a_class_of_another_package_is_none_of_sglangs(name: str) -> None:
    """Whatever it is called: it may hold what isn't moved."""
    built = case(name).build()
    try:
        subject = Subject(built.pool, built.allocator, built.request_pool, built.window_tokens)
        describe_with_draft(subject, built.draft_pools)
        disguise(HELD[name](built))
        with pytest.raises(Refused, match=r"vendor\.pools\."):
            describe_with_draft(subject, built.draft_pools)
    finally:
        built.undo()


def test_a_pool_of_kvtides_own_is_none_of_sglangs() -> None:
    """Two of them have the names of SGLang's."""
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
    """Three layers of keys and two of values: nobody knows which one's are missing."""
    built = case(name).build()
    SHORT[name](built).pop()
    with pytest.raises(Refused, match=r"a tensor of each kind, and the tensors are \{'k': \d, 'v'"):
        describe(Subject(built.pool, built.allocator, built.request_pool, built.window_tokens))
    built.undo()
