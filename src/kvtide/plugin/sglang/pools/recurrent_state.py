"""Recurrent state: SGLang's MambaPool, and the pools that hold both state and attention's KV.

A request has a single row of state, however many tokens it has: the convolution's window, the
recurrence, and further state of some models. The states between the tokens of a draft are left out:
SGLang computes them in each step, until it knows how many tokens it accepts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kvtide.layout import EveryNth, Mapped, OfRequest, Rule
from kvtide.plugin.description import Description, Part
from kvtide.plugin.reader import Reader, Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.package import name_of
from kvtide.plugin.sglang.pools.page_table import PageTable
from kvtide.plugin.sglang.pools.subject import Describer, Subject

READS: Table = {
    "MambaPool": (
        "mamba_cache",
        "_slot_siblings",
        "enable_linear_replayssm?",
        "enable_linear_replayssm_spec?",
        "replayssm_write_pos?",
        "replayssm_spec_write_pos?",
        "replayssm_cache_base?",
        "replayssm_is_flush?",
    ),
    "State": (
        "conv",
        "temporal",
        "replayssm_d?",
        "replayssm_k?",
        "replayssm_g?",
        "replayssm_rawv?",
        "replayssm_rawk?",
    ),
    "ShortConvPool": ("conv_state",),
    "NGramPool": ("context",),
    "HybridReqToTokenPool": ("mamba_pool",),
    "UnifiedHybridReqToTokenPool": ("mamba_allocator",),
    "UnifiedMambaSlotAllocator": ("_multi_ended_allocator",),
    "UnifiedMambaTokenToKVPoolAllocator": ("mamba_allocator",),
    "UnifiedMambaSWATokenToKVPoolAllocator": ("mamba_allocator",),
    "KVCache": ("cpu_copy_carries_mamba",),
    "HybridLinearKVPool": ("full_kv_pool", "mamba_pool", "start_layer"),
    "QSATokenToKVPool": (
        "qsa_compress_ratio",
        "qsa_key_state_buffer_pool",
        "qsa_compressed_k_buffer_pool",
        "qsa_rope_position_buffer",
    ),
}

STATE_POOLS = ("MambaPool", "UnifiedMambaPool", "UnifiedDraftMambaPool")
"""The classes that `with_state` knows."""


def describe_hybrid(subject: Subject) -> Description:
    """Keys and values of layers with attention, and the state of recurrent layers."""
    reads = Reader(subject.pool, READS)
    full = subject.part(reads["full_kv_pool"])
    joined = replace(
        full,
        name=type(subject.pool).__name__,
        parts=full.renamed("full"),
        first_layer=reads["start_layer"],
    )
    return with_state(joined, reads["mamba_pool"], subject)


def describe_qsa(subject: Subject) -> Description:
    """Like `describe_hybrid`, with the keys by which a query chooses tokens.

    `ratio` slots share such a key. Until there are so many, keys wait in a ring of the request,
    [request, ratio, head, head_dim], with their positions, [request, ratio, 3].
    """
    reads, hybrid = Reader(subject.pool, READS), describe_hybrid(subject)
    ratio = reads["qsa_compress_ratio"]
    pending = [keys.unflatten(0, (-1, ratio)) for keys in reads["qsa_key_state_buffer_pool"]]
    if not pending:
        return hybrid  # a pipeline stage without such layers never writes the positions
    by_request = (OfRequest("request"),)
    return replace(
        hybrid,
        parts=(
            *hybrid.parts,
            Part("index_k", reads["qsa_compressed_k_buffer_pool"], (EveryNth(ratio),)),
            Part("pending_k", pending, by_request),
            Part(
                "pending_rope",
                [reads["qsa_rope_position_buffer"].unflatten(0, (-1, ratio))],
                by_request,
            ),
        ),
    )


def with_state_of_requests(subject: Subject, description: Description) -> Description:
    """Adds the state that SGLang keeps in the request pool.

    If the pool's CPU copy includes the state, its description has it already.
    """
    bases = [base.__name__ for base in type(subject.request_pool).__mro__]
    if "HybridReqToTokenPool" not in bases:
        return description
    if Reader(subject.pool, READS)["cpu_copy_carries_mamba"]:
        return description
    return with_state(description, Reader(subject.request_pool, READS)["mamba_pool"], subject)


def with_state(description: Description, pool: Any, subject: Subject) -> Description:
    """Adds the parts of a state `pool`. Raises Refused for an unknown class.

    Under unified memory a request has a virtual slot, which a table maps to a row.
    """
    name = name_of(pool)
    if name not in STATE_POOLS:
        raise Refused(f"{description.name}: kvtide doesn't know {name}, which has its state")
    if name == "MambaPool":
        parts = _state_parts(pool, description.name)
        return replace(description, parts=(*description.parts, *parts))
    table = PageTable(_slot_allocator(subject), "mamba")
    return replace(
        description,
        parts=(*description.parts, *_state_parts(pool, description.name, Mapped("mamba_row"))),
        maps={**description.maps, "mamba_row": table},
        shares_memory=True,
    )


def _slot_allocator(subject: Subject) -> Any:
    """The allocator that has the table from virtual slots to rows."""
    for owner in (subject.allocator, subject.request_pool):
        kind = name_of(owner)
        if kind in READS and "mamba_allocator" in READS[kind]:
            found = Reader(owner, READS)["mamba_allocator"]
            if name_of(found) == "UnifiedMambaSlotAllocator":
                return Reader(found, READS)["_multi_ended_allocator"]
            return found
    raise Refused(
        f"{type(subject.pool).__name__}: neither its allocator nor the request pool says where a "
        "request's state lies"
    )


def _state_parts(pool: Any, whose: str, *more: Rule) -> tuple[Part, ...]:
    reads = Reader(pool, READS)
    cache = Reader(reads["mamba_cache"], READS)
    rules = (OfRequest("mamba"), *more)
    parts = [Part(f"conv{n}", _layers(window), rules) for n, window in enumerate(cache["conv"])]
    parts.append(Part("temporal", _layers(cache["temporal"]), rules))
    parts += _replay_parts(reads, cache, whose, rules)
    parts += [_sibling_part(sibling, whose, rules) for sibling in reads["_slot_siblings"]]
    return tuple(parts)


def _replay_parts(
    reads: Reader, cache: Reader, whose: str, state_rules: tuple[Rule, ...]
) -> list[Part]:
    """ReplaySSM's ring, with the tokens since the recurrence was last written, and its cursors.

    In plain decoding the ring has the same row as the state. In speculative decoding it has the row
    of the request. But if each step writes the recurrence (KDA), every step starts a new ring:
    there are no cursors, and the ring needn't be saved.
    """
    by_state, by_request = reads["replayssm_write_pos"], reads["replayssm_spec_write_pos"]
    if by_state is not None and reads["enable_linear_replayssm_spec"]:
        raise Refused(
            f"{whose}: --enable-linear-replayssm and --enable-linear-replayssm-spec share one ring "
            "of its state; use one of them"
        )
    if by_state is not None:
        cursors, rules = {"write_pos": by_state}, state_rules
    elif by_request is not None:
        names = ("replayssm_cache_base", "replayssm_is_flush")
        cursors = {"write_pos": by_request, **{name[10:]: reads[name] for name in names}}
        rules = (OfRequest("request"),)
    else:
        return []
    rings = {name: cache[f"replayssm_{name}"] for name in ("d", "k", "g", "rawv", "rawk")}
    return [
        *(Part(f"ring_{name}", _layers(r), rules) for name, r in rings.items() if r is not None),
        *(Part(f"ring_{name}", [cursor], rules) for name, cursor in cursors.items()),
    ]


def _sibling_part(sibling: Any, whose: str, rules: tuple[Rule, ...]) -> Part:
    """State in the rows of a MambaPool: [layer, row, …], or [row, token] for n-grams."""
    name = name_of(sibling)
    if name == "ShortConvPool":
        return Part("short_conv", _layers(Reader(sibling, READS)["conv_state"]), rules)
    if name == "NGramPool":
        return Part("ngram", [Reader(sibling, READS)["context"]], rules)
    raise Refused(f"{whose}: kvtide doesn't know {name}, whose rows go with its state's")


def _layers(state: torch.Tensor) -> list[torch.Tensor]:
    """[layer, row, …] as a tensor per layer, with the axes of a row in their order in memory.

    On CPUs with AMX the convolution's window is transposed.
    """
    inner = sorted(range(2, state.dim()), key=state.stride, reverse=True)
    return list(state.permute(0, 1, *inner).unbind(0))


DESCRIBERS: Mapping[str, Describer] = {
    "HybridLinearKVPool": describe_hybrid,
    "QSATokenToKVPool": describe_qsa,
}
