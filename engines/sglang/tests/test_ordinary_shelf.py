"""The shelf of saved requests in an ordinary server, step by step, with a fake scheduler."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ordinary_fakes import Batch, Req, Scheduler, shelved
from sglang.srt.lora.lora_drainer import LoRADrainer
from sglang.srt.lora.lora_manager import LoRAManager

from kvtide.errors import ArenaFull, KvtideError, SlotsLost, SnapshotDamaged
from kvtide.plugin.sglang import hooks as server_hooks
from kvtide.plugin.sglang.ordinary import hooks
from kvtide.plugin.sglang.ordinary import shelf as shelving
from kvtide.plugin.sglang.ordinary.resume import recount_penalties

Place = SimpleNamespace


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Fakes the pool's answers for a request that comes back; `room` and `slots` may be changed."""
    said = Place(room=True, slots=True, given_back=[])
    monkeypatch.setattr(shelving, "bind_to_root", lambda scheduler, req: None)
    monkeypatch.setattr(shelving, "has_room", lambda scheduler, req, running: said.room)
    monkeypatch.setattr(shelving, "take_slots", lambda scheduler, req: said.slots)
    monkeypatch.setattr(
        shelving, "give_slots_back", lambda scheduler, req: said.given_back.append(req.rid)
    )
    monkeypatch.setattr(shelving, "batch_of", lambda scheduler, req: Batch(req))
    monkeypatch.setattr(shelving, "recount_penalties", lambda batch, req, is_late: False)
    return said


def plan(scheduler: Scheduler, running: Batch) -> tuple[list[str], list[str] | None]:
    """Returns who runs after planning, and the queue that SGLang saw; None if it saw none."""
    shown: list[list[str]] = []

    def original(scheduler: Scheduler, running: Batch) -> Any:
        shown.append(_names(scheduler.waiting_queue))
        return SimpleNamespace(running_batch=running)

    planned = hooks._plan_prefill(original, scheduler, running)
    return _names(planned.running_batch.reqs), shown[0] if shown else None


def test_saved_requests_come_back_first_and_in_order(place: Place) -> None:
    """SGLang lets others in after them."""
    first, second, new = Req("first"), Req("second"), Req("new")
    scheduler = Scheduler(new, second, first)
    _, keeper = shelved(scheduler, first, second)
    assert (["running", "first", "second"], ["new"]) == plan(scheduler, Batch(Req("running")))
    assert ["restore first", "restore second"] == keeper.calls
    assert ["new"] == _names(scheduler.waiting_queue)


def test_nobody_overtakes_a_saved_request(place: Place) -> None:
    """Without room saved requests wait, and SGLang isn't asked to let others in."""
    saved, new = Req("saved"), Req("new")
    scheduler = Scheduler(new, saved)
    _, keeper = shelved(scheduler, saved)
    place.room = False
    assert (["running"], None) == plan(scheduler, Batch(Req("running")))
    assert ["new", "saved"] == sorted(_names(scheduler.waiting_queue))
    assert [] == keeper.calls


def test_who_comes_back_next_is_read_ahead(place: Place) -> None:
    """The hint names who still waits, in the order of their return."""
    reqs = [Req("last", 1), Req("first", 3), Req("second", 2)]
    scheduler = Scheduler(
        *reqs,
        enable_priority_scheduling=True,
        get_num_allocatable_reqs=lambda size, running_batch: 2 - size,
    )
    _, keeper = shelved(scheduler, *reqs)
    place.room = False
    plan(scheduler, Batch(Req("running")))
    assert ["first", "second", "last"] == keeper.wanted
    place.room = True
    plan(scheduler, Batch(Req("running")))
    assert ["second", "last"] == keeper.wanted


def test_requests_with_compiled_grammars_join_the_queue(place: Place) -> None:
    """They do so even if nobody is let in."""
    saved, compiled = Req("saved"), Req("compiled")
    scheduler = Scheduler(saved)
    scheduler.grammar_manager = SimpleNamespace(
        has_waiting_grammars=lambda: True, get_ready_grammar_requests=lambda: [compiled]
    )
    scheduler._add_request_to_queue = lambda req: scheduler.waiting_queue.append(req)
    shelved(scheduler, saved)
    place.room = False
    assert (["running"], None) == plan(scheduler, Batch(Req("running")))
    assert ["saved", "compiled"] == _names(scheduler.waiting_queue)


def test_a_better_priority_overtakes(place: Place) -> None:
    """SGLang sees only the better request, and the saved one doesn't take its room."""
    saved, better, equal = Req("saved", 1), Req("better", 2), Req("equal", 1)
    scheduler = Scheduler(saved, better, equal, enable_priority_scheduling=True)
    _, keeper = shelved(scheduler, saved)
    assert (["running"], ["better"]) == plan(scheduler, Batch(Req("running")))
    assert [] == keeper.calls
    assert 3 == len(scheduler.waiting_queue)


