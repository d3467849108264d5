"""DeepSeek-V4's pools in all of their forms, on a CPU, with their allocators.

SGLang decides a pool's form by the machine and the server's arguments. Here both are said while a
pool is built; what moves it later has only the pool to go by.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.layers.attention.dsv4 import unified_kv_gate
from sglang.srt.mem_cache import deepseek_v4_memory_pool as v4
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

PAGE, WINDOW, SLOTS, REQUESTS = 256, 128, 256 * 10, 4
DRAFT_TOKENS = 4
RATIOS = [0, 4, 128, 4, 128]


@dataclass(frozen=True)
class Server:
    """What SGLang finds out from a server's arguments and its machine."""

    backend: str = "flashmla"
    algorithm: str | None = None
    is_rocm: bool = False
    is_sm120: bool = False
    unified: bool = False
    online: bool = False
    online_drafts: bool = False
    fp4_index: bool = False
    replay: bool = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside this context SGLang's module of the pools behaves as on that machine."""
        drafts = DRAFT_TOKENS if self.algorithm else None
        kernel = SimpleNamespace(
            dsv4_attn_backend=self.backend, enable_deepseek_v4_fp4_indexer=self.fp4_index
        )
        features = SimpleNamespace(enable_encoder_swa_bounded_replay=self.replay)
        graph = SimpleNamespace(cuda_graph_config=None)
        execution = SimpleNamespace(kernel=kernel, features=features, graph=graph)
        spec = SimpleNamespace(
            speculative_algorithm=self.algorithm, speculative_num_draft_tokens=drafts
        )
        switches = v4.envs
        with ExitStack() as stack:
            for name, value in (
                ("get_exec", lambda: execution),
                ("get_spec", lambda: spec),
                ("get_platform", lambda: SimpleNamespace(is_sm120=self.is_sm120)),
                ("_is_hip", self.is_rocm),
                ("ONLINE_C128", self.online),
                ("is_dspark_spec", lambda: self.algorithm == "DSPARK"),
            ):
                stack.enter_context(mock.patch.object(v4, name, value))
            gate = "is_unified_kv_triton"
            stack.enter_context(mock.patch.object(unified_kv_gate, gate, return_value=self.unified))
            stack.enter_context(switches.SGLANG_OPT_SM120_DIRECT_SWA_KV.override(self.is_sm120))
            drafts_online = switches.SGLANG_EXPERIMENTAL_ONLINE_C128_MTP
            stack.enter_context(drafts_online.override(self.online_drafts))
            schedule = SimpleNamespace(chunked_prefill_size=PAGE)
            name = "sglang.srt.runtime_context.get_schedule"
            stack.enter_context(mock.patch(name, return_value=schedule))
            yield


def pool_of(server: Server, kind: Any = None, **options: Any) -> Any:
    """Builds a pool of five layers: two of ratio 4, two of 128, one without compression."""
    given: dict[str, Any] = {
        "max_num_reqs": REQUESTS,
        "num_req_slots": REQUESTS + 1,
        "swa_size": SLOTS,
        "full_size": SLOTS,
        "c4_size": SLOTS // 4,
        "c128_size": SLOTS // 128,
        "c4_state_pool_size": (SLOTS // PAGE + 1) * (16 if server.algorithm else 8),
        "c128_state_pool_size": 0,
        "page_size": PAGE,
        "swa_page_size": PAGE,
        "dtype": torch.float8_e4m3fn,
        "c4_state_dtype": torch.float32,
        "c128_state_dtype": torch.float32,
        "qk_nope_head_dim": 448,
        "qk_rope_head_dim": 64,
        "indexer_head_dim": 128,
        "layer_num": len(options.get("compression_ratios", RATIOS)),
        "device": "cpu",
        "enable_memory_saver": False,
        "compression_ratios": RATIOS,
        "sliding_window": WINDOW,
    }
    with server.applied():
        return (kind or v4.DeepSeekV4TokenToKVPool)(**{**given, **options})


class Slots:
    """An allocator as a decode server uses it, and which tokens have left their window.

    The first request has its SWA pages freed late, one page of two that could be; the second one,
    which is the first come back, gets pages for its window alone. `dead` are slots, bool [slot],
    whose tokens nobody reads any more.
    """

    def __init__(self, pool: Any, token_count: int) -> None:
        self.token_count = token_count
        self.dead = torch.zeros(SLOTS + PAGE, dtype=torch.bool)
        rows = SimpleNamespace(available_size=lambda: REQUESTS)
        common = {"page_size": PAGE, "dtype": pool.dtype, "device": "cpu", "kvcache": pool}
        if pool.needs_paged_swa_allocator:
            self.allocator = SWATokenToKVPoolAllocator(
                SLOTS, SLOTS, **common, need_sort=False, req_to_token_pool=rows
            )
            # Other requests hold pages of the window: it isn't where the tokens' slots are.
            self.allocator.swa_attn_allocator.alloc(2 * PAGE)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(SLOTS, **common, need_sort=False)
        self._calls = 0

    def allocate(self, _: int) -> torch.Tensor:
        """Slots for the request."""
        self._calls += 1
        # Pages that aren't consecutive: those between belong to others.
        self.allocator.alloc_extend(*_extend(PAGE), PAGE)
        extend: Any = self.allocator.alloc_extend
        more: tuple[int, ...] = ()
        gone = max(0, self.token_count - WINDOW)
        if self._calls > 1 and hasattr(self.allocator, "alloc_extend_swa_tail"):
            extend, more = (
                self.allocator.alloc_extend_swa_tail,
                (self.token_count - gone // PAGE * PAGE,),
            )
        slots: torch.Tensor = extend(*_extend(self.token_count), self.token_count, *more)
        self.dead[slots[:gone]] = True
        return slots

    def leave_window(self, slots: torch.Tensor) -> None:
        """Frees the first page, as SGLang does while it decodes."""
        if hasattr(self.allocator, "free_swa") and slots.numel() - WINDOW >= PAGE:
            self.allocator.free_swa(slots[:PAGE])


def _extend(count: int) -> tuple[torch.Tensor, ...]:
    """The arguments of an allocation for a request without a prefix."""
    none, all_of_it = torch.zeros(1, dtype=torch.int64), torch.tensor([count])
    return none, none, all_of_it, all_of_it, torch.tensor([-1])


@contextmanager
def npu_modules() -> Iterator[None]:
    """A `torch_npu` to import: SGLang's modules for the NPU do, and build pools without calling it.

    One that is installed stays.
    """
    if "torch_npu" in sys.modules:
        yield
        return
    sys.modules["torch_npu"] = ModuleType("torch_npu")
    try:
        yield
    finally:
        del sys.modules["torch_npu"]
