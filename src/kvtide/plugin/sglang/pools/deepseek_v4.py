"""DeepSeek-V4's pools: a sliding window, compressed caches of several ratios, compressors' states.

The parts of a request's KV in SGLang 0.5.23, with pages of 256 slots:

    swa            the main cache, in pages of the window's slots, or in a ring of the request
    c1 c2 c4 c128  an entry for that many tokens; a page's entries are in a separate page
    c4_index …     the indexer's keys with their scales, also in pages
    c4_state       a ring for each page of the window, from which the next C4 entry is made
    c128_state     a ring of the request, from which the next C128 entry is made; also c2_state

A page has first all data rows and then all scale rows, so pages move as a whole. The place of an
entry in its page depends only on the token's place in its page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from kvtide.layout import EveryNth, Mapped, OfRequest, Rule
from kvtide.plugin.description import Description, Part
from kvtide.plugin.reader import Reader, Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.package import name_of
from kvtide.plugin.sglang.pools.kv_cache import evenly
from kvtide.plugin.sglang.pools.subject import Describer, Subject
from kvtide.plugin.sglang.rules import LastTokens, PagesOfRequest

READS: Table = {
    "KVCache": ("page_size",),
    "BaseSWAKVPool": ("swa_req_ring_size?",),
    "DeepSeekV4TokenToKVPool": (
        *("_stage_start", "full_size?", "num_req_slots", "sliding_window", "swa_page_size"),
        *("compression_ratios", "kv_pools", "index_pools"),
        *("compress_state_pools", "indexer_compress_state_pools"),
        *("swa_kv_pool?", "unified_kv_pool?", "request_window?"),
        *("full_to_swa_index_mapping?", "swa_valid_from?"),
    ),
    "DSV4NPUTokenToKVPool": ("c128_page_size",),
    "DeepSeekV4SingleKVPool": ("kv_buffer",),
    "DeepSeekV4IndexerPool": (
        *("uses_aiter_fp4_layout", "index_k_with_scale_buffer?"),
        *("index_k_payload_buffer?", "index_k_scale_buffer?"),
    ),
    "NPUDeepSeekV4IndexerPool": ("index_k_buffer", "index_scale_buffer"),
    "DeepSeekV4UnifiedKVPool": ("kv_buffer", "kv_buffer_rope", "fp8", "swa_pages", "num_slots"),
    "CompressStatePool": (
        *("ratio", "ring_size", "request_scoped", "online", "online_mtp_max_draft_tokens"),
        "kv_score_buffer",
    ),
    "KVAndScore": ("kv_score",),
    "RequestWindow": ("state", "tags", "capacity", "page_size", "rows", "num_slots"),
    "DSV4ReqToTokenTablesMixin": ("req_to_c128_sidecar",),
}

WITHIN = (
    *("DeepSeekV4SingleKVPool", "DeepSeekV4UniformFP8KVPool", "DeepSeekV4IndexerPool"),
    *("DeepSeekV4UnifiedKVPool", "CompressStatePool", "NPUDeepSeekV4SingleKVPool"),
    *("NPUDeepSeekV4IndexerPool", "NPUCompressStatePool"),
)
"""The classes of the pools inside these pools."""

WINDOW = "full_to_swa"
SIDECAR = "c128_sidecar"
OWN = (OfRequest(),)


def describe_v4(subject: Subject) -> Description:
    """All regions of a pool on a GPU, in any of its forms."""
    reads = Reader(subject.pool, READS)
    _refuse_partly_on_host(reads)
    in_window = _window_rules(subject, reads)
    if reads["unified_kv_pool"] is not None:
        # On ROCm each layer has a single buffer: the window's ring, then the compressed entries.
        parts = [*_unified(reads), *_index(reads), *_states(reads, OWN)]
    else:
        compressed = [*_compressed(reads), *_index(reads)]
        parts = [*_window(reads, in_window), *compressed, *_states(reads, in_window)]
    if reads["swa_valid_from"] is not None:
        parts.append(Part("swa_valid_from", [reads["swa_valid_from"]], OWN))
    return _described(subject, reads, parts)


def describe_v4_npu(subject: Subject) -> Description:
    """All regions on an NPU. Caches have a row for each entry, except C128.

    C128 has pages from a separate allocator, and a table says which request has which page.
    """
    reads = Reader(subject.pool, READS)
    swa = _inner(reads, reads["swa_kv_pool"])["kv_buffer"]
    if any(tensor.dim() != 4 for tensor in swa):
        raise Refused(
            f"{_name(reads)}: its main cache isn't [page, slot, 1, width], which is the only form "
            "that kvtide knows on an NPU"
        )
    in_window = _window_rules(subject, reads)
    # The A5 packs its cache as fp8, and also keeps the states of C4 by request.
    packs = bool(swa) and swa[0].dtype == torch.float8_e4m3fn
    parts = [Part("swa", _flat(swa), in_window[:-1]), *_states(reads, OWN if packs else in_window)]
    kv_pools, index_pools = reads["kv_pools"], reads["index_pools"]
    for ratio in sorted(set(kv_pools) - {128}):
        tensors = _inner(reads, kv_pools[ratio])["kv_buffer"]
        parts.append(Part(f"c{ratio}", _flat(tensors), (EveryNth(ratio),)))
    for ratio in sorted(index_pools):
        # It also has the GPU's packed buffer, which nothing on an NPU writes or reads.
        index = _inner(reads, index_pools[ratio])
        keys, scales = _flat(index["index_k_buffer"]), _flat(index["index_scale_buffer"])
        names, rules = (f"c{ratio}_index", f"c{ratio}_index_scale"), (EveryNth(ratio),)
        both = zip(names, (keys, scales), strict=True)
        parts += evenly(reads.owner, *(Part(name, tensors, rules) for name, tensors in both))
    maps: dict[str, Any] = {}
    if 128 in kv_pools:
        table = Reader(subject.request_pool, READS)["req_to_c128_sidecar"]
        tensors = _inner(reads, kv_pools[128])["kv_buffer"]
        rule = PagesOfRequest(SIDECAR, table.shape[1], 128, reads["c128_page_size"])
        parts.append(Part("c128", [tensor.flatten(1) for tensor in tensors], (rule,)))
        maps[SIDECAR] = table.view(-1)
    return _described(subject, reads, parts, maps)


DESCRIBERS: Mapping[str, Describer] = {
    "DeepSeekV4TokenToKVPool": describe_v4,
    "DSV4NPUTokenToKVPool": describe_v4_npu,
}


def _described(
    subject: Subject, reads: Reader, parts: Sequence[Part], maps: Mapping[str, Any] | None = None
) -> Description:
    mapping = reads["full_to_swa_index_mapping"]
    if reads["full_size"] is None and mapping is None:
        raise Refused(f"{_name(reads)}: neither full_size nor a map says how many slots it has")
    # The map has an entry for each slot, and a last entry for "no slot".
    size = reads["full_size"]
    slot_count = mapping.numel() - 1 if size is None else size + reads["page_size"]
    windows = {} if mapping is None else {WINDOW: mapping}
    return Description(
        type(subject.pool).__name__,
        tuple(part for part in parts if part.tensors),
        reads["page_size"],
        slot_count,
        {**windows, **(maps or {})},
        first_layer=reads["_stage_start"],
    )


def _window_rules(subject: Subject, reads: Reader) -> tuple[Rule, ...]:
    """The rules from the tokens in the window to its pages."""
    tokens = subject.window_tokens or reads["sliding_window"]
    recent = LastTokens(tokens, reads["page_size"])
    return (recent, Mapped(WINDOW, hole=0), EveryNth(reads["swa_page_size"]))


def _window(reads: Reader, in_window: tuple[Rule, ...]) -> list[Part]:
    """The main cache: the window's pages, a ring of pages a request, or rows with positions."""
    window = reads["request_window"]
    if window is not None:
        held = Reader(window, READS)
        pages = held["capacity"] // held["page_size"]
        state = Reader(held["state"], READS)["kv_buffer"]
        slots, tags = held["num_slots"], held["tags"][:, : held["rows"]]
        return [
            Part("swa", _rings(state, pages, slots), OWN),
            Part("swa_tags", [layer.view(slots, -1) for layer in tags], OWN),
        ]
    swa = _inner(reads, reads["swa_kv_pool"])
    if reads["swa_req_ring_size"] is not None:
        pages = reads["swa_req_ring_size"] // swa["page_size"]
        return [Part("swa", _rings(swa["kv_buffer"], pages, reads["num_req_slots"]), OWN)]
    if reads["full_to_swa_index_mapping"] is None:
        raise Refused(f"{_name(reads)}: it has no map to its window's slots yet")
    return [Part("swa", swa["kv_buffer"], (*in_window[:-1], EveryNth(swa["page_size"])))]


