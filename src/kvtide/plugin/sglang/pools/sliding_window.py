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
    """Layers with full attention by slot, layers with a window through SGLang's map of slots.

    A slot that maps to 0 has left the window. If all layers have windows, the map is the identity,
    and SGLang reuses a slot once it has left the window. Then only the slots of the last tokens
    belong to the request.
    """
    reads, name = Reader(subject.pool, READS), type(subject.pool).__name__
    if reads["swa_req_ring_size"] is not None or reads["request_window"] is not None:
        raise Refused(f"{name}: kvtide doesn't know a window in rows of the request")
    mapping = reads["full_to_swa_index_mapping"]
    if mapping is None:
        raise Refused(f"{name}: it has no map from slots to rows of the window yet")
    full, window = subject.part(reads["full_kv_pool"]), subject.part(reads["swa_kv_pool"])
    main = full if reads["full_layer_nums"] else window
    # A draft model's window may be longer than the target's if it has a row for each slot.
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
    """The rule that leaves out tokens outside the window, if the window's length is known."""
    count = subject.window_tokens or 0
    return (LastTokens(count, page_size),) if count > 0 else ()


DESCRIBERS: Mapping[str, Describer] = {"SWAKVPool": describe_swa}
