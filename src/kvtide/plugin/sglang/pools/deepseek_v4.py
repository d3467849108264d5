"""DeepSeek-V4's pools: a sliding window, compressed caches of several ratios, compressors' states.

Where SGLang 0.5.23 keeps what a request owns of them, in pages of 256 slots:

    swa            the main cache, in pages of the window's own slots, or a ring of the request
    c1 c2 c4 c128  one entry for that many tokens; a page's entries lie in a page of their own
    c4_index …     the indexer's keys with their scales, in pages likewise
    c4_state       a ring for each page of the window: what the next C4 entry is made of
    c128_state     a ring of the request's: what the next C128 entry is made of; c2_state likewise

Within a page lie all data rows and then all scale rows, so that pages move whole. An entry's place
in its page follows from the token's place in its own, which is the same wherever the page is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from kvtide.layout import EveryNth, Mapped, OfRequest, Rule
from kvtide.plugin.description import Description, Part
from kvtide.plugin.reader import Reader, Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.homes import name_of
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
"""The classes of the pools that these consist of."""

WINDOW = "full_to_swa"
SIDECAR = "c128_sidecar"
OWN = (OfRequest(),)


def describe_v4(subject: Subject) -> Description:
    """All regions of a pool on a GPU, in whichever of its forms this server has them."""
    of = Reader(subject.pool, READS)
    _refuse_partly_on_host(of)
    in_window = _window_rules(subject, of)
    if of["unified_kv_pool"] is not None:
        # ROCm's one buffer a layer: the window's ring, and then the compressed entries.
        parts = [*_unified(of), *_index(of), *_states(of, OWN)]
    else:
        compressed = [*_compressed(of), *_index(of)]
        parts = [*_window(of, in_window), *compressed, *_states(of, in_window)]
    if of["swa_valid_from"] is not None:
        parts.append(Part("swa_valid_from", [of["swa_valid_from"]], OWN))
    return _described(subject, of, parts)


def describe_v4_npu(subject: Subject) -> Description:
    """All regions on an NPU: caches have a row for each entry, but for C128.

    Its pages are handed out by an allocator of their own, and a table says whose they are.
    """
    of = Reader(subject.pool, READS)
    swa = _inner(of, of["swa_kv_pool"])["kv_buffer"]
    if any(tensor.dim() != 4 for tensor in swa):
        raise Refused(
            f"{_name(of)}: its main cache isn't [page, slot, 1, width], which is the only form "
            "that kvtide knows on an NPU"
        )
    in_window = _window_rules(subject, of)
    # The A5 packs its cache as fp8, and keeps the states of C4 by request as well.
    packs = bool(swa) and swa[0].dtype == torch.float8_e4m3fn
    parts = [Part("swa", _flat(swa), in_window[:-1]), *_states(of, OWN if packs else in_window)]
    kv_pools, index_pools = of["kv_pools"], of["index_pools"]
    for ratio in sorted(set(kv_pools) - {128}):
        tensors = _inner(of, kv_pools[ratio])["kv_buffer"]
        parts.append(Part(f"c{ratio}", _flat(tensors), (EveryNth(ratio),)))
    for ratio in sorted(index_pools):
        # Beside these it has the GPU's packed buffer, which nothing on an NPU writes or reads.
        index = _inner(of, index_pools[ratio])
        keys, scales = _flat(index["index_k_buffer"]), _flat(index["index_scale_buffer"])
        names, rules = (f"c{ratio}_index", f"c{ratio}_index_scale"), (EveryNth(ratio),)
        both = zip(names, (keys, scales), strict=True)
        parts += evenly(of.owner, *(Part(name, tensors, rules) for name, tensors in both))
    maps: dict[str, Any] = {}
    if 128 in kv_pools:
        table = Reader(subject.request_pool, READS)["req_to_c128_sidecar"]
        tensors = _inner(of, kv_pools[128])["kv_buffer"]
        rule = PagesOfRequest(SIDECAR, table.shape[1], 128, of["c128_page_size"])
        parts.append(Part("c128", [one.flatten(1) for one in tensors], (rule,)))
        maps[SIDECAR] = table.view(-1)
    return _described(subject, of, parts, maps)


DESCRIBERS: Mapping[str, Describer] = {
    "DeepSeekV4TokenToKVPool": describe_v4,
    "DSV4NPUTokenToKVPool": describe_v4_npu,
}


def _described(
    subject: Subject, of: Reader, parts: Sequence[Part], maps: Mapping[str, Any] | None = None
) -> Description:
    mapping = of["full_to_swa_index_mapping"]
    if of["full_size"] is None and mapping is None:
        raise Refused(f"{_name(of)}: neither full_size nor a map says how many slots it has")
    # A map has an entry more than there are slots: the last one, for "no slot".
    size = of["full_size"]
    slot_count = mapping.numel() - 1 if size is None else size + of["page_size"]
    windows = {} if mapping is None else {WINDOW: mapping}
    return Description(
        type(subject.pool).__name__,
        tuple(part for part in parts if part.tensors),
        of["page_size"],
        slot_count,
        {**windows, **(maps or {})},
        first_layer=of["_stage_start"],
    )


def _window_rules(subject: Subject, of: Reader) -> tuple[Rule, ...]:
    """To pages of the window, by the tokens that are still in it."""
    tokens = subject.window_tokens or of["sliding_window"]
    recent = LastTokens(tokens, of["page_size"])
    return (recent, Mapped(WINDOW, hole=0), EveryNth(of["swa_page_size"]))


def _window(of: Reader, in_window: tuple[Rule, ...]) -> list[Part]:
    """The main cache: the window's pages, a ring of pages a request, or rows with positions."""
    window = of["request_window"]
    if window is not None:
        own = Reader(window, READS)
        pages = own["capacity"] // own["page_size"]
        state = Reader(own["state"], READS)["kv_buffer"]
        slots, tags = own["num_slots"], own["tags"][:, : own["rows"]]
        return [
            Part("swa", _rings(state, pages, slots), OWN),
            Part("swa_tags", [layer.view(slots, -1) for layer in tags], OWN),
        ]
    swa = _inner(of, of["swa_kv_pool"])
    if of["swa_req_ring_size"] is not None:
        pages = of["swa_req_ring_size"] // swa["page_size"]
        return [Part("swa", _rings(swa["kv_buffer"], pages, of["num_req_slots"]), OWN)]
    if of["full_to_swa_index_mapping"] is None:
        raise Refused(f"{_name(of)}: it has no map to its window's slots yet")
    return [Part("swa", swa["kv_buffer"], (*in_window[:-1], EveryNth(swa["page_size"])))]


