"""Results that are on their way when SGLang retracts, and recurrent states that they concern."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from colocated_fakes import Batch, Req, Scheduler

from kvtide.plugin.sglang import attach, hooks
from kvtide.plugin.sglang.attach import Attachment
from kvtide.plugin.sglang.settings import Settings


class Decoding(Batch):
    """A batch that may not fit the next time."""

    def __init__(self, *reqs: Req, fits: bool) -> None:
        super().__init__(*reqs)
        self.check_decode_mem = lambda: fits


def attached(scheduler: Scheduler, *, has_state: bool = True) -> Attachment:
    """Makes kvtide the scheduler's."""
    found = Attachment(scheduler, Settings())
    found.keeper = SimpleNamespace(has_recurrent_state=has_state)  # type: ignore[assignment]
    attach._attachments[:] = [found]
    return found


def retracting(scheduler: Scheduler, running: Batch) -> list[str]:
    """What is done when SGLang updates the running batch, and later comes to the results."""
    done: list[str] = []

    def process(batch: Any, result: str) -> None:
        hooks.process_batch_result(
            lambda scheduler, batch, result: done.append(f"process {result}"),
            scheduler, batch, result,
        )  # fmt: skip

    def update(scheduler: Scheduler, batch: Batch) -> str:
        done.append(f"update with {len(scheduler.result_queue)} on their way")
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
    attach._attachments.clear()


def test_results_are_looked_at_before_a_retraction() -> None:
    """Once each, and SGLang takes none of its requests for one whose last token is on its way."""
    scheduler = Scheduler()
    scheduler.result_queue.append((Batch(Req("one")), "result"))
    attached(scheduler)
    done = retracting(scheduler, Decoding(Req("one"), fits=False))
    assert ["process result", "update with 0 on their way", "loop over 1"] == done


@pytest.mark.parametrize(
    ("fits", "has_state", "speculates"),
    [(True, True, False), (False, False, False), (False, True, True)],
)
def test_otherwise_steps_overlap_as_ever(fits: bool, has_state: bool, speculates: bool) -> None:
    """Where nobody is retracted, where no state is carried on, and where SGLang speculates."""
    scheduler = Scheduler(spec_algorithm=SimpleNamespace(is_none=lambda: not speculates))
    scheduler.result_queue.append((Batch(Req("one")), "result"))
    attached(scheduler, has_state=has_state)
    done = retracting(scheduler, Decoding(Req("one"), fits=fits))
    assert ["update with 1 on their way", "loop over 1", "process result"] == done


def test_without_kvtide_nothing_changes() -> None:
    """The hooks are SGLang's own functions then."""
    scheduler = Scheduler()
    scheduler.result_queue.append((Batch(Req("one")), "result"))
    done = retracting(scheduler, Decoding(Req("one"), fits=False))
    assert ["update with 1 on their way", "loop over 1", "process result"] == done


def test_a_request_is_concerned_until_its_result_is_looked_at() -> None:
    """By identity: ids may repeat."""
    scheduler, mine = Scheduler(), Req("mine")
    scheduler.result_queue.append((Batch(mine), "result"))
    pending = attached(scheduler).pending
    assert (True, False) == (pending.concerns(mine), pending.concerns(Req("mine")))
    retracting(scheduler, Decoding(mine, fits=False))
    assert not pending.concerns(mine)


def test_a_decode_server_doesnt_save_what_is_a_step_ahead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SGLang ends the request, as it does where its backup finds no room."""
    scheduler, req = Scheduler(), Req("mine")
    scheduler.result_queue.append((Batch(req), "result"))
    found, declined = attached(scheduler), []
    found.keeper.decline = lambda: declined.append(1)  # type: ignore[union-attr,method-assign]
    assert not found.save(req)
    assert [1] == declined
    assert "couldn't save request 'mine': its recurrent state is a step ahead" in caplog.text


def test_penalties_count_each_token_once() -> None:
    """SGLang counts the token before the last; the last of a result looked at early is hidden."""
    scheduler, early, other = Scheduler(), Req("early"), Req("other")
    early.output_ids, other.output_ids = [1, 2, 3], [4, 5]
    scheduler.result_queue.append((Batch(early), "result"))
    attached(scheduler)
    retracting(scheduler, Decoding(early, other, fits=False))
    counted = []

    def count(batch: Batch) -> None:
        counted.append([req.output_ids[-1] for req in batch.reqs])

    for _ in range(2):
        hooks.cumulate_penalty_output_tokens(count, Batch(early, other))
    assert [[2, 5], [3, 5]] == counted
