"""The kit finds bugs that are planted in a layout, plan, mover, pool, tide or device.

Each test plants a bug and runs the kit's own tests. If none of them failed, the kit would have a
hole.
"""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import simnpu

from conformance.test_devices import OnAnAccelerator
from kvtide import tide as tide_module
from kvtide.conformance import LayoutTests, Sample
from kvtide.conformance.pool_under_test import KINDS
from kvtide.conformance.samples import sample
from kvtide.device import AcceleratorDevice, CPUDevice, Device, Step
from kvtide.device import accelerator as accelerator_module
from kvtide.form import Section, chunk_sizes, sections_of
from kvtide.layout import BufferRows, EveryNth, Geometry, Layout, Mapped, Plane, Rows, Striped
from kvtide.pool import Pool
from kvtide.pool import memory as memory_module
from kvtide.seal import Seal, Span
from kvtide.snapshot import Snapshot
from kvtide.transfer import mover as mover_module
from kvtide.transfer import plan as plan_module
from kvtide.transfer.bind import memories_of
from kvtide.transfer.mover import Mover
from support.simulated import simulated

Plant = Callable[[pytest.MonkeyPatch], None]


class Kit(LayoutTests):
    """The kit's tests of layouts, on some samples."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def samples(self) -> Sequence[Sample]:
        """Returns the named samples."""
        return [sample(name) for name in self.names]


class DeviceKit(OnAnAccelerator):
    """The kit's tests of devices."""

    def make_device(self) -> Device:
        """Makes the simulated device."""
        return AcceleratorDevice("npu")


def failed_tests(kit: Kit, device: Device) -> set[str]:
    """Returns the names of the kit's tests that fail."""
    failed: set[str] = set()
    for name, test in inspect.getmembers(kit, inspect.ismethod):
        if not name.startswith("test_"):
            continue
        wanted = inspect.signature(test).parameters
        for case in kit.samples():
            for kind in KINDS if "kind" in wanted else [""]:
                given = {"sample": case, "kind": kind, "device": device}
                try:
                    test(**{key: given[key] for key in wanted})
                except Exception:
                    failed.add(name)
    return failed


# ---- layouts and rules -------------------------------------------------------------------


def head_dim_for_v_head_dim(patch: pytest.MonkeyPatch) -> None:
    """The values are as wide as the keys."""
    bound = Plane.bound

    def mistaken(self: Plane, sizes: Any, page_size: int, dtype: str) -> Any:
        return bound(self, {**sizes, "v_head_dim": sizes["head_dim"]}, page_size, dtype)

    patch.setattr(Plane, "bound", mistaken)


def scales_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A geometry has two planes, whatever is declared."""
    bind = Layout.bind

    def two_planes(self: Layout, **sizes: Any) -> Geometry:
        geometry = bind(self, **sizes)
        return replace(geometry, planes=geometry.planes[:2])

    patch.setattr(Layout, "bind", two_planes)


def page_for_slot(patch: pytest.MonkeyPatch) -> None:
    """A row of several tokens is found by its slot's number, not by its place in the page."""

    def apply(self: EveryNth, rows: Rows, maps: Any) -> Rows:
        first = rows.ids % self.count == 0
        return Rows(rows.ids[first], rows.tokens[first])

    patch.setattr(EveryNth, "apply", apply)


def holes_closed_up(patch: pytest.MonkeyPatch) -> None:
    """The rows that remain in a window get new numbers, as if none had left it."""

    def apply(self: Mapped, rows: Rows, maps: Any) -> Rows:
        mapped = maps[self.name](rows.ids)
        inside = mapped > self.hole
        return Rows(mapped[inside], rows.tokens[: int(inside.sum())])

    patch.setattr(Mapped, "apply", apply)


def padding_taken_for_a_row(patch: pytest.MonkeyPatch) -> None:
    """Row 0 moves, though it stands for no row."""

    def apply(self: Mapped, rows: Rows, maps: Any) -> Rows:
        mapped = maps[self.name](rows.ids)
        first = np.unique(np.maximum(mapped, 0), return_index=True)[1]
        first.sort()
        return Rows(np.maximum(mapped, 0)[first], rows.tokens[first])

    patch.setattr(Mapped, "apply", apply)


