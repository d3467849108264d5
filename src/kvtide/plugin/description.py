"""Part and Description: describe an engine's pool in kvtide's terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm, prod
from typing import Any, final

import torch

from kvtide.device import Device
from kvtide.errors import LayoutError
from kvtide.layout import EveryToken, Layout, Plane, Rule, request_kinds
from kvtide.layout.dtypes import DTYPE_BYTES, dtype_name
from kvtide.pool import Pool


@final
@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Tensors of the same kind, one per layer: [row, …]. Gaps may lie between rows, not within.

    `rules` map a request's token slots to rows, like a Plane's rules.
    """

    name: str
    tensors: Sequence[torch.Tensor]
    rules: tuple[Rule, ...] = (EveryToken(),)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """A pool's parts and sizes.

    The engine hands out slots from `padding_slots` to `slot_count` - 1; a `padding_slots` of None
    means that page 0 is padding. `maps` are the maps that the rules use, as in `Pool.adopt`.
    `first_layer` is the first layer of the pipeline stage. `rank` is this rank's number among the
    ranks that divide a request's KV. `shares_memory` says that parts share bytes, and that the
    engine gives each byte to only one of them at a time.
    """

    name: str
    parts: tuple[Part, ...]
    page_size: int
    slot_count: int
    maps: Mapping[str, Any] = field(default_factory=dict)
    first_layer: int = 0
    rank: int = 0
    shares_memory: bool = False
    padding_slots: int | None = None

    def renamed(self, prefix: str, *rules: Rule) -> tuple[Part, ...]:
        """The parts for a composite pool: named `prefix.name`, with `rules` before their rules."""
        return tuple(
            replace(part, name=f"{prefix}.{part.name}", rules=(*rules, *part.rules))
            for part in self.parts
        )

    @property
    def request_kinds(self) -> frozenset[str]:
        """The kinds of rows that belong to a request, with or without bytes on this rank."""
        return request_kinds(rule for part in self.parts for rule in part.rules)

    def adopt(self, device: Device) -> Pool:
        """Makes a pool over the tensors. Raises LayoutError if they can't be copied exactly.

        Parts with empty tensors are left out.
        """
        parts = [
            replace(part, tensors=[_plain(tensor) for tensor in part.tensors])
            for part in self.parts
            if _holds_bytes(part)
        ]
        tokens = {part.name: _tokens_per_row(part) for part in parts if _is_dense(part)}
        slots = self.slot_count - self.slot_count % lcm(*tokens.values())
        tensors = {}
        for part in parts:
            count = slots // tokens[part.name] if part.name in tokens else None
            tensors[part.name] = [tensor[:count] for tensor in part.tensors]
        layout = Layout(self.name, *(_plane(part) for part in parts))
        geometry = layout.bind(
            dtype={part.name: dtype_name(part.tensors[0].dtype) for part in parts},
            token=self.page_size,
            first_layer=self.first_layer,
            rank=self.rank,
            **{f"{part.name}_layer": len(part.tensors) for part in parts},
        )
        return Pool.adopt(
            geometry,
            device,
            tensors,
            maps=self.maps,
            slot_count=slots,
            padding_slots=self.page_size if self.padding_slots is None else self.padding_slots,
            shares_memory=self.shares_memory,
        )


def _holds_bytes(part: Part) -> bool:
    """False if all its tensors are empty. Raises LayoutError if only some are."""
    empty = [layer for layer, tensor in enumerate(part.tensors) if not tensor.numel()]
    if empty and len(empty) < len(part.tensors):
        raise LayoutError(
            f"{part.name}: tensors {empty} of {len(part.tensors)} are empty, the others aren't; "
            "describe the layers that have none as another part, or leave them out"
        )
    return len(empty) < len(part.tensors)


def _plane(part: Part) -> Plane:
    unit = "request" if any(rule.unit == "request" for rule in part.rules) else "page token"
    row = " ".join(map(str, part.tensors[0].shape[1:]))
    return Plane(part.name, f"{part.name}_layer {unit} {row}", rows=part.rules)


def _is_dense(part: Part) -> bool:
    """Whether the tensors have a row for every slot, in order."""
    return all(rule.is_dense for rule in part.rules)


def _tokens_per_row(part: Part) -> int:
    return prod(rule.tokens_per_row for rule in part.rules)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same bytes, at least [row, 1], in a dtype that layouts know."""
    rows = tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
    return rows if dtype_name(rows.dtype) in DTYPE_BYTES else rows.view(torch.uint8)
