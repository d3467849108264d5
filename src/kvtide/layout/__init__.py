"""What a token owns: layouts as declarations. Pure: no torch, no I/O.

A declared layout names the axes of its content. An engine's pool is described instead, by a layout
that is made of its tensors and knows sizes alone (see `plugin.description` and docs/glossary.md).
"""

from kvtide.layout.canonical import FORM_VERSION, canonical_json, differences, fingerprint_of
from kvtide.layout.gqa import GQA
from kvtide.layout.plane import Plane, PlaneGeometry
from kvtide.layout.rows import BufferRows
from kvtide.layout.rule import Counts, Ids, Maps, RequestRows, Rows, Rule
from kvtide.layout.rules import (
    EveryNth,
    EveryToken,
    Mapped,
    OfRequest,
    Striped,
    apply_rules,
    request_kinds,
)
from kvtide.layout.spec import Geometry, Layout

__all__ = [
    "FORM_VERSION",
    "GQA",
    "BufferRows",
    "Counts",
    "EveryNth",
    "EveryToken",
    "Geometry",
    "Ids",
    "Layout",
    "Mapped",
    "Maps",
    "OfRequest",
    "Plane",
    "PlaneGeometry",
    "RequestRows",
    "Rows",
    "Rule",
    "Striped",
    "apply_rules",
    "canonical_json",
    "differences",
    "fingerprint_of",
    "request_kinds",
]