def with_adapters(*waiting: Req, places: int, **changed: Any) -> Scheduler:
    """Makes a scheduler with `places` for LoRA adapters in a batch, as SGLang counts them."""
    adapters = SimpleNamespace(max_loras_per_batch=places, num_pinned_loras=0)
    manager = SimpleNamespace(
        validate_lora_batch=lambda names: LoRAManager.validate_lora_batch(adapters, names)
    )
    worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
    return Scheduler(*waiting, enable_lora=True, tp_worker=worker, **changed)


def test_a_request_without_a_place_for_its_adapter_waits(place: Place) -> None:
    """No adapter counts as one. Others on the shelf come back, and nobody new is let in."""
    bare, right, left = Req("bare"), Req("right", lora_id="r"), Req("left", lora_id="l")
    new, running = Req("new", lora_id="l"), [Req("one", lora_id="r"), Req("two", lora_id="l")]
    scheduler = with_adapters(new, bare, right, left, places=2)
    shelf, keeper = shelved(scheduler, bare, right, left)
    assert (["one", "two", "right", "left"], None) == plan(scheduler, Batch(*running))
    assert (["restore right", "restore left"], 1) == (keeper.calls, len(shelf))
    running[0].is_finished = True
    assert (["one", "two", "bare"], ["new"]) == plan(scheduler, Batch(*running))


def test_adapters_of_restored_requests_take_places(place: Place) -> None:
    """Requests come back one after the other, and the first ones keep their places."""
    saved = [Req(name, lora_id=name) for name in ("first", "second", "third")]
    scheduler = with_adapters(*saved, places=2)
    shelved(scheduler, *saved)
    assert (["first", "second"], None) == plan(scheduler, Batch())
    assert ["third"] == _names(scheduler.waiting_queue)


def test_a_request_of_a_drained_adapter_comes_back(place: Place) -> None:
    """SGLang doesn't notice the end of a drain while it isn't asked to let anybody in."""
    saved, new = Req("saved", lora_id="l"), Req("new", lora_id="r")
    drainer = LoRADrainer(2)
    drainer.adapter_to_stats["l"].is_draining_for = "r"
    scheduler = with_adapters(new, saved, places=2, lora_drainer=drainer)
    shelved(scheduler, saved)
    assert (["running", "saved"], ["new"]) == plan(scheduler, Batch(Req("running")))


def test_a_chunked_prefill_is_finished_first(place: Place) -> None:
    """SGLang continues it, and sees nobody else."""
    saved, new = Req("saved"), Req("new")
    scheduler = Scheduler(new, saved, chunked_req=Req("chunked"))
    _, keeper = shelved(scheduler, saved)
    assert (["running"], []) == plan(scheduler, Batch(Req("running")))
    assert [] == keeper.calls


def test_a_request_alone_comes_back_whatever_the_estimate(place: Place) -> None:
    """SGLang estimates what other requests will need."""
    saved = Req("saved")
    scheduler = Scheduler(saved)
    shelved(scheduler, saved)
    place.room = False
    assert ["saved"] == plan(scheduler, Batch())[0]


def test_a_request_without_room_even_alone_is_left_to_sglang(place: Place) -> None:
    """Its backup is discarded, but only when no pending result may free slots."""
    saved = Req("saved")
    scheduler = Scheduler(saved, last_batch=Batch(Req("finished")))
    _, keeper = shelved(scheduler, saved)
    place.slots = False
    assert ([], None) == plan(scheduler, Batch())
    scheduler.last_batch = None
    assert ([], ["saved"]) == plan(scheduler, Batch())
    assert ["discard saved"] == keeper.calls


@pytest.mark.parametrize("error", [SnapshotDamaged("a bit has changed"), SlotsLost("half written")])
def test_a_failed_restore_is_left_to_sglang(place: Place, error: KvtideError) -> None:
    """Its slots are given back, and it is computed again."""
    saved = Req("saved")
    scheduler = Scheduler(saved)
    shelf, keeper = shelved(scheduler, saved)
    keeper.error = error
    assert (["running"], ["saved"]) == plan(scheduler, Batch(Req("running")))
    assert (["saved"], 0) == (place.given_back, len(shelf))


def test_a_request_that_cannot_be_saved_is_left_to_sglang() -> None:
    """A full arena is no error."""
    scheduler = Scheduler()
    shelf, keeper = shelved(scheduler)
    keeper.error = ArenaFull("no room")
    hooks._keep(req=Req("refused"), tree_cache=scheduler.tree_cache, remaing_req_count=1)
    assert (["save refused"], 0) == (keeper.calls, len(shelf))


def test_requests_that_sglang_gives_up_are_not_saved() -> None:
    """A request that SGLang aborts, or will compute with other weights, isn't saved."""
    scheduler = Scheduler()
    _, keeper = shelved(scheduler)
    hooks._keep(req=Req("aborted"), tree_cache=scheduler.tree_cache, offload_kv=False)
    hooks._keep(req=Req("another's"), tree_cache=object())
    assert [] == keeper.calls


