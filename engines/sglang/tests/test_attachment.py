"""kvtide looks at a scheduler when it begins, and logs what it finds."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from requests_of import ALONE, SETTINGS, Config, Place, Scheduler, keeper_of, raising

from kvtide.plugin.engine_reads import EngineReads
from kvtide.plugin.keeper import Keeper
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang import attachment as attaching
from kvtide.plugin.sglang import hooks, status_line
from kvtide.plugin.sglang.attachment import (
    Attachment,
    attach,
    draft_pools,
    rank_count,
    would_cover,
)
from kvtide.plugin.sglang.pools.subject import Subject
from kvtide.plugin.sglang.settings import Settings

pytest_plugins = ["attached_case"]


# ---- the beginning ---------------------------------------------------------------------


def test_attaching_refuses_an_unknown_pool(place: Place, configure: Config) -> None:
    """The refusal has the name and the reason, and no error is raised."""
    unknown = type("StrangeKVPool", (), {"device": "cpu"})()
    stranger = SimpleNamespace(get_kvcache=lambda: unknown)
    found = attach(Scheduler(stranger, place.request_pool), SETTINGS)
    assert found.keeper is None
    assert "StrangeKVPool isn't known to kvtide" in found.refusal
    assert not found.covers(stranger)


@pytest.mark.parametrize("failure", [RuntimeError("moved"), AttributeError("gone")])
def test_an_unexpected_error_is_a_refusal_too(
    place: Place, configure: Config, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """The server must start, whatever happens to kvtide."""
    monkeypatch.setattr(attaching, "open_keeper", raising(failure))
    found = attach(Scheduler(place.allocator, place.request_pool), SETTINGS)
    assert (None, f"{type(failure).__name__}: {failure}") == (found.keeper, found.refusal)


def test_pipeline_stages_are_refused(place: Place, configure: Config) -> None:
    """One stage alone could run out of arena."""
    assert would_cover(place.request_pool, place.allocator)
    configure({**ALONE, "pp_size": 2})
    found = attach(Scheduler(place.allocator, place.request_pool), SETTINGS)
    assert found.refusal.startswith("pipeline parallelism: ")
    assert not would_cover(place.request_pool, place.allocator)


@pytest.mark.parametrize(
    ("parallel", "count"),
    [
        ({}, 1),
        ({"tp_size": 8}, 8),
        ({"tp_size": 16, "nnodes": 2}, 8),
        ({"tp_size": 4, "dp_size": 2}, 8),
        ({"tp_size": 8, "dp_size": 8, "attn_dp_enabled": True}, 8),
        ({"tp_size": 2, "pp_size": 3, "nnodes": 4}, 2),
    ],
)
def test_the_ranks_of_a_host_are_counted(parallel: dict[str, Any], count: int) -> None:
    """Replicas are further ranks, unless only attention is data parallel."""
    assert count == rank_count(SimpleNamespace(**{**ALONE, **parallel}))


def test_draft_pools_are_found_once(place: Place) -> None:
    """Pools that are the target's don't count; the draft's own recurrent state does."""
    draft = Place()
    names = ("BaseSpecWorker", "ModelRunner", "HybridReqToTokenPool")
    kinds = {name: type(name, (), {}) for name in names}
    with_state = kinds["HybridReqToTokenPool"]()
    with_state.mamba_pool = object()
    runners = []
    for pool, rows in (
        (draft.pool, place.request_pool),
        (draft.pool, with_state),
        (place.pool, with_state),
    ):
        runners.append(kinds["ModelRunner"]())
        runners[-1].token_to_kv_pool, runners[-1].req_to_token_pool = pool, rows
    worker = kinds["BaseSpecWorker"]()
    worker._draft_model_runners = lambda: tuple(runners)
    scheduler = Scheduler(place.allocator, place.request_pool, draft_worker=worker)
    assert [draft.pool, with_state.mamba_pool] == draft_pools(scheduler)
    scheduler.req_to_token_pool = with_state
    assert [draft.pool] == draft_pools(scheduler)
    assert [] == draft_pools(Scheduler(place.allocator, place.request_pool))