def _compressed(of: Reader) -> Iterator[Part]:
    """The compressed caches, by page."""
    for ratio, pool in of["kv_pools"].items():
        if pool is not None:
            inner = _inner(of, pool)
            yield Part(f"c{ratio}", inner["kv_buffer"], (EveryNth(ratio * inner["page_size"]),))


def _index(of: Reader) -> Iterator[Part]:
    """The indexer's keys, by page: with their scales, or on ROCm in fp4 the scales apart."""
    for ratio, pool in of["index_pools"].items():
        index = _inner(of, pool)
        rules = (EveryNth(ratio * index["page_size"]),)
        if index["uses_aiter_fp4_layout"]:
            keys = Part(f"c{ratio}_index", index["index_k_payload_buffer"], rules)
            scales = Part(f"c{ratio}_index_scale", index["index_k_scale_buffer"], rules)
            yield from evenly(of.owner, keys, scales)
        else:
            yield Part(f"c{ratio}_index", index["index_k_with_scale_buffer"], rules)


def _unified(of: Reader) -> Iterator[Part]:
    """ROCm's buffers, in fp8 with the rotated half in buffers of its own."""
    unified, ratios = _inner(of, of["unified_kv_pool"]), of["compression_ratios"]
    halves = {"": unified["kv_buffer"]}
    if unified["fp8"]:
        halves["_rope"] = unified["kv_buffer_rope"]
    ring_rows, page_size = unified["swa_pages"], of["page_size"]
    for suffix, layers in halves.items():
        rings = [layer[:ring_rows].view(unified["num_slots"], -1) for layer in layers]
        yield Part(f"swa{suffix}", rings, OWN)
        here = ratios[of["_stage_start"] : of["_stage_start"] + len(layers)]
        for ratio in sorted(set(here) - {0}):
            own = [layer for layer, one in zip(layers, here, strict=True) if one == ratio]
            entries = page_size // ratio
            pages = [one[ring_rows:].view(-1, entries * one.shape[1]) for one in own]
            yield Part(f"c{ratio}{suffix}", pages, (EveryNth(page_size),))


def _states(of: Reader, c4_rules: tuple[Rule, ...]) -> Iterator[Part]:
    """The compressors' states, a ring in a row. Those of ratio 4 go by `c4_rules`."""
    kinds = {"state": of["compress_state_pools"], "index_state": of["indexer_compress_state_pools"]}
    for kind, pools in kinds.items():
        found: dict[int, list[torch.Tensor]] = {}
        for pool in pools:
            if pool is not None:
                state = _inner(of, pool)
                _refuse_pending(of, state)
                found.setdefault(state["ratio"], []).append(_rings_of_state(state))
        for ratio, tensors in found.items():
            yield Part(f"c{ratio}_{kind}", tensors, c4_rules if ratio == 4 else OWN)


def _rings_of_state(state: Reader) -> torch.Tensor:
    """[ring, all of its rows]: the rows after the last whole ring are padding."""
    rows: torch.Tensor = Reader(state["kv_score_buffer"], READS)["kv_score"]
    ring = state["ring_size"]
    count = rows.shape[0] // ring
    return rows[: count * ring].view(count, -1)


def _inner(of: Reader, pool: Any) -> Reader:
    """A pool within, of which kvtide knows all that it holds."""
    if name_of(pool) not in WITHIN:
        raise Refused(f"{_name(of)}: kvtide doesn't know {name_of(pool)}, which is a part of it")
    return Reader(pool, READS)


def _refuse_pending(of: Reader, state: Reader) -> None:
    if state["online"] and state["online_mtp_max_draft_tokens"]:
        raise Refused(
            f"{_name(of)}: with SGLANG_EXPERIMENTAL_ONLINE_C128_MTP a request's C128 state lacks "
            "the drafts accepted last until the next forward of its batch commits them, and a "
            "forward without the request forgets them; leave that variable unset to have such "
            "requests saved"
        )


def _refuse_partly_on_host(of: Reader) -> None:
    if any(name_of(pool) == "HiSparseC4DevicePool" for pool in of["kv_pools"].values()):
        raise Refused(
            f"{_name(of)}: HiSparse keeps a request's C4 entries in host memory, and in its "
            "HiSparseC4DevicePool only those in use; what the device holds isn't all of them"
        )


def _rings(pages: Sequence[torch.Tensor], count: int, requests: int) -> list[torch.Tensor]:
    """[request, all pages of its ring]; pages after the last ring are padding."""
    return [layer[: count * requests].view(requests, -1) for layer in pages]


def _flat(pages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """[page, slot, …] as [row, …]."""
    return [layer.flatten(0, 1) for layer in pages]


def _name(of: Reader) -> str:
    return type(of.owner).__name__