def test_requests_that_left_the_queue_have_no_backup() -> None:
    """They were aborted, timed out, or pushed out of a full queue: the shelf looks at the queue."""
    gone, there = Req("gone"), Req("there")
    scheduler = Scheduler(gone, there)
    _, keeper = shelved(scheduler, gone, there)
    scheduler.waiting_queue.remove(gone)
    hooks._after_abort(None, scheduler, "an abort")
    assert ["discard gone"] == keeper.calls


@pytest.mark.parametrize(
    ("happen", "discarded"),
    [
        (lambda scheduler: hooks._after_flush(True, scheduler), True),
        (lambda scheduler: hooks._after_flush(False, scheduler), False),
        (lambda scheduler: hooks._before_update(SimpleNamespace(scheduler=scheduler)), True),
        (lambda scheduler: server_hooks.end(lambda _: None, scheduler), True),
    ],
    ids=["flushed", "not flushed", "other weights", "shutdown"],
)
def test_stale_backups_are_discarded(happen: Callable[[Any], Any], discarded: bool) -> None:
    """Their requests stay in the queue, and are computed again."""
    saved = Req("saved")
    scheduler = Scheduler(saved)
    shelf, keeper = shelved(scheduler, saved)
    happen(scheduler)
    assert ["discard saved"] * discarded == keeper.calls
    assert (not discarded) == bool(len(shelf))
    assert [saved] == scheduler.waiting_queue


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("given", [1, 2, 5])
def test_penalties_count_as_without_a_retraction(is_late: bool, given: int) -> None:
    """Each step after the return counts the tokens that an undisturbed decode would count."""
    req = Req("penalised", output_ids=list(range(100, 100 + given)))
    counted: list[int] = []
    penalties = SimpleNamespace(
        is_required=True, cumulate_output_tokens=lambda tokens: counted.append(int(tokens[0]))
    )
    batch = SimpleNamespace(
        reqs=[req],
        device="cpu",
        tree_cache=object(),
        sampling_info=SimpleNamespace(penalizer_orchestrator=penalties),
    )
    scheduler = Scheduler(tree_cache=batch.tree_cache)
    shelf, _ = shelved(scheduler)

    def sglang_counts(batch: Any) -> None:
        counted.append(req.output_ids[-1] if req.output_ids else req.origin_input_ids[-1])

    assert recount_penalties(batch, req, is_late=is_late)
    if is_late:
        shelf._late.add(req)
    for step in range(given, given + 3):
        server_hooks.cumulate_penalty_output_tokens(sglang_counts, batch)
        # An overlapped step's token is known only when the next one is under way.
        undisturbed = ([8] if is_late else []) + list(range(100, 100 + step))
        assert undisturbed[:step] == counted
        known = step if is_late else step + 1
        req.output_ids = list(range(100, 100 + known))


def _names(reqs: list[Req]) -> list[str]:
    return [req.rid for req in reqs]


def test_a_request_that_cannot_be_read_is_computed_again(place: Place) -> None:
    """SGLang computes it, and the scheduler goes on."""
    odd = Req("odd", return_routed_experts=None)
    shelf, keeper = shelved(Scheduler(odd))
    shelf.keep(odd)
    assert ["save odd"] == keeper.calls
    keeper.calls.clear()
    del odd.inflight_middle_chunks
    shelf.keep(odd)
    assert [] == keeper.calls


def test_an_unexpected_error_closes_the_shelf(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved requests stay in SGLang's queue without slots, and are computed again."""

    def moved(scheduler: Scheduler, req: Req) -> Batch:
        raise AttributeError("moved")

    first, second = Req("first"), Req("second")
    scheduler = Scheduler(first, second)
    shelf, keeper = shelved(scheduler, first, second)
    monkeypatch.setattr(shelving, "batch_of", moved)
    assert (["running"], ["first", "second"]) == plan(scheduler, Batch(Req("running")))
    assert ["first"] == place.given_back
    assert ["restore first", "discard second"] == keeper.calls
    shelf.keep(first)
    assert 0 == len(shelf)


@pytest.mark.parametrize("name", ["has_room", "take_slots"])
def test_an_unexpected_error_before_a_restore_closes_the_shelf(
    name: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has been restored then, and nothing was taken that must be given back."""

    def moved(*_: object) -> bool:
        raise AssertionError("moved")

    saved = Req("saved")
    scheduler = Scheduler(saved)
    shelf, keeper = shelved(scheduler, saved)
    monkeypatch.setattr(shelving, name, moved)
    assert (["running"], ["saved"]) == plan(scheduler, Batch(Req("running")))
    assert (["discard saved"], []) == (keeper.calls, place.given_back)
    assert 0 == len(shelf)


def test_a_request_that_is_retracted_again_is_not_late(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is computed again, SGLang counts its tokens like those of others."""
    monkeypatch.setattr(shelving, "recount_penalties", lambda batch, req, is_late: True)
    req = Req("late", output_ids=[5, 6])
    scheduler = Scheduler(req, enable_overlap=True)
    shelf, keeper = shelved(scheduler, req)
    batch = shelf.resume(Batch())
    keeper.error = ArenaFull("no room")
    shelf.keep(req)
    with shelf.counting(batch):
        assert [5, 6] == req.output_ids
