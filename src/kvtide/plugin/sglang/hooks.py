"""kvtide's hooks in SGLang, around the few functions that save and restore requests.

    backup_kv_cache           saves a retracted request; after False SGLang aborts the request
    dsv4_needs_rebootstrap    whether the prefill server computes it again: only if it isn't saved
    DecodePreallocQueue.add   queues a request; asks the function above if it isn't saved
    restore_kv_cache          restores a request into new slots
    resume_retracted_reqs     reads ahead; removes and aborts requests that couldn't be restored
    discard_kv_cache_backup   discards a backup: its request was aborted, or the server ends
    Req.offload_kv_cache, Req.load_kv_cache   save and restore for callers of these methods
    resolve_decode_retraction_backup   avoids a second host pool, unless an operator asks for it
    Scheduler.__init__, release_host_resources   begin and end

SGLang's functions run unchanged for refused pools, for the backend `none`, and for backups that
SGLang made. Everything runs in the scheduler's thread.
"""

from __future__ import annotations

import logging
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from http import HTTPStatus
from typing import Any

from kvtide.errors import UsageError
from kvtide.plugin.reader import Reader
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.attachment import (
    READS,
    attach,
    attached,
    is_saved,
    saves_requests,
    would_cover,
)
from kvtide.plugin.sglang.ordinary.hooks import hooks as ordinary_hooks
from kvtide.plugin.sglang.ordinary.shelf import shelf_of, shelf_with
from kvtide.plugin.sglang.settings import Settings, read_settings
from kvtide.plugin.sglang.status_line import report, warn_of

logger = logging.getLogger(__name__)

Hook = Callable[..., Any]
"""All hooks here have SGLang's type AROUND: they get the original function as first argument."""


def register_hooks(settings: Settings | None = None) -> None:
    """Registers all hooks with SGLang, which applies them when it loads its plugins.

    `settings` are the environment's by default. Ends the process with a message if they are
    invalid, and under `strict` if this SGLang lacks a function. SGLang would only log an exception,
    and the server would start without kvtide.
    """
    try:
        settings = settings or read_settings()
    except UsageError as error:
        sys.exit(f"kvtide: {error}")
    if settings.mode == "off":
        return
    hooks = hooks_for(settings)
    missing = [target for target, _, _ in hooks if not _exists(target)]
    if missing:
        message = f"kvtide isn't active: this SGLang has no {', '.join(missing)}"
        if settings.mode == "strict":
            sys.exit(message)
        logger.warning(message)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, HookType(kind))


def hooks_for(settings: Settings) -> list[tuple[str, Hook, str]]:
    """The full names of SGLang's functions, with the hook of each and its type."""
    common, queue = "sglang.srt.mem_cache.common", "sglang.srt.disaggregation.decode"
    batch, scheduler = "sglang.srt.managers.schedule_batch", "sglang.srt.managers.scheduler"
    builder = "sglang.srt.mem_cache.kv_cache_builder"
    around: dict[str, Hook] = {
        f"{scheduler}.Scheduler.__init__": _beginning(settings),
        f"{scheduler}.Scheduler.release_host_resources": end,
        f"{scheduler}.Scheduler.update_running_batch": update_running_batch,
        f"{scheduler}.Scheduler.process_batch_result": process_batch_result,
        f"{batch}.ScheduleBatch.cumulate_penalty_output_tokens": cumulate_penalty_output_tokens,
        f"{common}.backup_kv_cache": backup_kv_cache,
        f"{common}.restore_kv_cache": restore_kv_cache,
        f"{common}.discard_kv_cache_backup": discard_kv_cache_backup,
        f"{common}.dsv4_needs_rebootstrap": dsv4_needs_rebootstrap,
        f"{batch}.Req.offload_kv_cache": offload_kv_cache,
        f"{batch}.Req.load_kv_cache": load_kv_cache,
        f"{queue}.DecodePreallocQueue.add": add_to_queue,
        f"{queue}.DecodePreallocQueue.resume_retracted_reqs": resume_retracted_reqs,
        f"{builder}.resolve_decode_retraction_backup": _choosing(settings),
    }
    hooks = [(target, hook, "around") for target, hook in around.items()]
    return [*hooks, *(ordinary_hooks() if settings.is_colocated else [])]


