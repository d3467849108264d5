"""Pools of quantized keys and values: payloads and their scales."""

from __future__ import annotations

from collections.abc import Mapping

from kvtide.plugin.description import Description, Part
from kvtide.plugin.reader import Reader, Table
from kvtide.plugin.sglang.pools import kv_cache
from kvtide.plugin.sglang.pools.kv_cache import described, evenly, pages, refuse_shares
from kvtide.plugin.sglang.pools.subject import Describer, Subject

READS: Table = {
    **kv_cache.READS,
    "MHATokenToKVPool": (
        "k_buffer",
        "v_buffer",
        "k_scale_buffer?",
        "v_scale_buffer?",
        "native_k_scale_buffer?",
        "native_v_scale_buffer?",
    ),
    "MHATokenToKVPoolMXFP8": ("mxfp8_sf_interleaved",),
    "MiniMaxM3Nvfp4MainKVPool": ("rows",),
    "MiniMaxM3Nvfp4IndexKPool": ("rows",),
}

_SCALES = {"k_scale": "k_scale_buffer", "v_scale": "v_scale_buffer"}
_NATIVE = {"k_native_scale": "native_k_scale_buffer", "v_native_scale": "native_v_scale_buffer"}


def scales(subject: Subject) -> list[Part]:
    """The scales of a quant_method: a row for each token, and for some kernels pages.

    The native scales of NVFP4 are [page, head, token, block]; in those of values four tokens are
    interleaved. Global scales belong to the model, not to a request.
    """
    reads = Reader(subject.pool, READS)
    parts = [Part(name, reads[held]) for name, held in _SCALES.items() if reads[held]]
    for name, held in _NATIVE.items():
        if reads[held]:
            parts.append(pages(subject, name, reads[held], reads[held][0].shape[2]))
    return parts


def describe_fp4(subject: Subject) -> Description:
    """Packed keys and values, and their scales, for every token."""
    refuse_shares(subject)
    return described(subject, *evenly(subject.pool, *_payload(subject), *scales(subject)))


def describe_mxfp8(subject: Subject) -> Description:
    """Keys and values of every token, with scales for each token or, for some kernels, in pages.

    Scales in pages are [page, head, token % 32, token // 32, block].
    """
    reads = Reader(subject.pool, READS)
    if not reads["mxfp8_sf_interleaved"]:
        return describe_fp4(subject)
    refuse_shares(subject)
    size = reads["page_size"]
    interleaved = [pages(subject, name, reads[held], size) for name, held in _SCALES.items()]
    return described(subject, *evenly(subject.pool, *_payload(subject), *interleaved))


def describe_m3_pages(subject: Subject) -> Description:
    """Pages of bytes, [page, byte]: first the payloads, then the scales of all tokens.

    Pages move as a whole, with the few bytes that align them.
    """
    refuse_shares(subject)
    reads = Reader(subject.pool, READS)
    return described(subject, pages(subject, "page", reads["rows"], reads["page_size"]))


def _payload(subject: Subject) -> tuple[Part, Part]:
    reads = Reader(subject.pool, READS)
    return Part("k", reads["k_buffer"]), Part("v", reads["v_buffer"])


DESCRIBERS: Mapping[str, Describer] = {
    "MHATokenToKVPoolFP4": describe_fp4,
    "MHATokenToKVPoolMXFP8": describe_mxfp8,
    "MiniMaxM3Nvfp4MainKVPool": describe_m3_pages,
    "MiniMaxM3Nvfp4IndexKPool": describe_m3_pages,
}