def _compressed(reads: Reader) -> Iterator[Part]:
    """The compressed caches, by page."""
    for ratio, pool in reads["kv_pools"].items():
        if pool is not None:
            inner = _inner(reads, pool)
            yield Part(f"c{ratio}", inner["kv_buffer"], (EveryNth(ratio * inner["page_size"]),))


def _index(reads: Reader) -> Iterator[Part]:
    """The indexer's keys in pages, with their scales; in fp4 on ROCm the scales are separate."""
    for ratio, pool in reads["index_pools"].items():
        index = _inner(reads, pool)
        rules = (EveryNth(ratio * index["page_size"]),)
        if index["uses_aiter_fp4_layout"]:
            keys = Part(f"c{ratio}_index", index["index_k_payload_buffer"], rules)
            scales = Part(f"c{ratio}_index_scale", index["index_k_scale_buffer"], rules)
            yield from evenly(reads.owner, keys, scales)
        else:
            yield Part(f"c{ratio}_index", index["index_k_with_scale_buffer"], rules)


def _unified(reads: Reader) -> Iterator[Part]:
    """ROCm's buffers; in fp8 the rotated half is in separate buffers."""
    unified, ratios = _inner(reads, reads["unified_kv_pool"]), reads["compression_ratios"]
    halves = {"": unified["kv_buffer"]}
    if unified["fp8"]:
        halves["_rope"] = unified["kv_buffer_rope"]
    ring_rows, page_size = unified["swa_pages"], reads["page_size"]
    for suffix, layers in halves.items():
        rings = [layer[:ring_rows].view(unified["num_slots"], -1) for layer in layers]
        yield Part(f"swa{suffix}", rings, OWN)
        by_layer = ratios[reads["_stage_start"] : reads["_stage_start"] + len(layers)]
        for ratio in sorted(set(by_layer) - {0}):
            entries = page_size // ratio
            pages = [
                layer[ring_rows:].view(-1, entries * layer.shape[1])
                for layer, layer_ratio in zip(layers, by_layer, strict=True)
                if layer_ratio == ratio
            ]
            yield Part(f"c{ratio}{suffix}", pages, (EveryNth(page_size),))