def hooks_not_in_place(settings: Settings) -> list[str]:
    """The names under which SGLang would call a function without kvtide's hook.

    If SGLang can't apply a hook, it only logs that. It may also miss a module that has imported the
    function by name.
    """
    loose, hidden = [], set[int]()
    for target, hook, _ in hooks_for(settings):
        chain = [*_chain_of(pkgutil.resolve_name(target))]
        if not any(_calls(function, hook) for function in chain):
            loose.append(target)
        hidden |= {id(function) for function in chain[1:]}
    modules = [module for name, module in [*sys.modules.items()] if name.startswith("sglang.srt.")]
    for module in modules:
        held = [*vars(module).items()]
        loose += [f"{module.__name__}.{name}" for name, value in held if id(value) in hidden]
    return loose


def _chain_of(function: Any) -> Iterator[Any]:
    """The function, the function that it wraps, and so on down to SGLang's original."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _calls(wrapper: Any, hook: Hook) -> bool:
    """Whether this is SGLang's wrapper of the hook: it holds the hook, or one of the same name."""
    held = [cell.cell_contents for cell in getattr(wrapper, "__closure__", None) or ()]
    wanted = (hook.__module__, hook.__qualname__)
    return any(
        wanted == (getattr(function, "__module__", None), getattr(function, "__qualname__", None))
        for function in held
    )


def _exists(target: str) -> bool:
    try:
        return callable(pkgutil.resolve_name(target))
    except (ImportError, AttributeError):
        return False


# ---- the scheduler's beginning and end ------------------------------------------------


