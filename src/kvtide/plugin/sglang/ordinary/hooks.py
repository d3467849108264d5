"""kvtide's hooks in an ordinary server of SGLang, besides the hooks of every server.

release_req               saves a request whose slots SGLang gives away
get_new_batch_prefill     resumes requests that fit, before SGLang admits new ones; reads ahead
abort_request, flush_cache, update_weights_from_…   forget backups

SGLang warns if a function has two hooks of the type AROUND. So each function has one hook of
kvtide's; what both kinds of servers need is in kvtide.plugin.sglang.hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtide.plugin.sglang.ordinary.shelf import shelf_of, shelf_with

Hook = Callable[..., Any]


def hooks() -> list[tuple[str, Hook, str]]:
    """The functions of SGLang, with the hook of each and SGLang's name for its type.

    The hooks do nothing for a scheduler without a shelf.
    """
    managers = "sglang.srt.managers"
    scheduler, batch = f"{managers}.scheduler.Scheduler", f"{managers}.schedule_batch"
    weights = f"{managers}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    sources = ("disk", "distributed", "tensor", "ipc")
    updates = [f"update_weights_from_{source}" for source in sources]
    return [
        (f"{batch}.release_req", _keep, "before"),
        (f"{scheduler}.get_new_batch_prefill", _plan_prefill, "around"),
        (f"{scheduler}.abort_request", _after_abort, "after"),
        (f"{scheduler}.flush_cache", _after_flush, "after"),
        *((f"{weights}.{update}", _before_update, "before")
          for update in [*updates, "begin_weight_update", "end_weight_update"]),
    ]  # fmt: skip


def _keep(*, req: Any, tree_cache: Any, offload_kv: bool = True, **_: Any) -> None:
    shelf = shelf_with(tree_cache)
    if shelf is not None and offload_kv:
        shelf.keep(req)
    elif shelf is not None:
        shelf.leave(req)


def _plan_prefill(original: Hook, scheduler: Any, running_batch: Any) -> Any:
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    shelf = shelf_of(scheduler)
    if shelf is None:
        return original(scheduler, running_batch)
    was_empty = not shelf
    running_batch = shelf.resume(running_batch)
    shelf.read_ahead()
    if was_empty:
        return original(scheduler, running_batch)
    with shelf.aside() as has_work:
        if has_work:
            return original(scheduler, running_batch)
    # SGLang does this first, too: requests with compiled grammars don't wait for the shelf.
    if scheduler.grammar_manager.has_waiting_grammars():
        for req in scheduler.grammar_manager.get_ready_grammar_requests():
            scheduler._add_request_to_queue(req)
    return NextBatchPlan(batch_to_run=None, running_batch=running_batch)


def _after_abort(_: Any, scheduler: Any, *__: Any) -> None:
    if (shelf := shelf_of(scheduler)) is not None:
        shelf.sweep()


def _after_flush(flushed: bool, scheduler: Any, *_: Any, **__: Any) -> None:
    shelf = shelf_of(scheduler)
    if flushed and shelf is not None:
        shelf.clear("the cache was flushed")


def _before_update(manager: Any, *_: Any, **__: Any) -> None:
    shelf = shelf_of(manager.scheduler)
    if shelf is not None:
        shelf.clear("the weights change")
