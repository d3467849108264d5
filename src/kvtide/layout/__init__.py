"""What a token owns: layouts as declarations. Pure: no torch, no I/O.

A declared layout names the axes of its content. An engine's pool is described instead, by a layout
that is made of its tensors and knows sizes alone (see `plugin.description` and docs/glossary.md).
"""

from kvtide.layout.gqa import GQA
from kvtide.layout.rows import BufferRows
from kvtide.layout.rules import (
    Counts,
    EveryNth,
    EveryToken,
    Ids,
    Mapped,
    OfRequest,
    RequestRows,
    Rows,
    Rule,
    Striped,
    apply_rules,
    request_kinds,
)
from kvtide.layout.spec import Geometry, Layout, Plane, PlaneGeometry

__all__ = [
    "GQA",
    "BufferRows",
    "Counts",
    "EveryNth",
    "EveryToken",
    "Geometry",
    "Ids",
    "Layout",
    "Mapped",
    "OfRequest",
    "Plane",
    "PlaneGeometry",
    "RequestRows",
    "Rows",
    "Rule",
    "Striped",
    "apply_rules",
    "request_kinds",
]
