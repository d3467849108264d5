"""SGLang's allocators of token slots, over a PageAllocator and one of the NPU pools.

Source of the names and signatures: SGLang 0.5.23, mem_cache/allocator/{token,paged}.py and
hardware_backend/npu/allocator_npu.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtide.device.accelerator import find_accelerator
from kvtide.errors import LayoutError, SlotError
from kvtide.integers import checked_integer, integer_of, integers_of, shown
from kvtide.npu.planes import slots_on
from kvtide.pool.slots import PageAllocator

_PADDING_PAGE = 0


class NPUPagedTokenToKVPoolAllocator:
    """Hands out the slots of `size // page_size` pages, each page to one request at a time.

    Page 0 is padding and is never handed out. The host knows which pages are held. Slots are
    tensors on `device`; only `free` waits for the device. With `need_sort` each call hands out
    pages in ascending order. Not thread-safe: one thread schedules.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: Any,
        need_sort: bool,
    ) -> None:
        """Raises LayoutError where the pool, `kvcache`, has pages of another size."""
        self.size = checked_integer(size, "allocator: size", error=LayoutError)
        self.page_size = checked_integer(
            page_size, "allocator: page_size", least=1, error=LayoutError
        )
        pool_page_size = getattr(kvcache, "page_size", page_size)
        if pool_page_size != self.page_size:
            raise LayoutError(
                f"allocator: pages of {page_size} tokens, the pool's are of {pool_page_size}"
            )
        self.dtype = dtype
        self.device = device
        self.need_sort = need_sort
        self._kvcache = kvcache
        name = str(device)
        self._torch_device = torch.device(name) if name == "cpu" else find_accelerator(name)
        self.clear()

    def clear(self) -> None:
        """Makes all pages free again."""
        self._pages = PageAllocator(self.size // self.page_size + 1)
        padding = self._pages.acquire(1)
        assert padding == [_PADDING_PAGE], "the allocator hands out page 0 first"

    def available_size(self) -> int:
        """Tokens in free pages."""
        return self._pages.free_count * self.page_size

    def get_kvcache(self) -> Any:
        """The pool whose slots these are."""
        return self._kvcache

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Acquires the slots of whole pages, int64 [need_size]; None if too few pages are free.

        Raises SlotError for a size that isn't a multiple of the page size.
        """
        size = integer_of(need_size)
        if size is None or size < 0 or size % self.page_size:
            raise SlotError(f"{shown(need_size)} slots aren't whole pages of {self.page_size}")
        pages = self._acquire(size // self.page_size)
        if pages is None:
            return None
        firsts = torch.tensor(pages, dtype=torch.int64).reshape(-1, 1) * self.page_size
        return (firsts + torch.arange(self.page_size)).reshape(-1).to(self._torch_device)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Acquires slots for requests that grow from `prefix_lens` to `seq_lens` tokens.

        A request first fills the page of its last token, whose slot is in `last_loc`, and then new
        pages. The result has the slots of all requests in order, int32 [extend_num_tokens]; it is
        None if too few pages are free. Lengths are read from the tensors on the CPU. Raises
        SlotError for lengths that contradict each other or the last two arguments.
        """
        del prefix_lens, seq_lens
        prefixes, totals = _lengths(prefix_lens_cpu), _lengths(seq_lens_cpu)
        if len(prefixes) != len(totals):
            raise SlotError(f"{len(prefixes)} lengths to extend to {len(totals)} lengths")
        spans = [range(*span) for span in zip(prefixes, totals, strict=True)]
        wrong = [span for span in spans if not 0 <= span.start <= span.stop]
        if wrong or sum(map(len, spans)) != integer_of(extend_num_tokens):
            raise SlotError(
                f"lengths {prefixes} to {totals} aren't {shown(extend_num_tokens)} tokens to "
                "extend by"
            )
        needed = sum(self._pages_of(span.stop) - self._pages_of(span.start) for span in spans)
        if num_new_pages is not None and integer_of(num_new_pages) != needed:
            raise SlotError(
                f"{needed} new pages are needed, num_new_pages is {shown(num_new_pages)}"
            )
        return self._grown(spans, last_loc, needed)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Acquires a slot for the last token of each request, now `seq_lens` long: int32 [request].

        The slot follows `last_loc`, or is the first slot of a new page. None if too few pages are
        free. Raises SlotError for a request without tokens.
        """
        del seq_lens
        totals = _lengths(seq_lens_cpu)
        if min(totals, default=1) < 1:
            raise SlotError(f"lengths {totals}: a request that decodes has at least one token")
        spans = [range(total - 1, total) for total in totals]
        needed = sum(span.start % self.page_size == 0 for span in spans)
        return self._grown(spans, last_loc, needed)

    def free(self, free_index: torch.Tensor) -> None:
        """Takes back every page with one of these slots. Waits for the device that has them.

        Raises SlotError, and takes back no page, for a page that isn't held and for the padding.
        """
        is_tensor = isinstance(free_index, torch.Tensor)
        slots = integers_of(free_index.reshape(-1) if is_tensor else free_index, "slot")
        pages = np.unique(slots // self.page_size).tolist()
        if _PADDING_PAGE in pages:
            raise SlotError(f"page {_PADDING_PAGE} is padding: its slots can't be freed")
        self._pages.release(pages)

    def get_cpu_copy(
        self, indices: Any, mamba_indices: Any = None, req_pool_index: int | None = None
    ) -> Any:
        """See the pool's method of this name."""
        return self._kvcache.get_cpu_copy(
            indices, mamba_indices=mamba_indices, req_pool_index=req_pool_index
        )

    def load_cpu_copy(
        self,
        kv_cache_cpu: Any,
        indices: Any,
        mamba_indices: Any = None,
        req_pool_index: int | None = None,
    ) -> Any:
        """See the pool's method of this name."""
        return self._kvcache.load_cpu_copy(
            kv_cache_cpu, indices, mamba_indices=mamba_indices, req_pool_index=req_pool_index
        )

    # ---- within ------------------------------------------------------------------------

    def _pages_of(self, token_count: int) -> int:
        return -(-token_count // self.page_size)

    def _acquire(self, count: int) -> list[int] | None:
        pages = self._pages.acquire(count)
        return sorted(pages) if pages is not None and self.need_sort else pages

    def _grown(
        self, spans: list[range], last_loc: torch.Tensor, needed: int
    ) -> torch.Tensor | None:
        """Slots for the tokens `spans` of each request, with `needed` new pages.

        Only the device knows `last_loc`, so the device computes the slots in that page from it.
        """
        last = slots_on(self._torch_device, last_loc)
        if len(last) != len(spans):
            raise SlotError(f"{len(last)} last slots for {len(spans)} requests")
        pages = self._acquire(needed)
        if pages is None:
            return None
        owners = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
        parts = [np.empty((2, 0), np.int64)]
        for span in spans:
            count = self._pages_of(span.stop) - self._pages_of(span.start)
            parts.append(self._grown_request(span, pages[:count]))
            pages = pages[count:]
        both = torch.from_numpy(np.concatenate(parts, axis=1)).to(self._torch_device)
        slots, is_old = both[0], both[1]
        index = torch.from_numpy(owners).to(self._torch_device)
        return (slots + is_old * last.index_select(0, index)).to(torch.int32)

    def _grown_request(self, span: range, pages: list[int]) -> NDArray[np.int64]:
        """The new tokens of a request as pairs, int64 [2, token].

        A token in a new page is (slot, 0). A token in the old page is (distance, 1), where the
        distance counts from the request's last slot.
        """
        tokens, size = np.arange(span.start, span.stop), self.page_size
        first = self._pages_of(span.start)
        is_old = tokens < first * size
        fresh = np.array([*pages, 0])[np.maximum(tokens // size - first, 0)]
        slots = np.where(is_old, tokens - span.start + 1, fresh * size + tokens % size)
        return np.stack([slots, is_old.astype(np.int64)])


def _lengths(given: Any) -> list[int]:
    """Lengths of requests, in tokens."""
    found: list[int] = integers_of(given, "length", "request").tolist()
    return found


class TokenToKVPoolAllocator(NPUPagedTokenToKVPoolAllocator):
    """The paged allocator, with pages of one token."""

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        device: str | torch.device,
        kvcache: Any,
        need_sort: bool,
    ) -> None:
        super().__init__(size, 1, dtype, device, kvcache, need_sort)