def _states(reads: Reader, c4_rules: tuple[Rule, ...]) -> Iterator[Part]:
    """The compressors' states; a row is a ring. States of ratio 4 have the rules `c4_rules`."""
    kinds = {
        "state": reads["compress_state_pools"],
        "index_state": reads["indexer_compress_state_pools"],
    }
    for kind, pools in kinds.items():
        found: dict[int, list[torch.Tensor]] = {}
        for pool in pools:
            if pool is not None:
                state = _inner(reads, pool)
                _refuse_pending(reads, state)
                found.setdefault(state["ratio"], []).append(_rings_of_state(state))
        for ratio, tensors in found.items():
            yield Part(f"c{ratio}_{kind}", tensors, c4_rules if ratio == 4 else OWN)


def _rings_of_state(state: Reader) -> torch.Tensor:
    """[ring, all its rows]; rows after the last whole ring are padding."""
    rows: torch.Tensor = Reader(state["kv_score_buffer"], READS)["kv_score"]
    ring = state["ring_size"]
    count = rows.shape[0] // ring
    return rows[: count * ring].view(count, -1)


def _inner(reads: Reader, pool: Any) -> Reader:
    """Reads a pool inside this one. Raises Refused for an unknown class."""
    if name_of(pool) not in WITHIN:
        raise Refused(f"{_name(reads)}: kvtide doesn't know {name_of(pool)}, which is a part of it")
    return Reader(pool, READS)


def _refuse_pending(reads: Reader, state: Reader) -> None:
    if state["online"] and state["online_mtp_max_draft_tokens"]:
        raise Refused(
            f"{_name(reads)}: with SGLANG_EXPERIMENTAL_ONLINE_C128_MTP a request's C128 state "
            "lacks the drafts accepted last until the next forward of its batch commits them, and "
            "a forward without the request forgets them; leave that variable unset to have such "
            "requests saved"
        )


def _refuse_partly_on_host(reads: Reader) -> None:
    if any(name_of(pool) == "HiSparseC4DevicePool" for pool in reads["kv_pools"].values()):
        raise Refused(
            f"{_name(reads)}: HiSparse keeps a request's C4 entries in host memory, and in its "
            "HiSparseC4DevicePool only those in use; what the device holds isn't all of them"
        )


def _rings(pages: Sequence[torch.Tensor], count: int, requests: int) -> list[torch.Tensor]:
    """[request, all pages of its ring]; pages behind the last ring are padding."""
    return [layer[: count * requests].view(requests, -1) for layer in pages]


def _flat(pages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """[page, slot, …] as [row, …]."""
    return [layer.flatten(0, 1) for layer in pages]


def _name(reads: Reader) -> str:
    return type(reads.owner).__name__
