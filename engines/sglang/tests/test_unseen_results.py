"""Results that are pending when SGLang retracts, and the recurrent states that they change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import requests_of
from ordinary_fakes import Batch, Req, Scheduler
from sglang.srt import runtime_context

from kvtide.plugin.sglang import attachment, hooks
from kvtide.plugin.sglang.attachment import Attachment
from kvtide.plugin.sglang.cases.recurrent_state import CASES as STATE_CASES
from kvtide.plugin.sglang.settings import Settings


class Decoding(Batch):
    """A batch that may not fit in the next step."""

    def __init__(self, *reqs: Req, fits: bool) -> None:
        super().__init__(*reqs)
        self.check_decode_mem = lambda: fits


def attached(scheduler: Scheduler, *, has_state: bool = True) -> Attachment:
    """Attaches kvtide to the scheduler."""
    found = Attachment(scheduler, Settings())
    found.keeper = SimpleNamespace(request_kinds={"mamba"} if has_state else {})  # type: ignore[assignment]
    attachment._attachments[:] = [found]
    return found


def retracting(
    scheduler: Scheduler, running: Batch, prepare: Callable[[], Any] = lambda: None
) -> list[str]:
    """Lists the calls while SGLang updates the running batch and later processes the results.

    `prepare` is called when SGLang prepares the next step.
    """
    done: list[str] = []

    def process(batch: Any, result: str) -> None:
        hooks.process_batch_result(
            lambda scheduler, batch, result: done.append(f"process {result}"),
            scheduler, batch, result,
        )  # fmt: skip

    def update(scheduler: Scheduler, batch: Batch) -> str:
        done.append(f"update with {len(scheduler.result_queue)} on their way")
        prepare()
        return "updated"

    scheduler.process_batch_result = process  # type: ignore[attr-defined]
    assert "updated" == hooks.update_running_batch(update, scheduler, running)
    done.append(f"loop over {len(scheduler.result_queue)}")
    while scheduler.result_queue:
        process(*scheduler.result_queue.popleft())
    return done


@pytest.fixture(autouse=True)
def _nobody_attached() -> Any:
    yield
    attachment._attachments.clear()


def test_results_are_processed_before_a_retraction() -> None:
    """Each is processed once, and SGLang sees no request with a pending last token."""
    scheduler = Scheduler()
    scheduler.result_queue.append((Batch(Req("one")), "result"))
    attached(scheduler)
    done = retracting(scheduler, Decoding(Req("one"), fits=False))
    assert ["process result", "update with 0 on their way", "loop over 1"] == done


@pytest.mark.parametrize(
    ("fits", "has_state", "speculates"),
    [(True, True, False), (False, False, False), (False, True, True)],
)
def test_steps_overlap_if_no_state_is_retracted(
    fits: bool, has_state: bool, speculates: bool
) -> None:
    """Nobody is retracted, or no state is carried on, or SGLang speculates."""
    scheduler = Scheduler(spec_algorithm=SimpleNamespace(is_none=lambda: not speculates))
    scheduler.result_queue.append((Batch(Req("one")), "result"))
    attached(scheduler, has_state=has_state)
    done = retracting(scheduler, Decoding(Req("one"), fits=fits))
    assert ["update with 1 on their way", "loop over 1", "process result"] == done


def test_without_kvtide_nothing_changes() -> None:
    """The hooks only call SGLang's functions."""
    scheduler = Scheduler()
    scheduler.result_queue.append((Batch(Req("one")), "result"))
    done = retracting(scheduler, Decoding(Req("one"), fits=False))
    assert ["update with 1 on their way", "loop over 1", "process result"] == done


def test_a_request_is_concerned_until_its_result_is_processed() -> None:
    """Requests are compared by identity, since ids may repeat."""
    scheduler, mine = Scheduler(), Req("mine")
    scheduler.result_queue.append((Batch(mine), "result"))
    results = attached(scheduler).results
    assert (True, False) == (results.concern(mine), results.concern(Req("mine")))
    retracting(scheduler, Decoding(mine, fits=False))
    assert not results.concern(mine)


