"""HostPages: a host pool of SGLang's, page by page, as bytes that lie one behind the other.

A page goes to a tier in one of two forms. As parts: SGLang tells where in memory the page lies. Or
flat: SGLang makes a copy of the page, and puts a copy back; some pools have nothing else. The form
is part of a page's identity, since the order of the bytes differs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch

from kvtide.errors import UsageError
from kvtide.layout import canonical_json, fingerprint_of
from kvtide.plugin.reader import Table

READS: Table = {
    "HostKVCache": (
        *("layout", "dtype", "page_size", "size_per_token"),
        *("get_data_page", "get_dummy_flat_data_page", "set_from_flat_data_page"),
    ),
    "LogicalHostPool": ("layout", "dtype", "page_size"),
}

_SIZES = (
    *("layout", "dtype", "page_size", "size_per_token", "storage_format_tag", "dcp_size"),
    *("layer_num", "target_layer_num", "start_layer", "end_layer", "head_num", "head_dim"),
    *("v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "index_head_dim"),
    *("num_mamba_layers", "temporal_dtype", "temporal_state_shape", "conv_dtype"),
    *("conv_state_shapes", "item_bytes", "quant_block_size", "indexer_dtype"),
)
"""The attributes that say how a page's bytes lie, in whichever pool has them."""


class HostPage(Protocol):
    """A page in memory. Whoever copies must know that the memory is still the page's."""

    def copy_to(self, address: int) -> None:
        """Copies the page to memory at this address."""
        ...

    def copy_from(self, address: int) -> None:
        """Fills the page from memory at this address."""
        ...


@final
@dataclass(frozen=True, slots=True)
class PartsPage:
    """A page that lies in some parts of memory, by their addresses and bytes."""

    addresses: Sequence[int]
    sizes: Sequence[int]

    def copy_to(self, address: int) -> None:
        """See HostPage."""
        for part, size_bytes in zip(self.addresses, self.sizes, strict=True):
            ctypes.memmove(address, part, size_bytes)
            address += size_bytes

    def copy_from(self, address: int) -> None:
        """See HostPage."""
        for part, size_bytes in zip(self.addresses, self.sizes, strict=True):
            ctypes.memmove(part, address, size_bytes)
            address += size_bytes


@final
@dataclass(frozen=True, slots=True)
class FlatPage:
    """A page that SGLang copies itself; `row` is the page's first row in the pool."""

    pool: Any
    row: int

    def copy_to(self, address: int) -> None:
        """See HostPage."""
        TensorPage(self.pool.get_data_page(self.row, flat=True)).copy_to(address)

    def copy_from(self, address: int) -> None:
        """See HostPage."""
        flat = self.pool.get_dummy_flat_data_page()
        TensorPage(flat).copy_from(address)
        self.pool.set_from_flat_data_page(self.row, flat)


@final
@dataclass(frozen=True, slots=True)
class TensorPage:
    """A page that is a tensor of its own, as SGLang passes it without `interface_v1`."""

    tensor: torch.Tensor

    def copy_to(self, address: int) -> None:
        """See HostPage."""
        whole = self.tensor.contiguous()
        ctypes.memmove(address, whole.data_ptr(), whole.nbytes)

    def copy_from(self, address: int) -> None:
        """See HostPage."""
        if not self.tensor.is_contiguous():
            raise ValueError("a page's tensor isn't contiguous")
        ctypes.memmove(self.tensor.data_ptr(), address, self.tensor.nbytes)


@final
class HostPages:
    """The pages of a host pool, under SGLang's name for it (`kv`, `swa`, `mamba`, …)."""

    def __init__(self, name: str, pool: Any, *, is_flat: bool = False) -> None:
        """`is_flat` asks for the flat form, which SGLang itself uses without `interface_v1`.

        Raises UsageError for a pool that has no page in either form.
        """
        self.name = name
        self.kinds = frozenset(kind.__name__ for kind in type(pool).__mro__)
        self._pool = pool
        self.row_count = int(pool.page_size)
        """How many rows of the pool a page has."""
        sizes = None if is_flat else self._sizes_of_parts()
        self.is_flat = sizes is None
        self.size_bytes = self._flat_bytes() if sizes is None else sum(sizes)
        form = ["flat", self.size_bytes] if sizes is None else ["parts", *sizes]
        kind = type(pool)
        self.geometry = canonical_json(
            {
                "groups": [],
                "pool": name,
                "class": f"{kind.__module__}.{kind.__qualname__}",
                "form": form,
                "sizes": {fact: str(getattr(pool, fact, None)) for fact in _SIZES},
            }
        )
        """How a page's bytes lie, for its seal and its key."""
        self.fingerprint = fingerprint_of(self.geometry).hex()

    def at(self, rows: torch.Tensor, count: int) -> list[HostPage] | None:
        """The `count` pages at these rows, int64 [page * row], or None if the rows don't fit."""
        if rows.numel() != count * self.row_count:
            return None
        if self.is_flat:
            return [FlatPage(self._pool, row) for row in rows[:: self.row_count].tolist()]
        addresses, sizes = self._pool.get_page_buffer_meta(rows) or ((), ())
        per_page = len(addresses) // max(count, 1)
        pages: list[HostPage] = []
        for first in range(0, count * per_page, per_page) if per_page else [0] * count:
            part = slice(first, first + per_page)
            if sum(sizes[part]) != self.size_bytes:
                return None
            pages.append(PartsPage(addresses[part], sizes[part]))
        return pages

    def _sizes_of_parts(self) -> list[int] | None:
        """The bytes of a page's parts, or None where SGLang doesn't tell where they lie."""
        try:
            rows = torch.arange(self.row_count, dtype=torch.int64)
            _, sizes = self._pool.get_page_buffer_meta(rows) or ((), ())
        except Exception:  # each pool says in its own way that it can't
            return None
        return [int(size) for size in sizes]

    def _flat_bytes(self) -> int:
        try:
            return int(self._pool.get_dummy_flat_data_page().nbytes)
        except Exception as error:
            kind, layout = type(self._pool).__name__, self._pool.layout
            raise UsageError(
                f"kvtide can't store pages of the pool {self.name!r}: SGLang's {kind} with the "
                f"layout {layout!r} has none ({error}); try another --hicache-mem-layout"
            ) from error
