"""Where kvtide stands in SGLang: what goes through it, what doesn't, and what is said of it."""

from __future__ import annotations

import logging
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from requests_of import Place, Req, Scheduler, config, raising, same
from sglang.srt import runtime_context
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvtide.arena import Lease
from kvtide.errors import SlotError
from kvtide.plugin.sglang import attach as attaching
from kvtide.plugin.sglang import hooks, status
from kvtide.plugin.sglang.attach import (
    Attachment,
    attach,
    draft_pools,
    is_saved,
    rank_count,
    would_cover,
)
from kvtide.plugin.sglang.keeper import Backup, Keeper
from kvtide.plugin.sglang.parts import Refused
from kvtide.plugin.sglang.settings import Settings

SETTINGS = Settings(host_memory_bytes=1 << 20)
ALONE = {
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "nnodes": 1,
    "attn_dp_enabled": False,
    "attn_tp_rank": 0,
}
Config = Callable[..., None]


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """Says how the server is configured; a decode server alone on its host if nothing is said."""
    ranks = ExitStack()

    def set_config(parallel: Mapping[str, Any] = ALONE, **disagg: Any) -> None:
        bag = SimpleNamespace(**config(**disagg))
        monkeypatch.setattr(runtime_context, "get_disagg", lambda: bag)
        ranks.enter_context(runtime_context.get_parallel().override(**parallel))

    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 1)
    monkeypatch.setattr(attaching, "_attachments", [])
    with ranks:
        set_config()
        yield set_config


@pytest.fixture
def place() -> Place:
    """A pool with requests in it."""
    return Place()


@pytest.fixture
def attachment(place: Place, configure: Config) -> Iterator[Attachment]:
    """Of a decode server whose pool kvtide covers."""
    found = attach(Scheduler(place.allocator, place.request_pool), SETTINGS)
    assert found.keeper is not None, found.refusal
    yield found
    found.close()
    assert 0 == found.keeper.arena.used_bytes, "nothing may be left in the arena"


def keeper_of(attachment: Attachment) -> Keeper:
    """The keeper that is there."""
    assert attachment.keeper is not None
    return attachment.keeper


class Original:
    """A function of SGLang's, which remembers what it was called with."""

    def __init__(self, result: Any = None) -> None:
        self.result = result
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        return self.result


# ---- what goes through kvtide ----------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu_tensor", "host_pool"])
def test_a_retracted_request_goes_through_kvtide(
    place: Place, attachment: Attachment, backend: str
) -> None:
    """There and back, whatever SGLang would have used."""
    original, req = Original(), place.admit("a", 20)
    expected = place.rows_of(req)
    common = (object(), place.request_pool, place.allocator, backend)
    assert hooks.backup_kv_cache(original, req, *common)
    assert is_saved(req)
    place.poison()
    place.readmit(req)
    hooks.restore_kv_cache(original, req, *common)
    assert same(expected, place.rows_of(req))
    assert req.kv.retraction_backup is None
    assert [] == original.calls


def test_an_operators_none_stays_none(place: Place, attachment: Attachment) -> None:
    """Retracted requests are aborted then: that was asked for."""
    original, req = Original(False), place.admit("a", 20)
    arguments = (req, object(), place.request_pool, place.allocator, "none")
    assert not hooks.backup_kv_cache(original, *arguments)
    assert [arguments] == original.calls


def test_what_kvtide_does_not_cover_goes_sglangs_way(place: Place, attachment: Attachment) -> None:
    """Another allocator's slots, or no keeper, or no attachment yet."""
    req, other = place.admit("a", 20), Place()
    arguments = (req, object(), place.request_pool, other.allocator, "cpu_tensor")
    original = Original(True)
    assert hooks.backup_kv_cache(original, *arguments)
    hooks.offload_kv_cache(original, req, place.request_pool, other.allocator)
    keeper, attachment.keeper = attachment.keeper, None
    own = (req, object(), place.request_pool, place.allocator, "cpu_tensor")
    assert hooks.backup_kv_cache(original, *own)
    assert hooks.dsv4_needs_rebootstrap(Original(True), place.allocator)
    attachment.keeper = keeper
    assert [arguments, (req, place.request_pool, other.allocator), own] == original.calls