def test_a_decode_server_does_not_save_a_state_that_is_a_step_ahead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SGLang ends the request, as it does if its backup finds no room."""
    built = next(case for case in STATE_CASES if case.name == "MHA beside state").build()
    req = requests_of.Req("mine", 33, built.sources["request"], built.sources["mamba"])
    scheduler = Scheduler()
    scheduler.result_queue.append((SimpleNamespace(reqs=[req]), "result"))
    found = attached(scheduler)
    keeper = found.keeper = requests_of.keeper_over(
        built.allocator,
        built.request_pool or requests_of.ReqToTokenPool(),
        [],
        requests_of.SETTINGS,
        is_ahead=found.results.concern,
    )
    assert not found.save(req)
    assert 1 == keeper.counters.refused_saves["request"]
    assert "couldn't save request 'mine': its recurrent state is a step ahead" in caplog.text
    keeper.close()


def test_penalties_count_each_token_once() -> None:
    """SGLang counts the token before the last, so a token that came early is hidden."""
    scheduler, early, other = Scheduler(), Req("early"), Req("other")
    early.output_ids, other.output_ids = [1, 2, 3], [4, 5]
    scheduler.result_queue.append((Batch(early), "result"))
    attached(scheduler)
    counted = []

    def count() -> None:
        hooks.cumulate_penalty_output_tokens(
            lambda batch: counted.append([req.output_ids[-1] for req in batch.reqs]),
            Batch(early, other),
        )

    retracting(scheduler, Decoding(early, other, fits=False), count)
    count()
    assert [[2, 5], [3, 5]] == counted


def test_a_later_count_counts_all_tokens() -> None:
    """It does so even if nothing was counted before, because no request left had penalties."""
    scheduler, early = Scheduler(), Req("early")
    early.output_ids = [1, 2, 3]
    scheduler.result_queue.append((Batch(early), "result"))
    found = attached(scheduler)
    retracting(scheduler, Decoding(early, fits=False))
    with found.results.counting(Batch(early)):
        assert [1, 2, 3] == early.output_ids


INTERVAL = 8


class Checkpointed(Batch):
    """A decode step of a request whose state SGLang keeps every eight tokens, in two slots."""

    def __init__(self, req: Any) -> None:
        super().__init__(req)
        req.kv.kv_committed_len += 1
        req.decode_batch_idx += 1
        self.length = req.kv.kv_committed_len
        self.mamba_track_mask_cpu = [self.length % INTERVAL == 0]
        self.mamba_track_mask_next_cpu = [self.length % INTERVAL == INTERVAL - 1]
        self.mamba_decode_batch_idx_cpu = [req.decode_batch_idx]
        self.mamba_track_buffer_indices = [req.kv.mamba_next_track_idx]
        self.req_to_token_pool = SimpleNamespace(
            get_mamba_ping_pong_other_idx=lambda slot: 1 - slot
        )
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        self.check_decode_mem = lambda: False


def checkpoints(processor: Any, looked_at_before: int) -> list[tuple[int, int]]:
    """Returns the lengths at which a request's state is kept, and in which slot.

    SGLang keeps these counts. The request is retracted before the step that gives it the length
    `looked_at_before`.
    """
    req: Any = Req("one", decode_batch_idx=0, finished=lambda: False)
    req.origin_input_ids = [5] * 4
    req.kv = SimpleNamespace(
        kv_committed_len=4, mamba_next_track_idx=0, mamba_last_track_idx=1,
        mamba_last_track_seqlen=None, mamba_prev_track_seqlen=None,
        mamba_ping_pong_track_buffer=[10, 11],
    )  # fmt: skip
    scheduler = Scheduler()

    def original(scheduler: Scheduler, batch: Any, result: Any) -> None:
        req.output_ids.append(1)
        processor._handle_finish_state_updated_req(req, batch, result, 0, None)

    def process(batch: Any, result: Any) -> None:
        hooks.process_batch_result(original, scheduler, batch, result)

    scheduler.process_batch_result = process  # type: ignore[attr-defined]
    attached(scheduler)
    kept = []
    for length in range(5, 40):
        if length == looked_at_before:
            running = Decoding(req, fits=False)
            step = hooks.update_running_batch(lambda *_: Checkpointed(req), scheduler, running)
        else:
            step = Checkpointed(req)
        if step.mamba_track_mask_cpu[0]:
            slot = step.mamba_track_buffer_indices[0]
            assert req.kv.mamba_last_track_seqlen is None or slot != req.kv.mamba_last_track_idx
            kept.append((length, slot))
        if scheduler.result_queue:
            process(*scheduler.result_queue.popleft())
        scheduler.result_queue.append((step, object()))
    return kept


@pytest.mark.parametrize("length", range(14, 20))
def test_checkpoints_of_a_state_alternate(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint that the request names for the prefix cache is not overwritten."""
    from sglang.srt.managers.scheduler_components import batch_result_processor

    mamba = SimpleNamespace(enable_mamba_extra_buffer_lazy=False)
    for target in (batch_result_processor, runtime_context):
        monkeypatch.setattr(target, "get_exec", lambda: SimpleNamespace(mamba=mamba))
    monkeypatch.setattr(batch_result_processor, "mamba_track_grid", lambda page_size: INTERVAL)
    monkeypatch.setattr(
        batch_result_processor,
        "get_disagg",
        lambda: SimpleNamespace(disaggregation_decode_enable_offload_kvcache=False),
    )
    kind: Any
    (kind,) = (
        kind
        for kind in vars(batch_result_processor).values()
        if isinstance(kind, type) and hasattr(kind, "_handle_finish_state_updated_req")
    )
    processor: Any = SimpleNamespace(tree_cache=SimpleNamespace(page_size=1))
    processor._maybe_collect_customized_info = lambda *_: None
    for method in (
        "_handle_finish_state_updated_req",
        "_mamba_prefix_cache_update",
        "_mamba_check_track_boundary",
    ):
        setattr(processor, method, partial(getattr(kind, method), processor))
    processor._mamba_assert_committed_len_lookahead = kind._mamba_assert_committed_len_lookahead
    expected = [(8, 0), (16, 1), (24, 0), (32, 1)]
    assert expected == checkpoints(processor, 0)
    assert expected == checkpoints(processor, length)
