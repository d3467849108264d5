"""Engine: many requests over one pool, step by step. Start reading at `Engine.build` and `step`.

In each step the scheduler picks requests and finds pages for them; to find them it may retract and
resume requests. Then the model runs once over the packed tokens. Each request whose tokens all have
KV then gets its next token.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import final
from weakref import WeakKeyDictionary

import torch

from kvtide.arena import arena_for
from kvtide.arena.budget import default_host_bytes, untouched_bytes_of
from kvtide.device import CPUDevice, Device, open_device
from kvtide.errors import UsageError
from kvtide.pool import PageAllocator
from kvtide.serve.admission import SchedulerOptions
from kvtide.serve.batch import pack
from kvtide.serve.live import Answering, Live
from kvtide.serve.logprobs import token_texts
from kvtide.serve.models import OpenModel
from kvtide.serve.numerics import numerics_of
from kvtide.serve.options import EngineOptions
from kvtide.serve.owncheck import check_own_answers
from kvtide.serve.packed import PackedWeights
from kvtide.serve.paged import PagedModel
from kvtide.serve.prefix import PrefixCache, block_tokens_for
from kvtide.serve.repeatable import is_mkl_repeatable
from kvtide.serve.request import Request
from kvtide.serve.request_store import RequestStore
from kvtide.serve.scheduler import Scheduler
from kvtide.serve.selfcheck import RowCheck, find_rows
from kvtide.serve.sizing import (
    count_pages,
    create_pool,
    free_bytes_for,
    move_model,
    reason_to_refuse,
    spare_after,
)
from kvtide.serve.stats import EngineStats
from kvtide.serve.supported import geometry_of
from kvtide.tide import Tide

__all__ = ["Engine", "EngineOptions", "EngineStats", "check_exact"]


@final
class Engine:
    """Takes requests (`add`) and gives back finished ones (`step`). Not thread-safe."""

    def __init__(
        self,
        model: PagedModel,
        source: OpenModel,
        tide: Tide,
        pages: PageAllocator,
        requests: RequestStore,
        options: EngineOptions,
        exact_check: RowCheck | None,
    ) -> None:
        """Called by `build`, which makes the parts fit together."""
        self.exact_check = exact_check
        self._model = model
        tokenizer = source.tokenizer.backend_tokenizer
        self._answering = Answering(
            tokenizer, token_texts(tokenizer), source.eos_ids, options.keep_logits
        )
        self._vocab_size = int(source.model.get_input_embeddings().num_embeddings)
        self._context_limit = source.context_limit
        self.tide = tide
        self._options = options
        self.pages = pages
        self.store = requests.store
        self._requests = requests
        self.scheduler = Scheduler(
            tide,
            self.pages,
            SchedulerOptions(
                chunk_tokens=options.chunk_tokens,
                max_running=options.max_running,
                on_pressure=options.on_pressure,
                replay=options.exact,
            ),
            lambda request: requests.text_of(self._live[request.id]),
            self._prefix_cache(),
        )
        self._live: dict[str, Live] = {}
        self._refused: list[Request] = []
        self._done = self._failed = self._prompt_tokens = self._new_tokens = 0
        self._peak_pages = self._cut = 0

    @classmethod
    def build(
        cls,
        source: OpenModel,
        options: EngineOptions,
        requests: Sequence[Request] = (),
        *,
        check: RowCheck | None = None,
    ) -> Engine:
        """Builds an engine: opens the device, makes the pool and the arena, checks the model.

        The model is moved to the device. `check` is the result of `check_exact` for this model,
        device and number of threads in this process; without it exact mode measures again. Raises
        UsageError for a model that isn't served or that answers differently over the pool, an
        unknown device, a pool of less than one page, a tier that can't be used, and, in exact mode,
        a machine on which no row count is safe. After an error the model is as it was.
        """
        if getattr(source.tokenizer, "backend_tokenizer", None) is None:
            raise UsageError(
                f"the tokenizer of {source.name} has no fast form (tokenizer.json); convert it"
            )
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        with ExitStack() as undo:
            engine = cls._built(source, options, requests, check, undo)
            undo.pop_all()
            return engine

    @classmethod
    def _built(
        cls,
        source: OpenModel,
        options: EngineOptions,
        requests: Sequence[Request],
        check: RowCheck | None,
        undo: ExitStack,
    ) -> Engine:
        """Makes the parts; `undo` gives them back in case one of them can't be made."""
        geometry = geometry_of(source.model.config, source.model.dtype, options.page_size)
        device = open_device(options.device)
        undo.callback(device.close)
        for request in requests:
            request.context_limit = source.context_limit
        free_bytes = free_bytes_for(device, source.model)
        page_count = count_pages(geometry, options, requests, free_bytes)
        pool_bytes = page_count * geometry.page_bytes
        spare_bytes = spare_after(pool_bytes if device.torch_device.type == "cpu" else 0, options)
        _refuse_other_answers(source, device, exact=options.exact)
        pool = create_pool(geometry, device, page_count, options)
        move_model(source.model, device)
        packing = PackedWeights(source.model, spare_bytes)
        undo.callback(packing.release)
        if not options.exact:
            check = None
        elif check is None:
            check = check_exact(source, device)
        rules = None if check is None else check.rules
        model = PagedModel(source.model, pool, exact=rules, packing=packing)
        undo.callback(model.release)
        pages = PageAllocator(page_count)
        limit_bytes = options.host_memory_bytes
        if limit_bytes is None:
            limit_bytes = default_host_bytes(untouched_bytes_of(pool.buffers))
        arena = arena_for(pool, limit_bytes)
        numerics = (
            ""
            if rules is None
            else numerics_of(
                device.torch_device, rules, options.chunk_tokens, is_packed=packing.is_packed
            )
        )
        kept = RequestStore(arena, options, source, geometry, numerics)
        undo.callback(kept.store.close)
        tide = Tide(pool, arena, pages, kept.store.spill)
        return cls(model, source, tide, pages, kept, options, check)

    @property
    def has_work(self) -> bool:
        """Whether `step` still has a request to give back."""
        return bool(self._live or self._refused)

    def add(self, request: Request) -> None:
        """Takes a request. If it can never fit, the next step gives it back with `error` set.

        A request whose `error` is set already is given back as it is. Raises UsageError for an id
        that is in use, a prompt without tokens, or an unknown token. After an error it isn't taken.
        """
        if request.id in self._live:
            raise UsageError(f"request id {request.id!r} is in use already; choose another")
        if request.error is None:
            self._check_tokens(request)
        request.context_limit = self._context_limit
        pool = self.tide.pool
        error = reason_to_refuse(request, pool.geometry, pool.page_count)
        if error is not None:
            request.finish_reason, request.error = "error", error
            self._refused.append(request)
            return
        live = Live(request, self._answering)
        is_left = self._requests.take_over(
            live,
            vocab_size=self._vocab_size,
            needs_digests=self._options.keep_logits,
            is_busy=bool(self.scheduler.running),
        )
        self._cut += request.most_new_tokens < request.params.max_new_tokens
        self._live[request.id] = live
        self._prompt_tokens += len(request.prompt_ids)
        if is_left:
            self.scheduler.go_on(request)
        else:
            self.scheduler.add(request)

    def step(self) -> list[Request]:
        """Runs one step; gives the requests that finished in it, for any reason."""
        finished, self._refused = self._refused, []
        self._failed += len(finished)
        if not self._live:
            return finished
        steps = self.scheduler.plan()
        assert steps, "while a request is live there is always a step"
        self._peak_pages = max(self._peak_pages, self._used_pages)
        ready = [request for request, count in steps if request.is_ready_after(count)]
        logits = self._model.forward(pack(steps, self._slots_of))
        self.scheduler.note_computed(steps)
        for request, row in zip(ready, logits, strict=True):
            has_ended = self._live[request.id].advance(row)
            self._new_tokens += request.error is None
            if has_ended:
                self._end(request)
                finished.append(request)
        return finished

    def abort(self, request_id: str) -> None:
        """Ends a request in any state and frees all that it holds. Unknown ids are ignored."""
        self._refused = [other for other in self._refused if other.id != request_id]
        live = self._live.get(request_id)
        if live is not None:
            live.request.finish_reason = "abort"
            self._end(live.request)

    def suspend(self) -> int:
        """Leaves the requests that have begun in tiers, for a later engine that `add`s them.

        Beginnings that requests shared are left, too. Ends all requests. Returns how many were
        left; none without a tier.
        """
        left_count = 0
        if self.store.spill is not None:
            for request in reversed(self.scheduler.running):
                self.scheduler.retract(request)
            self.scheduler.prefixes.blocks.leave()
            left_count = self.store.spill.leave()
        for request_id in list(self._live):
            self.abort(request_id)
        return left_count

    def close(self) -> None:
        """Aborts all requests, gives the model back and stops the device's threads."""
        for request_id in list(self._live):
            self.abort(request_id)
        self.scheduler.prefixes.blocks.clear()
        self.tide.close()
        self.store.close()
        self._model.release()
        self.tide.pool.device.close()

    @property
    def _used_pages(self) -> int:
        """Pages that requests hold. Blocks that nobody reads leave when their pages are needed."""
        return self.pages.held_count - self.scheduler.prefixes.idle_page_count

    @property
    def _below_bytes(self) -> int:
        """What blocks may take below the device: half where a tier is, so that requests have room.

        In the arena alone they make way at once for the snapshots of requests.
        """
        limit_bytes = self.tide.arena.limit_bytes
        if self.store.spill is None:
            return limit_bytes
        disk_bytes = 0 if self.store.disk is None else self.store.disk.stats.limit_bytes
        return (limit_bytes + disk_bytes) // 2

    def _prefix_cache(self) -> PrefixCache:
        options, pool = self._options, self.tide.pool
        block_tokens = 0
        if options.share_prefixes:
            block_tokens = block_tokens_for(
                options.chunk_tokens, pool.page_size, whole_chunks=self._model.needs_whole_chunks
            )
        return PrefixCache(
            self.tide,
            self.pages,
            block_tokens,
            key_of=self._requests.block_key_of,
            shares_answers=not options.exact,
            shares_tails=not self._model.needs_whole_chunks,
            below_bytes=self._below_bytes if options.on_pressure == "offload" else 0,
            spill=self.store.spill,
        )

    @property
    def stats(self) -> EngineStats:
        """The counts at this moment."""
        pool, arena, moved = self.tide.pool, self.tide.arena, self.tide.stats
        books, shared, size = self.scheduler, self.scheduler.prefixes.stats, pool.page_size
        return EngineStats(
            running=len(books.running),
            waiting=books.waiting_count,
            retracted=books.retracted_count,
            done=self._done,
            failed=self._failed,
            cut=self._cut,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=dict(shared.cached_tokens),
            new_tokens=self._new_tokens,
            misses=books.stats.misses,
            retractions=books.stats.retractions,
            resumes=books.stats.resumes,
            recomputed_tokens=books.stats.recomputed_tokens,
            offloaded_bytes=moved.offloaded_bytes,
            restored_bytes=moved.restored_bytes,
            offload_seconds=books.stats.offload_seconds + shared.offload_seconds,
            restore_seconds=books.stats.restore_seconds + shared.restore_seconds,
            pool_tokens=pool.page_count * size,
            pool_tokens_used=self._used_pages * size,
            peak_pool_tokens=self._peak_pages * size,
            host_limit_bytes=arena.limit_bytes,
            host_bytes=arena.used_bytes,
            peak_host_bytes=arena.peak_bytes,
            **self.store.counts(),
        )

    def _check_tokens(self, request: Request) -> None:
        if not request.prompt_ids:
            raise UsageError(f"request {request.id!r}: its prompt has no tokens")
        foreign = [token for token in request.prompt_ids if not 0 <= token < self._vocab_size]
        if foreign:
            raise UsageError(
                f"request {request.id!r}: token {foreign[0]} isn't one of the model's "
                f"{self._vocab_size} tokens; is the tokenizer from another model?"
            )

    def _slots_of(self, request: Request) -> torch.Tensor:
        return self._live[request.id].slots(self.tide)

    def _end(self, request: Request) -> None:
        self.scheduler.remove(request)
        del self._live[request.id]
        if request.error is None:
            self._done += 1
        else:
            self._failed += 1