def first_rank_for_all(patch: pytest.MonkeyPatch) -> None:
    """Every rank moves the rows of rank 0."""

    def apply(self: Striped, rows: Rows, maps: Any) -> Rows:
        kept = rows.ids % self.world == 0
        return Rows(rows.ids[kept] // self.world, rows.tokens[kept])

    patch.setattr(Striped, "apply", apply)


def fingerprint_without_sizes(patch: pytest.MonkeyPatch) -> None:
    """Geometries of the same layout are equal, whatever their sizes."""
    patch.setattr(Geometry, "canonical", property(lambda self: f'{{"name":"{self.layout.name}"}}'))


# ---- plan and mover -------------------------------------------------------------------------


def off_by_one_chunk(patch: pytest.MonkeyPatch) -> None:
    """The last row of a full chunk is replaced by the row before it."""
    plan = plan_module.plan_chunks

    def mistaken(section: Section, groups: Any, rows: Any, *rest: int) -> Any:
        rows = rows.copy()
        if rows.size >= section.chunk_rows > 1:
            rows[section.chunk_rows - 1] = rows[section.chunk_rows - 2]
        return plan(section, groups, rows, *rest)

    patch.setattr(plan_module, "plan_chunks", mistaken)


def last_chunk_dropped(patch: pytest.MonkeyPatch) -> None:
    """Only whole chunks move."""

    def chunk_count(self: Section, count: int) -> int:
        return count * self.row_parts // self.chunk_rows

    patch.setattr(Section, "chunk_count", chunk_count)
    patch.setattr(
        tide_module,
        "chunk_sizes",
        lambda sections, counts: list(chunk_sizes(sections, counts))[
            : sum(section.chunk_count(counts[section.group]) for section in sections)
        ],
    )


def plane_dropped(patch: pytest.MonkeyPatch) -> None:
    """The last plane of the pool doesn't move."""

    def without_last(geometry: Geometry, size: int) -> list[Section]:
        return sections_of(replace(geometry, planes=geometry.planes[:-1]), size)

    patch.setattr(mover_module, "sections_of", without_last)


def request_planes_dropped(patch: pytest.MonkeyPatch) -> None:
    """Only planes with a row for each token move."""
    patch.setattr(
        mover_module,
        "sections_of",
        lambda geometry, size: [part for part in sections_of(geometry, size) if part.group == 0],
    )


def wrong_order_of_parts(patch: pytest.MonkeyPatch) -> None:
    """The parts of split rows move in the order of parts, not of rows."""

    def split(self: Section, rows: Any) -> Any:
        return (rows[None, :] * self.row_parts + np.arange(self.row_parts)[:, None]).reshape(-1)

    patch.setattr(Section, "split", split)


def checksum_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Spans are hashed, but the checksums are not compared."""
    patch.setattr(mover_module, "_check", lambda span, memory: [])


def written_before_all_is_checked(patch: pytest.MonkeyPatch) -> None:
    """Each chunk is checked only after the chunk before it was written."""

    def scatter(
        self: Mover,
        blocks: Any,
        rows: Any,
        *,
        chunk_bytes: int,
        spans: Sequence[Span],
        at_once: bool = False,
        owner: object = None,
    ) -> Any:
        def phases() -> Any:
            memories = memories_of(blocks)
            (tasks,) = self._tasks(rows, blocks, memories, chunk_bytes)
            for task, span in zip(tasks, spans, strict=True):
                yield [Step(partial(mover_module._check, [span], memories))]
                yield [Step(mover_module._nothing, task.scatter)]

        return self._submit(phases, rows, blocks, chunk_bytes, at_once)

    patch.setattr(Mover, "scatter", scatter)


# ---- pool, tide, snapshot ---------------------------------------------------------------------


def global_layer_id(patch: pytest.MonkeyPatch) -> None:
    """The layers of a later stage are counted from the model's first layer."""
    plane = Pool.plane
    patch.setattr(
        Pool,
        "plane",
        lambda self, name, layer: plane(self, name, layer - self.geometry.first_layer),
    )


def layers_the_other_way_round(patch: pytest.MonkeyPatch) -> None:
    """A created pool has its layers in reverse order."""
    rows = BufferRows
    patch.setattr(
        memory_module,
        "BufferRows",
        lambda size, starts, *rest: rows(size, starts[::-1].copy(), *rest),
    )


def stale_index_map(patch: pytest.MonkeyPatch) -> None:
    """The engine's map is read only once, when the pool is made."""
    init = Pool.__init__

    def keep(self: Pool, *arguments: Any) -> None:
        geometry, device, memory, slot_count, maps, *padding_slots = arguments
        maps = {name: held.clone() for name, held in maps.items()}
        init(self, geometry, device, memory, slot_count, maps, *padding_slots)

    patch.setattr(Pool, "__init__", keep)


def request_row_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The state of every request is in row 0."""
    rows_of = Pool.rows_of

    def first(self: Pool, slots: Any, request: int | None = None) -> Any:
        return rows_of(self, slots, None if request is None else 0)

    patch.setattr(Pool, "rows_of", first)


def window_by_place(patch: pytest.MonkeyPatch) -> None:
    """Rows are restored into the target's first rows, whichever tokens these belong to."""

    def rows_in(self: Snapshot, group: int, target: Rows) -> Any:
        return target.ids[: self.seal.tokens_of(group).size]

    patch.setattr(Snapshot, "rows_in", rows_in)


def key_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Every snapshot of the right length may be restored."""
    check = Seal.check_target

    def without_key(self: Seal, geometry: str, key: str, token_count: int) -> None:
        check(self, geometry, self.key, token_count)

    patch.setattr(Seal, "check_target", without_key)


def slots_not_checked(patch: pytest.MonkeyPatch) -> None:
    """Slots aren't checked: -1 means the last row, and a row may be written twice."""
    patch.setattr(Pool, "checked", lambda _, slots: np.array(slots, np.int64))


def slots_by_reference(patch: pytest.MonkeyPatch) -> None:
    """The caller's array is kept, so a later change of it changes what moves."""
    kept = Pool.checked

    def checked(self: Pool, slots: Any) -> Any:
        kept(self, slots)
        return np.asarray(slots) if len(slots) else np.empty(0, np.int64)

    patch.setattr(Pool, "checked", checked)


def snapshot_is_a_range(patch: pytest.MonkeyPatch) -> None:
    """The snapshot keeps the whole range between the first and the last token that have rows."""
    patch.setattr(
        tide_module,
        "ranges_of",
        lambda tokens: (
            () if tokens is None or not tokens.size else (range(tokens[0], tokens[-1] + 1),)
        ),
    )


PLANTED: list[tuple[Plant, tuple[str, ...]]] = [
    (head_dim_for_v_head_dim, ("gqa",)),
    (scales_forgotten, ("gqa_scaled",)),
    (page_for_slot, ("gqa_hnd",)),
    (page_for_slot, ("compressed_4",)),
    (holes_closed_up, ("window",)),
    (holes_closed_up, ("window-of-pages",)),
    (padding_taken_for_a_row, ("window_and_full",)),
    (first_rank_for_all, ("gqa-context-parallel",)),
    (fingerprint_without_sizes, ("mla",)),
    (off_by_one_chunk, ("k_only",)),
    (last_chunk_dropped, ("mla_split",)),
    (plane_dropped, ("mla_split-index-keys-on-some-layers",)),
    (plane_dropped, ("target_and_draft",)),
    (request_planes_dropped, ("recurrent_and_full",)),
    (request_planes_dropped, ("compressed_4-pending",)),
    (wrong_order_of_parts, ("gqa_fp4",)),
    (checksum_not_compared, ("gqa",)),
    (written_before_all_is_checked, ("gqa",)),
    (global_layer_id, ("gqa-fp8-late-stage",)),
    (layers_the_other_way_round, ("gqa",)),
    (stale_index_map, ("window",)),
    (request_row_forgotten, ("recurrent",)),
    (window_by_place, ("window",)),
    (key_not_compared, ("gqa",)),
    (slots_not_checked, ("gqa",)),
    (slots_by_reference, ("recurrent_and_mla",)),
    (snapshot_is_a_range, ("window_and_full",)),
]


@pytest.mark.parametrize(
    ("plant", "names"), PLANTED, ids=[f"{plant.__name__}-{names[0]}" for plant, names in PLANTED]
)
def test_planted_bug_is_found(
    plant: Plant, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least one of the kit's tests fails; all of them pass without the bug."""
    device, kit = CPUDevice(lanes=1), Kit(*names)
    plant(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a test that fails leaves its snapshot
        failed = failed_tests(kit, device)
        device.close()
        gc.collect()
    assert failed


@pytest.mark.parametrize("names", sorted({names for _, names in PLANTED}), ids=lambda n: n[0])
def test_nothing_is_found_without_a_planted_bug(names: tuple[str, ...]) -> None:
    """The same tests pass without a bug."""
    device = CPUDevice(lanes=1)
    assert set() == failed_tests(Kit(*names), device)
    device.close()


# ---- devices ----------------------------------------------------------------------------------


def staging_shared(patch: pytest.MonkeyPatch) -> None:
    """Both streams share one staging buffer."""
    shared: list[Any] = []
    prepare = accelerator_module.CopyStream.prepare

    def prepare_one(self: Any, staging_bytes: int) -> None:
        prepare(self, staging_bytes)
        shared[:] = [kept for kept in shared if kept.numel() >= staging_bytes] or [self._staging]
        self._staging = shared[0]

    patch.setattr(accelerator_module.CopyStream, "prepare", prepare_one)


def copies_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A copy counts as done as soon as it is requested."""

    class Over:
        def synchronize(self) -> None:
            """Returns without waiting."""

    issue = accelerator_module.CopyStream.issue

    def issue_alone(self: Any, step: Any) -> Any:
        issue(self, step)
        return Over()

    patch.setattr(accelerator_module.CopyStream, "issue", issue_alone)


DEVICE_PLANTED: list[tuple[Plant, str, str]] = [
    (staging_shared, "test_each_step_has_staging_for_itself", "random:0"),
    (copies_not_waited_for, "test_bytes_have_arrived_when_the_host_is_called", "lazy"),
]


@pytest.mark.parametrize(
    ("plant", "test", "schedule"),
    DEVICE_PLANTED,
    ids=[planted[0].__name__ for planted in DEVICE_PLANTED],
)
@pytest.mark.parametrize("is_planted", [True, False])
def test_planted_bug_of_a_device_is_found(
    plant: Plant, test: str, schedule: str, is_planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kit's test for this bug fails on the simulated accelerator."""
    with simulated(schedule):
        if is_planted:
            plant(monkeypatch)
        kit = DeviceKit()
        device = kit.make_device()
        try:
            getattr(kit, test)(device)
        except (AssertionError, RuntimeError):
            noticed = True
        else:
            noticed = False
        finally:
            device.close()
            simnpu.reset()
    assert is_planted == noticed
