"""What a token owns: layouts as declarations. Pure: no torch, no I/O."""

from kvtide.layout.gqa import GQA
from kvtide.layout.rows import BufferRows
from kvtide.layout.rules import (
    EveryNth,
    EveryToken,
    Ids,
    Mapped,
    OfRequest,
    Owned,
    RequestRows,
    Rows,
    Rule,
    request_kinds,
    rows_of,
)
from kvtide.layout.spec import Geometry, Layout, Plane, PlaneGeometry

__all__ = [
    "GQA",
    "BufferRows",
    "EveryNth",
    "EveryToken",
    "Geometry",
    "Ids",
    "Layout",
    "Mapped",
    "OfRequest",
    "Owned",
    "Plane",
    "PlaneGeometry",
    "RequestRows",
    "Rows",
    "Rule",
    "request_kinds",
    "rows_of",
]
