"""Sliding windows beside full attention: SGLang's SWAKVPool, a pool for either kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvtide.layout import Mapped, Rule
from kvtide.plugin.description import Description
from kvtide.plugin.reader import Reader, Table
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.pools.subject import Describer, Subject
from kvtide.plugin.sglang.rules import LastTokens

READS: Table = {
    "BaseSWAKVPool": ("swa_req_ring_size?", "request_window?", "swa_uses_full_indices"),
    "SWAKVPool": (
        "full_kv_pool",
        "swa_kv_pool",
        "full_to_swa_index_mapping?",
        "full_layer_nums",
        "page_size",
        "start_layer",
    ),
}


def describe_swa(subject: Subject) -> Description:
    """Layers that attend to everything, by slot; layers with a window, by SGLang's map of slots.

    Slots that map to 0 have left the window. Where a model has windows alone, the map changes
    nothing, and SGLang gives a slot to others as soon as it has left: only the last tokens'
    slots are the request's.
    """
    reads, name = Reader(subject.pool, READS), type(subject.pool).__name__
    if reads["swa_req_ring_size"] is not None or reads["request_window"] is not None:
        raise Refused(f"{name}: a window in the request's own rows isn't one that kvtide knows")
    mapping = reads["full_to_swa_index_mapping"]
    if mapping is None:
        raise Refused(f"{name}: nothing leads from slots to the window's rows yet")
    full, window = subject.part(reads["full_kv_pool"]), subject.part(reads["swa_kv_pool"])
    main = full if reads["full_layer_nums"] else window
    # A draft model's window may reach farther than the target's, where it has a row for each slot.
    has_all = reads["swa_uses_full_indices"]
    shortened = () if has_all else last_tokens(subject, reads["page_size"])
    through = (*shortened, Mapped("swa", hole=0))
    return replace(
        main,
        name=name,
        parts=(*full.renamed("full"), *window.renamed("swa", *through)),
        page_size=reads["page_size"],
        maps={**full.maps, **window.maps, "swa": mapping},
        first_layer=reads["start_layer"],
    )


def last_tokens(subject: Subject, page_size: int) -> tuple[Rule, ...]:
    """The rule that leaves out what has left the window, if it is known how long that is."""
    count = subject.window_tokens or 0
    return (LastTokens(count, page_size),) if count > 0 else ()


DESCRIBERS: Mapping[str, Describer] = {"SWAKVPool": describe_swa}
