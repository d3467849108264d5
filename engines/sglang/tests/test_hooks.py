"""kvtide's hooks in SGLang: which calls they take over, and which they leave."""

from __future__ import annotations

import sys
import types
from collections import defaultdict
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from requests_of import SETTINGS, Config, Place, Req, Scheduler, keeper_of, raising, same
from sglang.srt import runtime_context
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvtide.arena import Lease
from kvtide.errors import SlotError, SlotsLost
from kvtide.plugin.keeper import Backup, Keeper
from kvtide.plugin.sglang import hooks
from kvtide.plugin.sglang.attachment import Attachment, is_saved
from kvtide.plugin.sglang.settings import Settings

pytest_plugins = ["attached_case"]


class Original:
    """A function of SGLang that records its calls."""

    def __init__(self, result: Any = None) -> None:
        self.result = result
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        return self.result


# ---- calls that kvtide takes over ------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu_tensor", "host_pool"])
def test_kvtide_saves_and_restores_a_retracted_request(
    place: Place, attachment: Attachment, backend: str
) -> None:
    """This holds for every backend that SGLang would have used."""
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
    """The operator asked for retracted requests to be aborted."""
    original, req = Original(False), place.admit("a", 20)
    arguments = (req, object(), place.request_pool, place.allocator, "none")
    assert not hooks.backup_kv_cache(original, *arguments)
    assert [arguments] == original.calls


def test_calls_that_kvtide_does_not_cover_reach_sglang(
    place: Place, attachment: Attachment
) -> None:
    """The slots are another allocator's, or there is no keeper, or no attachment yet."""
    req, other = place.admit("a", 20), Place()
    arguments = (req, object(), place.request_pool, other.allocator, "cpu_tensor")
    original = Original(True)
    assert hooks.backup_kv_cache(original, *arguments)
    hooks.offload_kv_cache(original, req, place.request_pool, other.allocator)
    keeper, attachment.keeper = attachment.keeper, None
    given = (req, object(), place.request_pool, place.allocator, "cpu_tensor")
    assert hooks.backup_kv_cache(original, *given)
    assert hooks.dsv4_needs_rebootstrap(Original(True), place.allocator)
    attachment.keeper = keeper
    assert [arguments, (req, place.request_pool, other.allocator), given] == original.calls


def test_calls_with_a_backup_of_sglang_reach_sglang(place: Place, attachment: Attachment) -> None:
    """A host pool keeps received KV in the same attribute."""
    req, original = place.admit("a", 20), Original()
    req.kv.retraction_backup = object()
    pools = (place.request_pool, place.allocator)
    hooks.restore_kv_cache(original, req, None, *pools, "host_pool")
    hooks.load_kv_cache(original, req, *pools)
    hooks.discard_kv_cache_backup(original, req, None, "host_pool")
    assert [
        (req, None, *pools, "host_pool"), (req, *pools), (req, None, "host_pool")
    ] == original.calls  # fmt: skip


def test_a_full_arena_is_no_error(place: Place, attachment: Attachment) -> None:
    """The hook returns False, and SGLang aborts the request."""
    arena = keeper_of(attachment).arena
    lease: Lease = arena.lease(arena.block_count)
    req = place.admit("a", 20)
    original = Original(True)
    arguments = (req, None, place.request_pool, place.allocator, "cpu_tensor")
    assert not hooks.backup_kv_cache(original, *arguments)
    assert req.kv.retraction_backup is None
    assert [] == original.calls
    lease.release()


@pytest.mark.parametrize("is_half_written", [False, True])
def test_a_request_that_could_not_be_restored_is_removed_and_aborted(
    place: Place, attachment: Attachment, monkeypatch: pytest.MonkeyPatch, is_half_written: bool
) -> None:
    """The others of the same round go on, and the next round isn't affected."""
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
            with monkeypatch.context() as patch:
                if is_half_written and req is bad:
                    patch.setattr("kvtide.tide.Tide.restore", raising(SlotsLost("half written")))
                hooks.restore_kv_cache(Original(), req, *common)
        return [bad, good]

    for req in (bad, good):
        assert hooks.backup_kv_cache(Original(), req, *common)
    backup: Backup = bad.kv.retraction_backup
    if not is_half_written:
        backup.snapshot.lease.blocks[0].bytes_view(1)[0] ^= 1
    queue = SimpleNamespace(retracted_queue=[])
    assert [good] == hooks.resume_retracted_reqs(resume_both, queue)
    (rid, message, code), released = ended
    assert ("bad", 500) == (rid, code)
    why = "half written" if is_half_written else "chunk 0"
    assert f"couldn't be restored: {why}" in message
    assert ("bad", attachment.scheduler.tree_cache, False) == released
    assert [bad] == hooks.resume_retracted_reqs(lambda queue: [bad], queue)


