"""A retracted request of DeepSeek-V4 is saved, or asked of the prefill server again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from requests_of import Config, Req, ReqToTokenPool, Scheduler, keeper_of, raising
from sglang.srt.disaggregation import decode
from sglang.srt.mem_cache import common

from kvtide.arena import Lease
from kvtide.plugin.sglang import hooks
from kvtide.plugin.sglang.attachment import attach, attached, is_saved
from kvtide.plugin.sglang.cases.deepseek_v4 import CASES
from kvtide.plugin.sglang.settings import Settings

pytest_plugins = ["attached_case"]

HOOKS = {target: hook for target, hook, _ in hooks.hooks_for(Settings())}
"""The registered hooks, by the names of the functions that they wrap."""
COMMON, QUEUE = "sglang.srt.mem_cache.common", "sglang.srt.disaggregation.decode"


class V4Place:
    """A pool of DeepSeek-V4 with a request in it, and SGLang's functions with kvtide's hooks."""

    def __init__(self, request_pool: ReqToTokenPool) -> None:
        self.built = next(case for case in CASES if case.name == "DeepSeek-V4").build()
        assert self.built.allocate is not None
        slots = self.built.allocate(0)
        self.request_pool = request_pool
        request_pool.req_to_token = torch.zeros((4, 1024), dtype=torch.int32)
        self.req: Any = Req("a", len(slots) + 1)
        request_pool.place(self.req, slots)
        vars(self.req).update(
            multimodal_inputs=None,
            output_ids=[5, 6],
            bootstrap_host="prefill",
            time_stats=SimpleNamespace(set_retract_time=lambda: None),
        )

    def retract(self, backend: str = "cpu_tensor") -> bool:
        """Retracts the request as SGLang's release_req does."""
        arguments = (self.req, None, self.request_pool, self.built.allocator, backend)
        hook = HOOKS[f"{COMMON}.backup_kv_cache"]
        return bool(hook(common.backup_kv_cache, *arguments))


class Queue:
    """SGLang's DecodePreallocQueue, with all that its `add` reads."""

    def __init__(self, allocator: Any) -> None:
        self.token_to_kv_pool_allocator = allocator
        self.retracted_queue: list[Any] = []
        self.asked: list[tuple[Any, bool]] = []
        self.pending_reqs: list[Any] = []

    def add(self, req: Any, *arguments: Any, **more: Any) -> None:
        """Calls SGLang's own method with kvtide's hook around it."""
        hook = HOOKS[f"{QUEUE}.DecodePreallocQueue.add"]
        hook(decode.DecodePreallocQueue.add, self, req, *arguments, **more)

    def _check_if_req_exceed_kv_capacity(self, req: Any) -> bool:
        return False

    def _create_receiver_and_enqueue(self, req: Any, is_rebootstrap: bool) -> object:
        self.asked.append((req, is_rebootstrap))
        return object()

    def _resolve_prefill_dp_rank(self, req: Any) -> None:
        return None


@pytest.fixture
def v4(configure: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[V4Place]:
    """A place with kvtide attached, and the hook where SGLang's functions look it up."""
    hook = HOOKS[f"{COMMON}.dsv4_needs_rebootstrap"]
    hooked = partial(hook, common.dsv4_needs_rebootstrap)
    for module in (common, decode):
        monkeypatch.setattr(module, "dsv4_needs_rebootstrap", hooked)
    v4 = V4Place(ReqToTokenPool())
    settings = Settings(host_memory_bytes=16 << 20)
    found = attach(Scheduler(v4.built.allocator, v4.request_pool), settings)
    assert found.keeper is not None, found.refusal
    yield v4
    found.close()
    v4.built.undo()


@pytest.fixture
def full(v4: V4Place) -> Iterator[None]:
    """Leaves no room in the arena."""
    attachment = attached()
    assert attachment is not None
    arena = keeper_of(attachment).arena
    lease: Lease = arena.lease(arena.block_count)
    yield
    lease.release()


def test_deepseek_v4_that_is_saved_waits_for_its_restore(v4: V4Place) -> None:
    """The prefill server isn't asked, and the backup is discarded in the end."""
    queue = Queue(v4.built.allocator)
    assert v4.retract()
    assert is_saved(v4.req)
    queue.add(v4.req, is_retracted=True)
    assert ([v4.req], []) == (queue.retracted_queue, queue.asked)
    assert [5, 6] == v4.req.output_ids
    hooks.discard_kv_cache_backup(raising(AssertionError()), v4.req, None, "cpu_tensor")


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("backend", ["cpu_tensor", "host_pool"])
@pytest.mark.parametrize("by_name", [True, False])
def test_deepseek_v4_goes_back_to_the_prefill_server_when_the_arena_is_full(
    v4: V4Place, backend: str, by_name: bool
) -> None:
    """SGLang does this without kvtide, so the request isn't aborted."""
    queue = Queue(v4.built.allocator)
    assert v4.retract(backend)
    assert v4.req.kv.retraction_backup is None
    queue.add(v4.req, is_retracted=True) if by_name else queue.add(v4.req, True)
    assert ([], [(v4.req, True)]) == (queue.retracted_queue, queue.asked)
    assert ([5], 6) == (v4.req.output_ids, v4.req.pd_rebootstrap_forced_output_id)
    assert not common.dsv4_needs_rebootstrap(v4.built.allocator), "the next one is saved again"


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(
    ("inputs", "backend"), [(object(), "cpu_tensor"), (None, "none")], ids=["images", "none"]
)
def test_deepseek_v4_that_sglang_would_abort_is_aborted(
    v4: V4Place, inputs: object, backend: str
) -> None:
    """The prefill server gets only tokens, no images; `none` is the operator's choice."""
    v4.req.multimodal_inputs = inputs
    assert not v4.retract(backend)


@pytest.mark.usefixtures("full")
def test_an_error_of_sglang_ends_the_way_back_to_the_prefill_server(v4: V4Place) -> None:
    """Otherwise later requests would be computed again for nothing."""
    arguments = (v4.req, None, v4.request_pool, v4.built.allocator, "cpu_tensor")
    for hook, its in (
        (hooks.backup_kv_cache, arguments),
        (hooks.add_to_queue, (object(), v4.req, True)),
    ):
        with pytest.raises(RuntimeError, match="device lost"):
            hook(raising(RuntimeError("device lost")), *its)
        assert not common.dsv4_needs_rebootstrap(v4.built.allocator)


@pytest.mark.parametrize("more", [{}, {"is_rebootstrap": True}])
def test_a_request_that_is_not_retracted_is_queued_as_before(
    v4: V4Place, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """New requests, and those that are computed again because the weights changed, are queued."""
    monkeypatch.setattr(decode, "is_unadmitted_reject", lambda req: False)
    queue = Queue(v4.built.allocator)
    queue.add(v4.req, **more)
    assert [(v4.req, bool(more))] == queue.asked
    assert [5, 6] == v4.req.output_ids
