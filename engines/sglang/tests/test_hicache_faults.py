"""A storage whose disk is damaged, full, hung or gone: a page comes back whole or not at all."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hicache_case import buffers, config, fill, keys_values, names, page_bytes, rows_of, storage

from kvtide.plugin.sglang.hicache.backend import Storage
from kvtide.tier.disk import DiskTier
from kvtide.tier.file_form import ALIGNMENT
from kvtide.tier.folder import Folder

COUNT = 6
PAGES = tuple(range(COUNT))
WHOLE = [True] * COUNT
NONE = [False] * COUNT


@pytest.fixture
def pool() -> Any:
    """A pool of keys and values, with random bytes."""
    pool = keys_values("page_first")
    fill(pool)
    return pool


@pytest.fixture
def store(pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """A storage that doesn't wait between tries."""
    monkeypatch.setattr("kvtide.tier.retries.WAITS_S", ())
    monkeypatch.setattr("kvtide.tier.retries.REST_S", 0.0)
    store = storage(monkeypatch, config(tmp_path), {"kv": pool})
    yield store
    store.close()


def put(store: Storage, pool: Any, pages: tuple[int, ...] = PAGES) -> list[bool]:
    """Keeps pages of the pool under the names of as many pages."""
    return store.batch_set_v1(names(len(pages)), rows_of(pool, pages))


def get(store: Storage, pool: Any) -> list[bool]:
    """Overwrites all pages of the pool, and reads those that were kept."""
    for buffer in buffers(pool):
        buffer.fill_(0xEE)
    return store.batch_get_v1(names(COUNT), rows_of(pool, PAGES))