def test_the_keeper_asks_whose_results_are_pending(configure: Config) -> None:
    """It asks the scheduler to which it is attached."""
    configure()
    place, seen = Place(), list[Any]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attaching, "open_keeper", lambda *given: seen.append(given[-1]))
        patch.setattr(attaching, "_serve", lambda *_: None)
        found = attach(Scheduler(place.allocator, place.request_pool), SETTINGS)
    assert [found.results.concern] == seen


@pytest.mark.parametrize(
    ("size", "disagg", "is_shared", "count"),
    [
        (None, {}, False, None),
        (20, {}, False, 20),
        (10, {"disaggregation_decode_enable_radix_cache": True}, True, 17),
        (50, {"disaggregation_decode_enable_radix_cache": True}, True, 51),
        (20, {"disaggregation_mode": "null"}, True, 20),
        (10, {"disaggregation_mode": "null"}, True, 16),
        (10, {"disaggregation_mode": "null"}, False, 10),
    ],
)
def test_a_window_is_as_long_as_that_of_a_resumed_request(
    configure: Config, size: int | None, disagg: dict[str, Any], is_shared: bool, count: int | None
) -> None:
    """With a prefix cache slots begin at an earlier page, in SGLang and in kvtide."""
    configure(**disagg)
    place, seen = Place(page_size=16), list[int | None]()

    def note(subject: Subject, *_: Any) -> None:
        seen.append(subject.window_tokens)

    scheduler = Scheduler(place.allocator, place.request_pool, sliding_window_size=size)
    scheduler.tree_cache = SimpleNamespace(supports_prefix_sharing=lambda: is_shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attaching, "open_keeper", note)
        patch.setattr(attaching, "_serve", lambda *_: None)
        attach(scheduler, SETTINGS)
    assert [count] == seen


@pytest.mark.parametrize(
    ("disagg", "settings", "is_needed"),
    [
        ({}, SETTINGS, True),
        ({"disaggregation_mode": "prefill"}, SETTINGS, False),
        ({"disaggregation_mode": "prefill", "enable_pd_role_switch": True}, SETTINGS, True),
        ({"disaggregation_mode": "null"}, SETTINGS, False),
        ({"disaggregation_mode": "prefill"}, Settings(is_colocated=True), False),
        ({"disaggregation_mode": "null"}, Settings(is_colocated=True), True),
    ],
)
def test_only_servers_that_save_are_attached(
    place: Place,
    configure: Config,
    monkeypatch: pytest.MonkeyPatch,
    disagg: dict[str, Any],
    settings: Settings,
    is_needed: bool,
) -> None:
    """kvtide attaches to decode servers, to servers that may become one, and if it is asked to."""
    configure(**disagg)
    monkeypatch.setattr(hooks, "hooks_not_in_place", lambda settings: [])
    seen: list[Scheduler] = []
    monkeypatch.setattr(hooks, "attach", lambda scheduler, settings: seen.append(scheduler))
    scheduler = Scheduler(place.allocator, place.request_pool)
    hooks._beginning(settings)(lambda scheduler: None, scheduler)
    assert [scheduler] * is_needed == seen


