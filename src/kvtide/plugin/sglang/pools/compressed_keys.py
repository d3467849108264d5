"""Compressed keys, which MiniCPM's sparse attention keeps in addition to a request's keys.

A compressed key is the mean of the keys of some consecutive tokens. It is written once, together
with the last of these tokens, and read by every later step. SGLang keeps compressed keys in the
pool's buffers of keys, in reserved slots. Two tables of the request pool, [request, entry], have a
request's slots.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvtide.layout import EveryToken
from kvtide.plugin.description import Description, Part
from kvtide.plugin.reader import Reader, Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.package import name_of
from kvtide.plugin.sglang.rules import EntriesOfRequest

READS: Table = {
    "ReqToTokenPool": ("_aux_cache?",),
    "DecodeReqToTokenPool": ("_aux_cache?",),
    "MiniCPMCompressedCache": ("kernel_size", "kernel_stride"),
}
"""The tables of the first two classes are read by name, for any class of request pool."""

REQUEST_POOLS = ("ReqToTokenPool", "HybridReqToTokenPool")
"""The request pools of ordinary servers, where `ordinary.allocation` acquires the slots."""

LEVELS = {"k1": 1, "k2": 4}
"""SGLang's names of the tables. An entry stands for this many times as many tokens as in k1."""


def with_compressed_keys(request_pool: Any, description: Description) -> Description:
    """Adds the compressed keys that are attached to the request pool, if any.

    Raises Refused for any other attachment, and for a pool to which SGLang's kernel can't write
    such keys, because it needs a plain row of keys for each slot.
    """
    attached = getattr(request_pool, "_aux_cache", None)
    if attached is None:
        return description
    kind, whose = name_of(attached), description.name
    if kind != "MiniCPMCompressedCache":
        raise Refused(
            f"{whose}: kvtide doesn't know {kind}, which is attached to the request pool and keeps "
            "more of a request"
        )
    table_of = name_of(request_pool)
    if table_of not in REQUEST_POOLS:
        raise Refused(
            f"{whose}: with {table_of} a request that comes back has no slots for the keys in "
            f"{kind}, and nobody gives it any: there is nowhere to write them"
        )
    keys = _keys(description, kind)
    reads = Reader(attached, READS)
    parts, maps = list(description.parts), dict(description.maps)
    for level, times in LEVELS.items():
        name, table = f"{keys.name}.{level}", _table(request_pool, level)
        size, stride = reads["kernel_size"] * times, reads["kernel_stride"] * times
        rule = EntriesOfRequest(name, table.shape[1], size, stride)
        parts.append(Part(name, keys.tensors, (rule,)))
        maps[name] = table.view(-1)
    return replace(description, parts=tuple(parts), maps=maps, shares_memory=True)


def _keys(description: Description, kind: str) -> Part:
    """The part with the tokens' keys. Raises Refused unless all parts are plain keys and values."""
    by_token = [part for part in description.parts if part.rules[0].unit != "request"]
    names = [part.name.rpartition(".")[2] for part in by_token]
    if names != ["k", "v"] or any(part.rules != (EveryToken(),) for part in by_token):
        raise Refused(
            f"{description.name}: kvtide knows {kind} beside keys and values of which each slot "
            f"has a row, and not beside {', '.join(part.name for part in by_token)}"
        )
    return by_token[0]


def _table(request_pool: Any, level: str) -> torch.Tensor:
    """The table [request, entry], which MiniCPMCompressedCache sets on the request pool."""
    name = f"req_to_sparse_{level}_token"
    table = getattr(request_pool, name, None)
    if not isinstance(table, torch.Tensor):
        raise Refused(f"{type(request_pool).__name__} has no table {name!r} here")
    return table