def files(folder: Path) -> list[Path]:
    """Lists the files of pages, the oldest first."""
    return sorted(folder.rglob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


def file_of(folder: Path, store: Storage, number: int) -> Path:
    """Finds the file of a page."""
    from kvtide.tier.names import name_of

    key = store._identity.keys_of(store._pools["kv"], names(COUNT))[number]
    return next(folder.rglob(f"{name_of(key)}.safetensors"))


def flip(path: Path) -> None:
    """Changes a bit of a page's bytes."""
    content = bytearray(path.read_bytes())
    content[ALIGNMENT + 5] ^= 16
    path.write_bytes(content)


def cut(path: Path) -> None:
    """Leaves the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    """Leaves nothing in a file, as a power cut may."""
    path.write_bytes(b"")


def lose(path: Path) -> None:
    """Removes a file."""
    path.unlink()


@pytest.mark.parametrize("damage", [flip, cut, empty, lose])
def test_a_damaged_page_is_dropped_and_written_anew(
    damage: Callable[[Path], None], store: Storage, pool: Any, tmp_path: Path
) -> None:
    """The other pages come back, and the next time the same page is kept it is whole again."""
    assert put(store, pool) == WHOLE
    kept = [page_bytes(pool, page) for page in PAGES]
    damage(file_of(tmp_path, store, 2))
    expected = [True, True, False, True, True, True]
    assert expected == get(store, pool)
    assert all(torch.equal(kept[n], page_bytes(pool, n)) for n in PAGES if expected[n])
    assert store.batch_exists(names(COUNT)) == 2, "it isn't tried again"
    assert store._counts.pages["damaged"] == int(damage is not lose)

    fill(pool)
    assert put(store, pool) == WHOLE
    assert get(store, pool) == WHOLE
    assert all(torch.equal(kept[n], page_bytes(pool, n)) for n in PAGES)


def test_a_page_under_the_name_of_another_is_damaged(
    store: Storage, pool: Any, tmp_path: Path
) -> None:
    """A file that was copied over another has a right checksum, and the wrong key."""
    assert put(store, pool) == WHOLE
    file_of(tmp_path, store, 1).write_bytes(file_of(tmp_path, store, 0).read_bytes())
    assert [True, False, *WHOLE[2:]] == get(store, pool)


@pytest.mark.parametrize(
    "change",
    [{"key": "x"}, {"geometry": ""}, {"token_count": 9}],
    ids=lambda change: next(iter(change)),
)
def test_a_file_whose_seal_is_of_another_page_is_a_miss(
    change: dict[str, Any], store: Storage, pool: Any
) -> None:
    """Its key is the page's and its checksums are right, so only the seal itself tells."""
    assert put(store, pool) == WHOLE
    assert store._places is not None
    disk = store._places.disk
    assert disk is not None
    key = store._identity.keys_of(store._pools["kv"], names(COUNT))[2]
    rooms = [memoryview(bytearray(store._pools["kv"].size_bytes))]
    seal = disk.get(key, lambda seal: rooms)
    if "geometry" in change:
        change = {"geometry": seal.geometry.replace('"kv"', '"other"')}
    disk.put(key, replace(seal, **change), rooms)
    assert [True, True, False, True, True, True] == get(store, pool)
    assert 1 == store._counts.pages["miss"]


def test_on_a_full_disk_the_oldest_pages_leave(
    store: Storage, pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has less room than the limit: it has two pages, whatever SGLang asks for."""
    original = Folder.write

    def write(folder: Folder, *arguments: Any) -> Any:
        if len(files(tmp_path)) >= 2:
            raise OSError(errno.ENOSPC, "no space left on device")
        return original(folder, *arguments)

    monkeypatch.setattr(Folder, "write", write)
    kept = [page_bytes(pool, page) for page in PAGES]
    for page in PAGES:
        assert store.batch_set_v1(names(COUNT)[page : page + 1], rows_of(pool, (page,))) == [True]
        assert len(files(tmp_path)) <= 2
    assert [*NONE[2:], True, True] == get(store, pool)
    assert all(torch.equal(kept[page], page_bytes(pool, page)) for page in PAGES[-2:])


def test_a_disk_that_takes_nothing_gives_what_it_has(
    store: Storage, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are kept again when it takes them."""

    def write(*_: Any) -> Any:
        raise OSError(errno.EROFS, "read-only file system")

    assert put(store, pool, (0, 1)) == [True, True]
    with monkeypatch.context() as full:
        full.setattr(Folder, "write", write)
        assert put(store, pool) == [True, True, *NONE[2:]]
        assert get(store, pool) == [True, True, *NONE[2:]]
    assert put(store, pool) == WHOLE


def test_a_folder_that_was_removed_is_a_miss(store: Storage, pool: Any, tmp_path: Path) -> None:
    """The server goes on without its disk."""
    assert put(store, pool) == WHOLE
    shutil.rmtree(tmp_path / "hicache")
    assert get(store, pool) == NONE
    assert put(store, pool) == NONE
    assert store.batch_exists(names(COUNT)) == 0


def test_the_oldest_pages_leave_for_others(
    pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files never take more than the limit."""
    limit = 4 * 2 * ALIGNMENT
    store = storage(monkeypatch, config(tmp_path, disk_memory=f"{limit}B"), {"kv": pool})
    for page in PAGES:
        name = names(COUNT)[page : page + 1]
        assert store.batch_set_v1(name, rows_of(pool, (page,))) == [True]
        assert sum(path.stat().st_size for path in files(tmp_path)) <= limit
    assert [False, False, *WHOLE[2:]] == get(store, pool)
    store.close()


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch, method: str) -> Iterator[threading.Event]:
    """Within, a method of DiskTier doesn't return; at the end it goes on and does its work.

    Yields an event that says that it was called.
    """
    original, called, go_on = getattr(DiskTier, method), threading.Event(), threading.Event()

    def hang(*arguments: Any) -> Any:
        called.set()
        go_on.wait()
        return original(*arguments)

    with monkeypatch.context() as changed:
        changed.setattr(DiskTier, method, hang)
        try:
            yield called
        finally:
            go_on.set()


def settle(store: Storage) -> None:
    """Waits until no thread of a storage is in a late call."""
    for job in store._moves._late:
        job.settle()


@pytest.fixture
def hasty(pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """A storage with a short deadline."""
    store = storage(monkeypatch, config(tmp_path, deadline_s=0.2), {"kv": pool})
    yield store
    store.close()


def test_a_read_that_ends_too_late_writes_to_no_page(
    pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang has given the page's memory to other KV by then."""
    writer = storage(monkeypatch, config(tmp_path), {"kv": pool})
    assert put(writer, pool) == WHOLE
    writer.close()
    hasty = storage(monkeypatch, config(tmp_path, deadline_s=0.2), {"kv": pool})
    with hanging(monkeypatch, "get"):
        assert get(hasty, pool) == NONE
        assert get(hasty, pool) == NONE, "nobody waits for a disk that doesn't answer"
        fill(pool, seed=7)
        expected = [buffer.clone() for buffer in buffers(pool)]
    settle(hasty)
    assert all(map(torch.equal, expected, buffers(pool)))
    settle(hasty)
    hasty.close()


def test_a_disk_that_answers_again_is_used_again(
    hasty: Storage, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages whose writes were late are there, too, if their writes had begun."""
    with hanging(monkeypatch, "put"):
        assert put(hasty, pool) == NONE
    settle(hasty)
    hasty._moves._deadline_s = 60.0
    assert put(hasty, pool) == WHOLE
    assert get(hasty, pool) == WHOLE


def test_a_write_that_ends_too_late_has_written_what_the_page_held(
    hasty: Storage, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other KV that lies there by now must not get the page's name."""
    kept = [page_bytes(pool, page) for page in PAGES]
    with hanging(monkeypatch, "put"):
        assert put(hasty, pool) == NONE
        fill(pool, seed=7)
    settle(hasty)
    hasty._moves._deadline_s = 60.0
    found = get(hasty, pool)
    assert any(found), "the first writes had begun"
    for page in PAGES:
        assert not found[page] or torch.equal(kept[page], page_bytes(pool, page))


def test_nobody_waits_for_a_store_that_does_not_say_what_it_has(
    hasty: Storage, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question is bounded as a read is; the next call doesn't even ask."""
    hasty._moves._deadline_s = 60.0
    assert put(hasty, pool, (0,)) == [True]
    hasty._moves._deadline_s = 0.2
    with hanging(monkeypatch, "contains"):
        assert hasty.batch_exists(names(COUNT)) == 0
        hasty._moves._deadline_s = 10_000.0
        assert hasty.batch_exists(names(COUNT)) == 0
        assert get(hasty, pool) == NONE
    settle(hasty)
    assert hasty.batch_exists(names(COUNT)) == 1


def test_a_flush_ends_calls_early(
    pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang waits for its threads when the cache is flushed, and ends the server after that."""
    patient = storage(monkeypatch, config(tmp_path, deadline_s=8), {"kv": pool})
    patient._moves._deadline_s = 10_000.0
    results: list[list[bool]] = []
    call = threading.Thread(target=lambda: results.append(put(patient, pool)))
    with hanging(monkeypatch, "put") as called:
        call.start()
        called.wait()
        with patient.hurrying():
            call.join()
    assert results == [NONE]
    settle(patient)
    patient.close()


def test_nothing_raises(store: Storage, pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a call of the storage would end SGLang's scheduler, or one of its threads."""
    assert put(store, pool) == WHOLE
    rows = rows_of(pool, PAGES)
    assert store.batch_get_v1(names(COUNT), rows[:-1]) == NONE, "rows that aren't whole pages"
    assert store.batch_set_v1(names(COUNT), rows[:-1]) == NONE
    assert store.batch_get(names(1), [torch.zeros(3)]) == [None]
    assert store.set(names(1)[0], torch.zeros(3)) is False

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("made up")

    with monkeypatch.context() as broken:
        for method in ("get", "put", "contains"):
            broken.setattr(DiskTier, method, fail)
        assert get(store, pool) == NONE
        assert put(store, pool) == NONE
        assert store.batch_exists(names(COUNT)) == 0
    with monkeypatch.context() as broken:
        broken.setattr("kvtide.plugin.sglang.hicache.identity.Identity.keys_of", fail)
        broken.setattr("kvtide.plugin.sglang.hicache.counts.StorageCounts.to_sglang", fail)
        assert get(store, pool) == NONE
        assert put(store, pool) == NONE
        assert store.batch_exists(names(COUNT)) == 0
        assert store.batch_exists_v2(names(COUNT)).kv_hit_pages == 0
        assert store.get_stats() is None


def value_of(metric: str, labels: dict[str, str]) -> float:
    """Returns a metric's value in this process."""
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value(metric, labels) or 0


def test_sglang_gets_numbers_of_pages_and_their_speed(store: Storage, pool: Any) -> None:
    """Each answer has the calls since the one before. kvtide's metrics count what became of all."""
    before = {
        (metric, what): value_of(
            f"kvtide:hicache_{metric}_total", {"shard": "tp0of1-pp0of1-cp0of1", "what": what}
        )
        for metric in ("pages", "bytes")
        for what in ("hit", "read", "written")
    }
    assert put(store, pool) == WHOLE
    assert get(store, pool) == WHOLE
    stats = store.get_stats()
    assert ([COUNT], [COUNT]) == (stats.prefetch_pgs, stats.backup_pgs)
    assert all(speed > 0 for speed in stats.prefetch_bandwidth + stats.backup_bandwidth)
    assert store.get_stats().prefetch_pgs == []
    size_bytes = COUNT * store._pools["kv"].size_bytes
    for metric, what, expected in (
        ("pages", "hit", COUNT),
        ("pages", "written", COUNT),
        ("bytes", "read", size_bytes),
        ("bytes", "written", size_bytes),
    ):
        labels = {"shard": "tp0of1-pp0of1-cp0of1", "what": what}
        assert value_of(f"kvtide:hicache_{metric}_total", labels) == before[metric, what] + expected


def test_cleared_pages_are_gone(store: Storage, pool: Any, tmp_path: Path) -> None:
    """SGLang's clear is an operator's wish to forget what was stored."""
    assert put(store, pool) == WHOLE
    store.clear()
    assert [] == files(tmp_path)
    assert get(store, pool) == NONE
    assert put(store, pool) == WHOLE