def _beginning(settings: Settings) -> Hook:
    def begin(original: Hook, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """Attaches kvtide once the scheduler has its pools, and logs the result in a line.

        Under `strict` raises Refused if a pool is left to SGLang. An error in the scheduler's
        `__init__` ends the server.
        """
        original(scheduler, *args, **kwargs)
        try:
            warn_of(settings.unknown)
            # If a hook is missing, the others must not begin anything: it would stay half done.
            loose = hooks_not_in_place(settings)
            is_needed = not loose and saves_requests(settings)
            refusal = report(attach(scheduler, settings) if is_needed else None, loose)
        except Exception as error:  # an error of kvtide must not keep the server from starting
            logger.exception("kvtide can't read this SGLang")
            refusal = f"{type(error).__name__}: {error}"
        if refusal and settings.mode == "strict":
            raise Refused(f"KVTIDE_SGLANG=strict: {refusal}")

    return begin


def end(original: Hook, scheduler: Any) -> None:
    """Closes kvtide together with SGLang's host resources."""
    shelf = shelf_of(scheduler)
    if shelf is not None:
        shelf.clear("the server shuts down")
    try:
        original(scheduler)
    finally:
        attachment = attached()
        if attachment is not None:
            attachment.close()


def _choosing(settings: Settings) -> Hook:
    def choose(original: Hook, *args: Any, tp_worker: Any, **kw: Any) -> Any:
        """See resolve_decode_retraction_backup. If a hook is missing SGLang chooses itself."""
        if hooks_not_in_place(settings):
            return original(*args, tp_worker=tp_worker, **kw)
        return resolve_decode_retraction_backup(original, *args, tp_worker=tp_worker, **kw)

    return choose


def resolve_decode_retraction_backup(original: Hook, *args: Any, tp_worker: Any, **kw: Any) -> Any:
    """Chooses `cpu_tensor` if the operator chose no backend and kvtide covers the pool.

    SGLang's other choice, `host_pool`, would allocate host memory that kvtide's arena replaces. An
    operator who asks for that pool gets it, since it also serves other purposes.
    """
    from sglang.srt.runtime_context import get_context, get_disagg

    disagg = get_disagg()
    is_open = disagg.disaggregation_decode_retraction_backup is None
    is_decoding = disagg.disaggregation_mode == "decode"
    if is_open and is_decoding and would_cover(*tp_worker.get_memory_pool()):
        chosen = {"disaggregation_decode_retraction_backup": "cpu_tensor"}
        get_context().override("kvtide.plugin.sglang", **chosen)
    return original(*args, tp_worker=tp_worker, **kw)


# ---- before any retraction ------------------------------------------------------------


def update_running_batch(original: Hook, scheduler: Any, batch: Any) -> Any:
    """SGLang retracts requests in here. First no recurrent state may be ahead of its answer."""
    attachment = attached()
    if attachment is None or not attachment.must_look(batch):
        return original(scheduler, batch)
    with attachment.results.looked_at():
        return original(scheduler, batch)


def process_batch_result(original: Hook, scheduler: Any, batch: Any, result: Any) -> None:
    """Skips a result that was processed early when SGLang comes to it again."""
    attachment = attached()
    if attachment is None or not attachment.results.is_repeated(result):
        original(scheduler, batch, result)


def cumulate_penalty_output_tokens(original: Hook, batch: Any) -> None:
    """Hides the tokens that SGLang doesn't expect: see UnseenResults.counting, Shelf.counting."""
    attachment, shelf = attached(), shelf_with(batch.tree_cache)
    with (
        shelf.counting(batch) if shelf is not None else nullcontext(),
        attachment.results.counting(batch) if attachment is not None else nullcontext(),
    ):
        original(batch)


# ---- a decode server's retraction -----------------------------------------------------


def backup_kv_cache(
    original: Hook, req: Any, tree_cache: Any, request_pool: Any, allocator: Any, backend: str
) -> bool:
    """Returns False if the arena has no room or the copy fails; then SGLang aborts the request.

    If the prefill server can compute the request again, SGLang's function decides instead.
    """
    attachment = attached()
    if attachment is None or backend == "none" or not attachment.covers(allocator):
        return bool(original(req, tree_cache, request_pool, allocator, backend))
    if attachment.save(req):
        return True
    if not attachment.prefill_computes_again():
        return False
    with attachment.yielding():
        return bool(original(req, tree_cache, request_pool, allocator, backend))


def add_to_queue(
    original: Hook, queue: Any, req: Any, is_retracted: bool = False, *args: Any, **kwargs: Any
) -> None:
    """A retracted request that isn't saved is queued as without kvtide."""
    attachment = attached()
    is_left = attachment is not None and is_retracted and not is_saved(req)
    with attachment.yielding() if attachment is not None and is_left else nullcontext():
        original(queue, req, is_retracted, *args, **kwargs)


def restore_kv_cache(
    original: Hook, req: Any, tree_cache: Any, request_pool: Any, allocator: Any, backend: str
) -> None:
    """Restores a request. `resume_retracted_reqs` removes it if that fails."""
    attachment = attached()
    if attachment is None or not is_saved(req):
        original(req, tree_cache, request_pool, allocator, backend)
    else:
        attachment.restore(req)


def resume_retracted_reqs(original: Hook, queue: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """The resumed requests, without requests whose KV couldn't be restored. Reads others ahead.

    SGLang would put those on its waiting queue and run them. They are aborted in the same manner as
    SGLang aborts requests whose transferred KV fails its checksum.
    """
    resumed: list[Any] = original(queue, *args, **kwargs)
    attachment = attached()
    if attachment is None:
        return resumed
    attachment.read_ahead(queue.retracted_queue)
    if not attachment.lost:
        return resumed
    lost = [req for req in resumed if req.rid in attachment.lost]
    for req in lost:
        _abort(req, attachment.scheduler, attachment.lost.pop(req.rid))
    return [req for req in resumed if req not in lost]


def _abort(req: Any, scheduler: Any, reason: str) -> None:
    from sglang.srt.disaggregation.utils import prepare_abort
    from sglang.srt.mem_cache.common import release_kv_cache

    reads = Reader(scheduler, READS)
    message = f"Retracted under memory pressure, and its KV couldn't be restored: {reason}"
    prepare_abort(req, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
    reads["output_streamer"].stream_output([req], req.return_logprob)
    release_kv_cache(req, reads["tree_cache"], checkpoint=False)


def discard_kv_cache_backup(original: Hook, req: Any, tree_cache: Any, backend: str) -> None:
    """Discards the backup of an aborted request."""
    attachment = attached()
    if attachment is None or not is_saved(req):
        original(req, tree_cache, backend)
    else:
        attachment.discard(req)


def dsv4_needs_rebootstrap(original: Hook, allocator: Any) -> bool:
    """Whether the prefill server must compute a retracted request again, as for DeepSeek-V4.

    SGLang asks for a pool, not for a request. While it handles an unsaved request, kvtide yields.
    """
    attachment = attached()
    if attachment is None or attachment.is_yielding or not attachment.covers(allocator):
        return bool(original(allocator))
    return False


def offload_kv_cache(original: Hook, req: Any, request_pool: Any, allocator: Any) -> None:
    """Saves for callers that don't use backup_kv_cache. Raises KvtideError."""
    attachment = attached()
    if attachment is None or attachment.keeper is None or not attachment.covers(allocator):
        original(req, request_pool, allocator)
    else:
        req.kv.retraction_backup = attachment.keeper.save(req)


def load_kv_cache(original: Hook, req: Any, request_pool: Any, allocator: Any) -> None:
    """Restores for callers that don't use restore_kv_cache. Raises KvtideError."""
    attachment = attached()
    if attachment is None or attachment.keeper is None or not is_saved(req):
        original(req, request_pool, allocator)
    else:
        backup, req.kv.retraction_backup = req.kv.retraction_backup, None
        attachment.keeper.restore(req, backup)
