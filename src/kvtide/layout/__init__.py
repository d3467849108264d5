"""What a token owns: layouts as declarations. Pure: no torch, no I/O."""

from kvtide.layout.gqa import GQA
from kvtide.layout.rows import BufferRows
from kvtide.layout.spec import EveryToken, Geometry, Layout, Plane, PlaneGeometry

__all__ = ["GQA", "BufferRows", "EveryToken", "Geometry", "Layout", "Plane", "PlaneGeometry"]