def test_requests_that_come_back_next_are_read_ahead(
    place: Place, attachment: Attachment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kvtide takes those that SGLang leaves in its queue, in order; the last has no backup."""
    wanted: list[str] = []

    def note(keeper: Keeper, waiting: Iterable[Backup]) -> None:
        wanted.extend(backup.request_id for backup in waiting)

    monkeypatch.setattr(Keeper, "read_ahead", note)
    reqs = [place.admit(name, 5, row) for row, name in enumerate(("first", "second", "third"), 1)]
    common = (None, place.request_pool, place.allocator, "cpu_tensor")
    for req in reqs:
        assert hooks.backup_kv_cache(Original(), req, *common)
    queue = SimpleNamespace(retracted_queue=[*reqs, Req("none", 5, 4)])

    def resume_first(queue: Any) -> list[Req]:
        hooks.restore_kv_cache(Original(), queue.retracted_queue[0], *common)
        return [queue.retracted_queue.pop(0)]

    assert [reqs[0]] == hooks.resume_retracted_reqs(resume_first, queue)
    assert ["second", "third"] == wanted
    for req in reqs[1:]:
        attachment.discard(req)


def test_an_aborted_requests_backup_is_discarded(place: Place, attachment: Attachment) -> None:
    """Its part of the arena is free, and SGLang isn't called."""
    req, original = place.admit("a", 20), Original()
    hooks.backup_kv_cache(original, req, None, place.request_pool, place.allocator, "host_pool")
    hooks.discard_kv_cache_backup(original, req, None, "host_pool")
    assert (None, 0) == (req.kv.retraction_backup, keeper_of(attachment).arena.used_bytes)
    assert [] == original.calls


def test_direct_callers_are_covered_too(place: Place, attachment: Attachment) -> None:
    """They get an error where the other functions return False."""
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
    """SGLang asks this for DeepSeek-V4's pools, which it can't copy."""
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
def test_the_default_backend_is_the_one_without_a_pool(
    place: Place,
    configure: Config,
    monkeypatch: pytest.MonkeyPatch,
    disagg: dict[str, Any],
    is_known: bool,
    chosen: str | None,
) -> None:
    """kvtide chooses it only if it covers the pool and the operator chose none."""
    overrides: list[str] = []
    context = SimpleNamespace(override=lambda source, **fields: overrides.extend(fields.values()))
    monkeypatch.setattr(runtime_context, "get_context", lambda: context)
    configure(**disagg)
    if not is_known:
        monkeypatch.setattr("kvtide.plugin.sglang.pools.describe.DESCRIBERS", {})
    worker = SimpleNamespace(get_memory_pool=lambda: (place.request_pool, place.allocator))
    found = hooks.resolve_decode_retraction_backup(lambda tp_worker: "resolved", tp_worker=worker)
    assert "resolved" == found
    assert ([] if chosen is None else [chosen]) == overrides


# ---- with SGLang's registry ------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """SGLang's registry, emptied for a test; the value lists the registered targets."""
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
    """KVTIDE_SGLANG=0 has the same effect as if kvtide weren't installed."""
    hooks.register_hooks(Settings("off", is_colocated=True))
    assert [] == registry


@pytest.mark.parametrize("is_colocated", [False, True])
def test_every_hooked_function_exists(registry: list[str], is_colocated: bool) -> None:
    """The installed SGLang has them all; those of ordinary servers are hooked only on request."""
    settings = Settings("strict", is_colocated)
    hooks.register_hooks(settings)
    assert [target for target, _, _ in hooks.hooks_for(settings)] == registry
    assert is_colocated == any("get_new_batch_prefill" in target for target in registry)


def test_no_function_has_two_hooks() -> None:
    """SGLang would warn of them in each of its processes, whenever a server starts."""
    targets = [target for target, _, _ in hooks.hooks_for(Settings(is_colocated=True))]
    assert sorted({*targets}) == sorted(targets)


def test_invalid_settings_end_the_process(
    registry: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would log an exception, and serve without."""
    monkeypatch.setenv("KVTIDE_HOST_MEMORY", "24")
    with pytest.raises(SystemExit, match=r"^kvtide: KVTIDE_HOST_MEMORY: '24' has no unit"):
        hooks.register_hooks()
    assert [] == registry


def test_an_sglang_that_lacks_a_function_is_left_alone(
    registry: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No hook is registered unless all can be; under strict the server doesn't start."""
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
    """A hook may be missing, hidden by another plugin's, or bypassed by an older import."""
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


def test_kvtide_does_nothing_if_a_hook_is_missing(
    place: Place, configure: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With half of the hooks a request that can't be restored would stay in the batch."""
    monkeypatch.setattr(hooks, "hooks_not_in_place", lambda settings: ["a.b"])
    scheduler, original = Scheduler(place.allocator, place.request_pool), Original(True)
    hooks._beginning(SETTINGS)(lambda *_: None, scheduler)
    req = place.admit("a", 20)
    common = (object(), place.request_pool, place.allocator, "cpu_tensor")
    assert hooks.backup_kv_cache(original, req, *common)
    assert not is_saved(req)
    assert [(req, *common)] == original.calls
    unheard = AssertionError("kvtide chooses nothing")
    monkeypatch.setattr(hooks, "resolve_decode_retraction_backup", raising(unheard))
    choose = hooks._choosing(SETTINGS)
    assert "host_pool" == choose(lambda tp_worker: "host_pool", tp_worker=object())
