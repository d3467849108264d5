"""A retracted request of DeepSeek-V4: saved, or asked of the prefill server again as ever."""

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
"""Those that are registered, by the names of the functions that they are around."""
COMMON, QUEUE = "sglang.srt.mem_cache.common", "sglang.srt.disaggregation.decode"


class V4Place:
    """A pool of DeepSeek-V4 and a request in it, with SGLang's own functions around kvtide's."""

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
        """As SGLang's release_req does."""
        arguments = (self.req, None, self.request_pool, self.built.allocator, backend)
        hook = HOOKS[f"{COMMON}.backup_kv_cache"]
        return bool(hook(common.backup_kv_cache, *arguments))


class Queue:
    """SGLang's DecodePreallocQueue, with what its `add` asks of it."""

    def __init__(self, allocator: Any) -> None:
        self.token_to_kv_pool_allocator = allocator
        self.retracted_queue: list[Any] = []
        self.asked: list[tuple[Any, bool]] = []
        self.pending_reqs: list[Any] = []

    def add(self, req: Any, *arguments: Any, **more: Any) -> None:
        """SGLang's own, with kvtide's hook around it."""
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
    """Attached, with the hook where SGLang's own functions look it up."""
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
    """Its arena has no room left."""
    attachment = attached()
    assert attachment is not None
    arena = keeper_of(attachment).arena
    lease: Lease = arena.lease(arena.limit_bytes // arena.block_bytes)
    yield
    lease.release()


def test_deepseek_v4_that_is_saved_waits_for_its_restore(v4: V4Place) -> None:
    """The prefill server isn't asked; the copy is discarded in the end."""
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
    """Instead of an abort: what SGLang does without kvtide."""
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
    """The prefill server is told tokens alone; and `none` was asked for."""
    v4.req.multimodal_inputs = inputs
    assert not v4.retract(backend)


@pytest.mark.usefixtures("full")
def test_an_error_of_sglangs_ends_the_yielding(v4: V4Place) -> None:
    """Requests after it would be computed again for nothing."""
    arguments = (v4.req, None, v4.request_pool, v4.built.allocator, "cpu_tensor")
    for hook, its in (
        (hooks.backup_kv_cache, arguments),
        (hooks.add_to_queue, (object(), v4.req, True)),
    ):
        with pytest.raises(RuntimeError, match="device lost"):
            hook(raising(RuntimeError("device lost")), *its)
        assert not common.dsv4_needs_rebootstrap(v4.built.allocator)


@pytest.mark.parametrize("more", [{}, {"is_rebootstrap": True}])
def test_a_request_that_is_not_retracted_is_queued_as_ever(
    v4: V4Place, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """New ones, and those whose KV is computed again because the weights changed."""
    monkeypatch.setattr(decode, "is_unadmitted_reject", lambda req: False)
    queue = Queue(v4.built.allocator)
    queue.add(v4.req, **more)
    assert [(v4.req, bool(more))] == queue.asked
    assert [5, 6] == v4.req.output_ids