@pytest.mark.parametrize("mode", ["on", "strict"])
def test_strict_turns_a_refusal_into_an_error(
    place: Place, configure: Config, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """SGLang ends a server whose scheduler can't be made."""
    monkeypatch.setattr(hooks, "hooks_not_in_place", lambda settings: [])
    monkeypatch.setattr("kvtide.plugin.sglang.pools.describe.DESCRIBERS", {})
    begin = hooks._beginning(Settings(mode))
    made = Scheduler(place.allocator, place.request_pool)
    if mode == "on":
        begin(lambda scheduler: None, made)
    else:
        with pytest.raises(Refused, match=r"^KVTIDE_SGLANG=strict: left to SGLang: .* isn't known"):
            begin(lambda scheduler: None, made)


@pytest.mark.parametrize("name", ["hooks_not_in_place", "attach", "report"])
def test_an_error_in_the_self_check_does_not_stop_a_server(
    place: Place, configure: Config, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Under strict it does."""
    monkeypatch.setattr(hooks, "hooks_not_in_place", lambda settings: [])
    monkeypatch.setattr(hooks, name, raising(ValueError("cell is empty")))
    made = Scheduler(place.allocator, place.request_pool)
    hooks._beginning(Settings("on"))(lambda scheduler: None, made)
    with pytest.raises(Refused, match="ValueError: cell is empty"):
        hooks._beginning(Settings("strict"))(lambda scheduler: None, made)


# ---- the line in the log ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusal", "loose", "backend", "level", "said"),
    [
        ("X: no", [], "cpu_tensor", logging.WARNING, "backend cpu_tensor: left to SGLang: X: no"),
        ("", ["a.b"], "cpu_tensor", logging.WARNING, "SGLang calls a.b without them"),
        ("", [], "none", logging.INFO, "retracted requests are aborted (backend none)"),
        (
            "",
            [],
            "host_pool",
            logging.INFO,
            "384 bytes a token, arena up to 1.0 MiB on this rank, for 2688 tokens",
        ),
    ],
)
def test_one_line_says_what_is_covered_or_why_not(
    attachment: Attachment,
    configure: Config,
    caplog: pytest.LogCaptureFixture,
    refusal: str,
    loose: list[str],
    backend: str,
    level: int,
    said: str,
) -> None:
    """A problem is a warning, and the function returns it as well."""
    configure(disaggregation_decode_retraction_backup=backend)
    caplog.set_level(logging.INFO)
    told = Attachment(attachment.scheduler, SETTINGS, attachment.keeper, refusal)
    if refusal:
        told.keeper = None
    wrong = status_line.report(told, loose)
    (record,) = caplog.records
    assert level == record.levelno
    assert said in record.getMessage()
    assert record.getMessage().startswith("kvtide 0.1.0 with SGLang 0.5.23")
    assert (level == logging.WARNING) == bool(wrong)


def test_one_rank_logs_for_the_ranks_in_step_with_it(
    attachment: Attachment, configure: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rank logs its own problems."""
    configure({**ALONE, "attn_tp_rank": 1})
    caplog.set_level(logging.INFO)
    status_line.report(attachment, [])
    assert [] == caplog.records
    status_line.report(attachment, ["a.b"])
    assert 1 == len(caplog.records)


def test_a_warning_names_a_draft_that_is_not_covered(
    attachment: Attachment, caplog: pytest.LogCaptureFixture
) -> None:
    """The line also says what is covered."""
    keeper_of(attachment).draft_refusal = "StrangeDraftPool isn't known"
    assert "the draft model's KV isn't kept" in status_line.report(attachment, [])
    (record,) = caplog.records
    assert "covers MHATokenToKVPool (k, v)" in record.getMessage()
    assert "StrangeDraftPool isn't known" in record.getMessage()


@pytest.mark.parametrize(
    ("mode", "is_v4", "fate"),
    [
        ("decode", False, "every retracted request is aborted"),
        ("decode", True, "every retracted request goes back to the prefill server"),
        ("null", False, "this server computes every retracted request again"),
    ],
)
def test_an_arena_without_room_for_anything_is_a_warning(
    place: Place,
    configure: Config,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    is_v4: bool,
    fate: str,
) -> None:
    """KVTIDE_HOST_MEMORY=0 doesn't turn kvtide off."""
    name = "sglang.srt.mem_cache.common.dsv4_needs_rebootstrap"
    hooked = partial(hooks.dsv4_needs_rebootstrap, lambda allocator: is_v4)
    monkeypatch.setattr(name, hooked)
    scheduler = Scheduler(place.allocator, place.request_pool)
    found = attach(scheduler, Settings(host_memory_bytes=0))
    configure(disaggregation_mode=mode)
    assert f"so {fate}; raise KVTIDE_HOST_MEMORY" in status_line.report(found, [])
    (record,) = caplog.records
    assert "KVTIDE_SGLANG=0" in record.getMessage()
    found.close()


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 0)])
def test_unknown_variables_are_a_warning_of_the_first_rank(
    place: Place, configure: Config, caplog: pytest.LogCaptureFixture, rank: int, count: int
) -> None:
    """Every server gets the warning, whatever kvtide does there."""
    configure({**ALONE, "attn_tp_rank": rank}, disaggregation_mode="prefill")
    settings = Settings(unknown=("KVTIDE_A", "KVTIDE_B (did you mean KVTIDE_C?)"))
    hooks._beginning(settings)(lambda *_: None, Scheduler(place.allocator, place.request_pool))
    said = "kvtide knows no variable KVTIDE_A, KVTIDE_B (did you mean KVTIDE_C?)"
    assert count == [record.getMessage() for record in caplog.records].count(said)