# For each model, the modes in which an engine has checked it. A later engine checks only others.
_CHECKED: WeakKeyDictionary[torch.nn.Module, set[bool]] = WeakKeyDictionary()


def _refuse_other_answers(source: OpenModel, device: Device, *, exact: bool) -> None:
    """Raises UsageError for a model whose answers over a pool differ from its plain answers.

    The check runs where the model lies now; its outcome doesn't depend on the device.
    """
    checked = _CHECKED.setdefault(source.model, set())
    if exact in checked:
        return
    here = CPUDevice() if source.model.device.type == "cpu" else device
    try:
        check_own_answers(source.model, here, exact=exact)
    finally:
        if here is not device:
            here.close()
    checked.add(exact)


def check_exact(source: OpenModel, device: Device) -> RowCheck:
    """Measures how exact mode works for this model, which is on `device`, with torch's threads.

    Raises UsageError if exact mode is impossible here. Warns if MKL computed something before
    kvtide could ask it to repeat its results.
    """
    if is_mkl_repeatable() is False:
        warnings.warn(
            "torch has computed before kvtide.serve was imported, so MKL's mode for reproducible "
            "results is off, and exact mode may be slow or refused: import kvtide.serve first, or "
            "set MKL_CBWR=AUTO",
            stacklevel=3,
        )
    check = find_rows(source.model, device)
    if check.rules is None:
        raise UsageError(f"exact mode is impossible here: {check.detail}")
    return check