def test_a_backup_of_sglangs_own_goes_sglangs_way(place: Place, attachment: Attachment) -> None:
    """A host pool keeps received KV in the same place."""
    req, original = place.admit("a", 20), Original()
    req.kv.retraction_backup = object()
    pools = (place.request_pool, place.allocator)
    hooks.restore_kv_cache(original, req, None, *pools, "host_pool")
    hooks.load_kv_cache(original, req, *pools)
    hooks.discard_kv_cache_backup(original, req, None, "host_pool")
    assert [
        (req, None, *pools, "host_pool"), (req, *pools), (req, None, "host_pool")
    ] == original.calls  # fmt: skip


def test_a_full_arena_is_an_answer_and_no_error(place: Place, attachment: Attachment) -> None:
    """SGLang aborts a request that can't be saved."""
    arena = keeper_of(attachment).arena
    lease: Lease = arena.lease(arena.limit_bytes // arena.block_bytes)
    req = place.admit("a", 20)
    arguments = (req, None, place.request_pool, place.allocator, "cpu_tensor")
    assert not hooks.backup_kv_cache(Original(True), *arguments)
    assert req.kv.retraction_backup is None
    lease.release()


def test_who_could_not_be_restored_is_taken_out_and_aborted(
    place: Place, attachment: Attachment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of the same round go on; the next round knows nothing of it."""
    ended: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "sglang.srt.disaggregation.utils.prepare_abort",
        lambda req, message, status_code: ended.append((req.rid, message, int(status_code))),
    )
    monkeypatch.setattr(
        "sglang.srt.mem_cache.common.release_kv_cache",
        lambda req, tree_cache, checkpoint: ended.append((req.rid, tree_cache, checkpoint)),
    )
    bad, good = place.admit("bad", 20), place.admit("good", 20, row=3)
    common = (None, place.request_pool, place.allocator, "cpu_tensor")

    def resume_both(queue: object) -> list[Req]:
        for req in (bad, good):
            hooks.restore_kv_cache(Original(), req, *common)
        return [bad, good]

    for req in (bad, good):
        assert hooks.backup_kv_cache(Original(), req, *common)
    backup: Backup = bad.kv.retraction_backup
    backup.snapshot.lease.blocks[0].bytes_view(1)[0] ^= 1
    assert [good] == hooks.resume_retracted_reqs(resume_both, object())
    (rid, message, code), released = ended
    assert ("bad", 500) == (rid, code)
    assert "couldn't be restored: chunk 0" in message
    assert ("bad", attachment.scheduler.tree_cache, False) == released
    assert [bad] == hooks.resume_retracted_reqs(lambda queue: [bad], object())


def test_an_aborted_requests_backup_is_discarded(place: Place, attachment: Attachment) -> None:
    """Its part of the arena is free, and SGLang isn't asked."""
    req, original = place.admit("a", 20), Original()
    hooks.backup_kv_cache(original, req, None, place.request_pool, place.allocator, "host_pool")
    hooks.discard_kv_cache_backup(original, req, None, "host_pool")
    assert (None, 0) == (req.kv.retraction_backup, keeper_of(attachment).arena.used_bytes)
    assert [] == original.calls


def test_direct_callers_are_covered_too(place: Place, attachment: Attachment) -> None:
    """They get an error where the others get an answer."""
    req, original = place.admit("a", 20), Original()
    expected = place.rows_of(req)
    hooks.offload_kv_cache(original, req, place.request_pool, place.allocator)
    assert is_saved(req)
    place.poison()
    place.readmit(req)
    hooks.load_kv_cache(original, req, place.request_pool, place.allocator)
    assert same(expected, place.rows_of(req))
    assert [] == original.calls
    with pytest.raises(SlotError):
        hooks.offload_kv_cache(original, Req("b", 20, 5), place.request_pool, place.allocator)


def test_a_covered_pool_needs_no_second_prefill(place: Place, attachment: Attachment) -> None:
    """SGLang asks this of DeepSeek-V4's pools, which it can't copy."""
    assert not hooks.dsv4_needs_rebootstrap(Original(True), place.allocator)
    assert hooks.dsv4_needs_rebootstrap(Original(True), Place().allocator)


@pytest.mark.parametrize(
    ("disagg", "is_known", "chosen"),
    [
        ({"disaggregation_decode_retraction_backup": None}, True, "cpu_tensor"),
        ({"disaggregation_decode_retraction_backup": None}, False, None),
        ({"disaggregation_decode_retraction_backup": "host_pool"}, True, None),
        (
            {"disaggregation_decode_retraction_backup": None, "disaggregation_mode": "null"},
            True,
            None,
        ),
    ],
)
def test_an_open_choice_falls_on_the_backend_without_a_pool(
    place: Place,
    configure: Config,
    monkeypatch: pytest.MonkeyPatch,
    disagg: dict[str, Any],
    is_known: bool,
    chosen: str | None,
) -> None:
    """Only where kvtide covers the pool, and nobody asked for another one."""
    overrides: list[str] = []
    context = SimpleNamespace(override=lambda source, **fields: overrides.extend(fields.values()))
    monkeypatch.setattr(runtime_context, "get_context", lambda: context)
    configure(**disagg)
    if not is_known:
        monkeypatch.setattr("kvtide.plugin.sglang.describe.describers", dict)
    worker = SimpleNamespace(get_memory_pool=lambda: (place.request_pool, place.allocator))
    found = hooks.resolve_decode_retraction_backup(lambda tp_worker: "resolved", tp_worker=worker)
    assert "resolved" == found
    assert ([] if chosen is None else [chosen]) == overrides


# ---- the beginning ---------------------------------------------------------------------


def test_attaching_finds_out_what_is_refused(place: Place, configure: Config) -> None:
    """By name, with the reason, and without an error."""
    unknown = type("StrangeKVPool", (), {"device": "cpu"})()
    stranger = SimpleNamespace(get_kvcache=lambda: unknown)
    found = attach(Scheduler(stranger, place.request_pool), SETTINGS)
    assert found.keeper is None
    assert "StrangeKVPool isn't known to kvtide" in found.refusal
    assert not found.covers(stranger)


@pytest.mark.parametrize("failure", [RuntimeError("moved"), AttributeError("gone")])
def test_what_nobody_thought_of_is_a_refusal_too(
    place: Place, configure: Config, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """The server is SGLang's: it comes up."""
    monkeypatch.setattr(Keeper, "of", raising(failure))
    found = attach(Scheduler(place.allocator, place.request_pool), SETTINGS)
    assert (None, f"{type(failure).__name__}: {failure}") == (found.keeper, found.refusal)


def test_pipeline_stages_are_refused(place: Place, configure: Config) -> None:
    """One of them could run out of arena alone."""
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
def test_the_ranks_of_a_host(parallel: dict[str, Any], count: int) -> None:
    """Replicas are further ranks, unless attention alone is in data parallel."""
    assert count == rank_count(SimpleNamespace(**{**ALONE, **parallel}))


def test_draft_pools_are_the_draft_runners_own(place: Place) -> None:
    """Once each, without those that are the target's; recurrent state of their own, too."""
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


@pytest.mark.parametrize(
    ("size", "disagg", "count"),
    [
        (None, {}, None),
        (20, {}, 20),
        (10, {"disaggregation_decode_enable_radix_cache": True}, 17),
        (50, {"disaggregation_decode_enable_radix_cache": True}, 51),
        (20, {"disaggregation_mode": "null"}, 20),
    ],
)
def test_a_window_is_as_long_as_a_resumed_requests(
    configure: Config, size: int | None, disagg: dict[str, Any], count: int | None
) -> None:
    """With a prefix cache SGLang gives it slots from an earlier page on."""
    configure(**disagg)
    place, seen = Place(page_size=16), list[int | None]()
    scheduler = Scheduler(place.allocator, place.request_pool, sliding_window_size=size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keeper, "of", lambda *_, window_tokens, **__: seen.append(window_tokens))
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
    ],
)
def test_only_a_server_that_saves_is_attached(
    place: Place, configure: Config, disagg: dict[str, Any], settings: Settings, is_needed: bool
) -> None:
    """A decode server, one that may become one, or one that was asked to."""
    configure(**disagg)
    scheduler = Scheduler(place.allocator, place.request_pool)
    found = hooks.attach_if_needed(scheduler, settings)
    assert is_needed == (found is not None)
    if found is not None:
        found.close()


@pytest.mark.parametrize("mode", ["on", "strict"])
def test_strict_turns_what_is_wrong_into_an_error(
    place: Place, configure: Config, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """SGLang ends a server whose scheduler can't be made."""
    monkeypatch.setattr(hooks, "hooks_not_in_place", lambda settings: [])
    monkeypatch.setattr("kvtide.plugin.sglang.describe.describers", dict)
    begin = hooks._beginning(Settings(mode))
    made = Scheduler(place.allocator, place.request_pool)
    if mode == "on":
        begin(lambda scheduler: None, made)
    else:
        with pytest.raises(Refused, match=r"^KVTIDE_SGLANG=strict: left to SGLang: .* isn't known"):
            begin(lambda scheduler: None, made)


@pytest.mark.parametrize("name", ["hooks_not_in_place", "attach_if_needed", "report"])
def test_an_error_in_the_self_check_does_not_stop_a_server(
    place: Place, configure: Config, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Unless it was to be strict."""
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
            "384 bytes a token, arena up to 1.0 MiB on this rank, for 2730 tokens",
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
    """A warning where something is wrong, which is given back as well."""
    configure(disaggregation_decode_retraction_backup=backend)
    caplog.set_level(logging.INFO)
    told = Attachment(attachment.scheduler, SETTINGS, attachment.keeper, refusal)
    if refusal:
        told.keeper = None
    wrong = status.report(told, SETTINGS, loose)
    (record,) = caplog.records
    assert level == record.levelno
    assert said in record.getMessage()
    assert record.getMessage().startswith("kvtide 0.1.0 with SGLang 0.5.23")
    assert (level == logging.WARNING) == bool(wrong)


def test_one_rank_speaks_for_those_in_step_with_it(
    attachment: Attachment, configure: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """Each says what is wrong with itself."""
    configure({**ALONE, "attn_tp_rank": 1})
    caplog.set_level(logging.INFO)
    status.report(attachment, SETTINGS, [])
    assert [] == caplog.records
    status.report(attachment, SETTINGS, ["a.b"])
    assert 1 == len(caplog.records)


def test_a_draft_that_is_left_out_is_a_warning(
    attachment: Attachment, caplog: pytest.LogCaptureFixture
) -> None:
    """With what is covered all the same."""
    keeper_of(attachment).draft_refusal = "StrangeDraftPool isn't known"
    assert "the draft model's KV isn't kept" in status.report(attachment, SETTINGS, [])
    (record,) = caplog.records
    assert "covers MHATokenToKVPool (k, v)" in record.getMessage()
    assert "StrangeDraftPool isn't known" in record.getMessage()


def test_an_arena_without_room_for_anything_is_a_warning(
    place: Place, configure: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """KVTIDE_HOST_MEMORY=0 isn't how kvtide is turned off."""
    scheduler = Scheduler(place.allocator, place.request_pool)
    found = attach(scheduler, Settings(host_memory_bytes=0))
    assert "every retracted request is lost" in status.report(found, SETTINGS, [])
    assert "KVTIDE_SGLANG=0" in caplog.text
    found.close()


def test_a_server_with_nothing_to_do_says_what_would_give_it_something(
    configure: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """An ordinary one computes again what it retracts."""
    caplog.set_level(logging.INFO)
    assert "" == status.report(None, SETTINGS, [])
    assert "KVTIDE_SGLANG_COLOCATED=1" in caplog.text


# ---- with SGLang's registry ------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """SGLang's, emptied for a test; the targets that are registered."""
    targets: list[str] = []
    hooks_of: dict[str, Any] = defaultdict(list)
    monkeypatch.setattr(HookRegistry, "_hooks", hooks_of)
    monkeypatch.setattr(HookRegistry, "_patched", set())
    register = HookRegistry.register

    def remember(target: str, hook: Any, kind: HookType) -> None:
        targets.append(target)
        register(target, hook, kind)

    monkeypatch.setattr(HookRegistry, "register", remember)
    return targets


def test_off_registers_nothing(registry: list[str]) -> None:
    """KVTIDE_SGLANG=0: as if kvtide weren't installed."""
    hooks.register_hooks(Settings("off", is_colocated=True))
    assert [] == registry


@pytest.mark.parametrize("is_colocated", [False, True])
def test_every_function_is_where_it_is_hooked(registry: list[str], is_colocated: bool) -> None:
    """In the installed SGLang, those of ordinary servers only where they are asked for."""
    settings = Settings("strict", is_colocated)
    hooks.register_hooks(settings)
    assert [target for target, _, _ in hooks.hooks_for(settings)] == registry
    assert is_colocated == any("get_new_batch_prefill" in target for target in registry)


def test_settings_that_cannot_be_meant_end_the_process(
    registry: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would log an exception, and serve without."""
    monkeypatch.setenv("KVTIDE_HOST_MEMORY", "much")
    with pytest.raises(SystemExit, match=r"^kvtide: KVTIDE_HOST_MEMORY: 'much' is not a size"):
        hooks.register_hooks()
    assert [] == registry


def test_an_sglang_that_lacks_a_function_is_left_alone(
    registry: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None of the hooks without all of them; under strict it doesn't start."""
    gone = [("sglang.srt.mem_cache.common.keep_kv_cache", hooks.end, "around")]
    known = hooks.hooks_for
    monkeypatch.setattr(hooks, "hooks_for", lambda settings: [*known(settings), *gone])
    hooks.register_hooks(SETTINGS)
    assert [] == registry
    assert "this SGLang has no sglang.srt.mem_cache.common.keep_kv_cache" in caplog.text
    with pytest.raises(SystemExit, match="keep_kv_cache"):
        hooks.register_hooks(Settings("strict"))


def test_a_hook_that_is_not_called_is_found(
    registry: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not applied; applied; hidden under another plugin's; gone round by an older import."""
    made, importer = (types.ModuleType(f"sglang.srt.{name}") for name in ("made", "importer"))
    for module in (made, importer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("sglang.srt.made", made, raising=False)
    vars(made)["save"] = vars(importer)["saving"] = original = lambda: "saved"
    listed = [("sglang.srt.made.save", hooks.end, "around")]
    monkeypatch.setattr(hooks, "hooks_for", lambda settings: listed)
    hooks.register_hooks(SETTINGS)
    assert ["sglang.srt.made.save"] == hooks.hooks_not_in_place(SETTINGS)
    HookRegistry.register("sglang.srt.made.save", lambda original: original(), HookType.AROUND)
    HookRegistry.apply_hooks()
    assert [] == hooks.hooks_not_in_place(SETTINGS)
    vars(importer)["saving"] = original
    assert ["sglang.srt.importer.saving"] == hooks.hooks_not_in_place(SETTINGS)