@pytest.mark.parametrize("backend", [None, "none", "cpu_tensor"])
def test_an_ordinary_servers_line_names_no_backend(
    attachment: Attachment, configure: Config, caplog: pytest.LogCaptureFixture, backend: str | None
) -> None:
    """It has no backend, whatever the setting says, and it aborts nothing."""
    configure(disaggregation_mode="null", disaggregation_decode_retraction_backup=backend)
    caplog.set_level(logging.INFO)
    assert "" == status_line.report(attachment, [])
    refused = Attachment(attachment.scheduler, SETTINGS, refusal="X: no")
    assert "left to SGLang: X: no" == status_line.report(refused, [])
    covered, left = (record.getMessage() for record in caplog.records)
    assert covered.endswith("on this rank, for 2688 tokens")
    assert left.endswith("with SGLang 0.5.23: left to SGLang: X: no")


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("null", "this server computes retracted requests again (KVTIDE_SGLANG_COLOCATED=1"),
        ("prefill", "nothing to do, a prefill server retracts no requests"),
    ],
)
def test_a_server_with_nothing_to_do_says_why(
    configure: Config, caplog: pytest.LogCaptureFixture, mode: str, said: str
) -> None:
    """An ordinary server's line names the setting that would give kvtide something to do."""
    configure(disaggregation_mode=mode)
    caplog.set_level(logging.INFO)
    assert "" == status_line.report(None, [])
    assert said in caplog.text


def test_metrics_that_fail_cost_only_the_metrics(
    place: Place, configure: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may fail at the start or in the middle of a move."""
    with monkeypatch.context() as patch:
        patch.setattr(attaching, "metrics_of", raising(ValueError("Duplicated timeseries")))
        found = attach(Scheduler(place.allocator, place.request_pool), SETTINGS)
    assert found.keeper is not None, found.refusal

    def full(keeper: Keeper) -> None:
        raise OSError("no space left on device")

    found.keeper._changed = full
    req = place.admit("a", 20)
    assert found.save(req)
    assert found.restore(req)
    assert 0 == found.keeper.arena.used_bytes
    found.close()


def test_an_sglang_with_renamed_attributes_is_left_alone(
    place: Place, configure: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attribute with another name would be left out of snapshots, and nobody would notice."""
    refused = raising(Refused("SGLang 9 lacks X.y"))
    monkeypatch.setattr(EngineReads, "refuse_if_moved", refused)
    found = attach(Scheduler(place.allocator, place.request_pool), SETTINGS)
    assert (None, "SGLang 9 lacks X.y") == (found.keeper, found.refusal)
    assert not would_cover(place.request_pool, place.allocator)
