"""How much host memory an arena may take on this machine and in a container."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from kvtide.arena import budget
from kvtide.device import CPUDevice
from kvtide.layout import GQA
from kvtide.pool import Pool

GEOMETRY = GQA.bind(dtype="uint8", layer=1, token=4, head=1, head_dim=5, v_head_dim=5)
V1, V2 = "memory.limit_in_bytes memory.usage_in_bytes", "memory.max memory.current"
Control = Callable[[str, str, int, int], Path]


def test_host_memory_is_a_quarter_of_what_the_pool_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written to counts as taken. A caller may pass the free bytes."""
    monkeypatch.setattr(budget, "free_memory_bytes", lambda: 1000)
    assert 100 == budget.default_host_bytes(600)
    assert 0 == budget.default_host_bytes(1001)
    assert 50 == budget.default_host_bytes(600, 800)


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Control:
    """A function that gives a group below the test's mount a limit and a usage."""
    monkeypatch.setattr(budget, "_CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(budget, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(budget, "_free_system_bytes", lambda: 1 << 40)

    def set_group(group: str, files: str, limit: int, used: int) -> Path:
        folder = tmp_path / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in zip(files.split(), (limit, used), strict=True):
            (folder / name).write_text(f"{value}\n")
        return folder

    return set_group


def write_stat(folder: Path, prefix: str = "", **lines: int) -> None:
    """Writes a group's memory.stat; in v1 the group's own numbers come first."""
    alone = [f"{name} 7\n" for name in lines if prefix]
    total = [f"{prefix}{name} {value}\n" for name, value in lines.items()]
    (folder / "memory.stat").write_text("".join(alone + total))


@pytest.mark.parametrize(("mount", "files", "prefix"), [("", V2, ""), ("memory", V1, "total_")])
def test_cached_files_count_as_free(control: Control, mount: str, files: str, prefix: str) -> None:
    """The system drops cached files as soon as somebody needs the memory.

    Shared memory also belongs to files, but it isn't free, and neither are locked pages.
    """
    folder = control(mount, files, 5000, 4500)
    write_stat(folder, prefix, anon=500, file=4000, inactive_anon=300, unevictable=200)
    assert 500 == budget.free_memory_bytes()
    write_stat(folder, prefix, anon=500, file=4000, active_file=1000, inactive_file=2500)
    assert 4000 == budget.free_memory_bytes()


@pytest.mark.parametrize(
    ("mount", "files", "prefix", "dirty", "under_way"),
    [
        ("", V2, "", "file_dirty", "file_writeback"),
        ("memory", V1, "total_", "dirty", "writeback"),
    ],
)
def test_files_that_are_not_yet_written_are_not_free(
    control: Control, mount: str, files: str, prefix: str, dirty: str, under_way: str
) -> None:
    """They must be written to a disk first."""
    folder = control(mount, files, 5000, 4500)
    write_stat(folder, prefix, active_file=1000, inactive_file=2000, **{dirty: 600, under_way: 50})
    assert 500 + 3000 - 650 == budget.free_memory_bytes()
    write_stat(folder, prefix, active_file=1000, **{dirty: 1200})
    assert 500 == budget.free_memory_bytes()


def test_each_group_above_has_its_own_caches(control: Control, tmp_path: Path) -> None:
    """Files that another group has read are free in the group above both, and only there."""
    (tmp_path / "own").write_text("0::/unit/job\n")
    unit, job = control("unit", V2, 9000, 8000), control("unit/job", V2, 6000, 2000)
    write_stat(unit, inactive_file=2000)
    write_stat(job, inactive_file=0)
    assert 3000 == budget.free_memory_bytes()
    write_stat(unit, inactive_file=5000)
    assert 4000 == budget.free_memory_bytes()
    write_stat(job, inactive_file=1500)
    assert 5500 == budget.free_memory_bytes()


def test_no_group_has_more_than_its_limit_and_the_system(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two numbers aren't read at the same time, so the system's number is the upper limit.

    A file that can't be understood frees nothing.
    """
    folder = control("", V2, 5000, 4500)
    write_stat(folder, inactive_file=9000)
    assert 5000 == budget.free_memory_bytes()
    (folder / "memory.stat").write_text("inactive_file many\n")
    assert 500 == budget.free_memory_bytes()
    write_stat(folder, inactive_file=4000)
    monkeypatch.setattr(budget, "_free_system_bytes", lambda: 1200)
    assert 1200 == budget.free_memory_bytes()


def test_only_written_pages_have_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page of the system gets memory when it is written, and a shared storage counts once.

    If the system doesn't say it, or says it of every page, all pages count as untouched.
    """
    fresh = torch.from_numpy(numpy.zeros(64 << 20, dtype=numpy.uint8))
    half, page = 32 << 20, 2 << 20  # pages are of 4 KiB up to 2 MiB, as the system likes
    device = CPUDevice(lanes=1)
    planes = {"k": [fresh[:half].view(-1, 1, 8)], "v": [fresh[half:].view(-1, 1, 8)]}
    geometry = GQA.bind(dtype="uint8", layer=1, token=4, head=1, head_dim=8, v_head_dim=8)
    pool = Pool.adopt(geometry, device, planes)
    assert 2 * half - page <= budget.untouched_bytes_of(pool.buffers) <= 2 * half
    fresh[:half] = 1
    assert half - page <= budget.untouched_bytes_of(pool.buffers) <= half
    fresh[:] = 1
    assert 0 == budget.untouched_bytes_of(pool.buffers)
    with monkeypatch.context() as patch:
        patch.setattr(budget, "_count_resident", lambda _, size_bytes: size_bytes)
        assert 2 * half == budget.untouched_bytes_of(pool.buffers)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert 2 * half == budget.untouched_bytes_of(pool.buffers)
    device.close()


def test_a_containers_limit_counts(control: Control) -> None:
    """The system kills a process beyond the limit. If more is used, nothing is free."""
    folder = control("", V2, 5000, 2000)
    assert 3000 == budget.free_memory_bytes()
    (folder / "memory.current").write_text("5001\n")
    assert 0 == budget.free_memory_bytes()
    (folder / "memory.max").write_text("max\n")
    assert 1 << 40 == budget.free_memory_bytes()


def test_the_tightest_of_the_groups_above_counts(control: Control, tmp_path: Path) -> None:
    """A group without files doesn't hide the groups above it; a group beside it doesn't count."""
    (tmp_path / "own").write_text("0::/unit/job/step\n")
    control("unit", V2, 9000, 2000)
    control("unit/other", V2, 10, 0)
    control("unit/job/step", V2, 8000, 500)
    assert 7000 == budget.free_memory_bytes()
    control("unit/job", V2, 6000, 1000)
    assert 5000 == budget.free_memory_bytes()


def test_control_groups_v1_count(control: Control, tmp_path: Path) -> None:
    """The line of the memory controller counts, which may name others; 2**63 is no limit."""
    (tmp_path / "own").write_text("9:name=systemd:/x\n4:cpu,memory:/unit/a:b\n0::/y\n")
    control("memory", V1, 2**63 - 4096, 5000)
    control("memory/x", V1, 10, 0)
    assert 1 << 40 == budget.free_memory_bytes()
    control("memory/unit", V1, 7000, 1000)
    control("memory/unit/a:b", V1, 9000, 1000)
    assert 6000 == budget.free_memory_bytes()
    control("memory/unit/a:b", V1, 4000, 1000)
    assert 3000 == budget.free_memory_bytes()


@pytest.mark.parametrize(("mount", "files"), [("", V2), ("memory", V1)])
@pytest.mark.parametrize("text", ["4:memory:/host/id\n0::/host/id\n", "0::/../id\n", "what?\n", ""])
def test_a_path_of_the_host_leaves_the_mount_itself(
    control: Control, tmp_path: Path, mount: str, files: str, text: str
) -> None:
    """In a container the mount is the group, and the path may be missing or unknown."""
    if text:
        (tmp_path / "own").write_text(text)
    control(mount, files, 4000, 1000)
    assert 3000 == budget.free_memory_bytes()
