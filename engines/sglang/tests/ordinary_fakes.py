"""Fakes of a scheduler and of a keeper, with all that a shelf of saved requests needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from kvtide.plugin.sglang.ordinary import shelf as shelving
from kvtide.plugin.sglang.ordinary.shelf import Shelf


class Req:
    """A request with all that the shelf reads of SGLang's."""

    def __init__(self, rid: str, priority: int = 0, **changed: Any) -> None:
        self.rid = rid
        self.priority = priority
        self.origin_input_ids, self.output_ids = [7, 8], [1]
        self.beam_group = self.input_embeds = None
        self.positional_embed_overrides = self.session = self.lora_id = None
        self.return_routed_experts = self.return_indexer_topk = False
        self.inflight_middle_chunks = 0
        self.is_finished = False
        self.__dict__.update(changed)

    def finished(self) -> bool:
        """Returns whether the last token has been sampled; SGLang removes the request later."""
        return self.is_finished


class Scheduler:
    """A scheduler with all that the shelf reads of SGLang's."""

    def __init__(self, *waiting: Req, **changed: Any) -> None:
        self.waiting_queue = list(waiting)
        self.chunked_req: Any = None
        self.last_batch: Any = None
        self.tree_cache = object()
        self.enable_priority_scheduling = False
        self.enable_overlap = self.enable_lora = False
        self.policy = SimpleNamespace(priority_sign=-1)  # a greater number comes first
        self.grammar_manager: Any = SimpleNamespace(has_waiting_grammars=lambda: False)
        self._add_request_to_queue: Any = None
        self.result_queue: deque[tuple[Any, Any]] = deque()
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        self.__dict__.update(changed)

    def get_num_allocatable_reqs(self, size: int, running_batch: Any) -> int:
        """Allows eight requests at a time."""
        return 8 - size


class Batch:
    """A running batch of requests without recurrent state."""

    mamba_track_mask_cpu: Any = None
    tree_cache: Any = None

    def __init__(self, *reqs: Req) -> None:
        self.reqs = list(reqs)

    def is_empty(self) -> bool:
        """Returns whether the batch has no requests."""
        return not self.reqs

    def merge_batch(self, other: Batch) -> None:
        """Takes over another batch's requests."""
        self.reqs += other.reqs


class FakeKeeper:
    """Records its calls, and raises the error that is set."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.wanted: list[str] = []
        """The backups that are wanted soon, as the last call said."""
        self.error: Exception | None = None

    def _do(self, what: str, rid: str) -> str:
        self.calls.append(f"{what} {rid}")
        if self.error is not None:
            raise self.error
        return rid

    def save(self, req: Req) -> str:
        """Returns the request's id as the backup."""
        return self._do("save", req.rid)

    def restore(self, req: Req, backup: str) -> None:
        """Records the call; nothing moves."""
        self._do("restore", backup)

    def read_ahead(self, waiting: Iterable[str]) -> None:
        """Notes the backups."""
        self.wanted = list(waiting)

    def decline(self) -> None:
        """Records the call."""
        self.calls.append("decline")

    def discard(self, backup: str) -> None:
        """Records the call; nothing is freed."""
        self._do("discard", backup)


def shelved(scheduler: Scheduler, *saved: Req) -> tuple[Shelf, FakeKeeper]:
    """Makes the scheduler's shelf, which the hooks find, with backups of some waiting requests."""
    keeper = FakeKeeper()
    shelf = Shelf(scheduler, keeper)  # type: ignore[arg-type]
    shelving._SHELVES[scheduler] = shelf
    for req in saved:
        shelf.keep(req)
    keeper.calls.clear()
    return shelf, keeper
