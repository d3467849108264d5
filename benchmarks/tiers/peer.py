"""One tier of one engine, in a process of its own, for peers.py: the tiers and their load.

    PYTHON benchmarks/tiers/peer.py TIER FOLDER PAGES_A_REQUEST PAGE_BYTES REQUESTS

It imports kvtide for kvtide's tier alone. An engine's tier is the engine's own code, from its
wheel, with the settings that it has by itself unless the name of the tier says otherwise. The
program answers each line of its standard input (`put 3`, `get 3`, `sync 3`, `drop 3`, `check 3`,
`remove 3`) with a line of JSON: wall and processor seconds. The number tells rounds apart: each
writes the same bytes under new keys.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import mmap
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import numpy as np
import torch

SYNC_THREADS = 16


def memory_of(size_bytes: int) -> np.ndarray[Any, Any]:
    """Memory that begins at a page, as direct I/O needs; every page of it was touched."""
    array = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    array[:] = 0
    return array


class Peer(ABC):
    """A tier and its load, uint8 [request, page, byte]: `source` is written, `target` read into.

    A call returns when all requests have been moved, as far as the tier tells that.
    """

    def __init__(self, folder: Path, pages: int, page_bytes: int, requests: int) -> None:
        self.folder, self.pages, self.page_bytes, self.requests = (
            folder,
            pages,
            page_bytes,
            requests,
        )
        shape = (requests, pages, page_bytes)
        self.source, self.target = self.make_memory(shape)
        self.source[:] = np.random.default_rng(7).integers(0, 256, shape, np.uint8)
        self.open()

    def make_memory(self, shape: tuple[int, int, int]) -> tuple[Any, Any]:
        """The memory of both ends, as the tier wants it."""
        size_bytes = shape[0] * shape[1] * shape[2]
        return memory_of(size_bytes).reshape(shape), memory_of(size_bytes).reshape(shape)

    def names(self, number: int) -> list[list[str]]:
        """The names of each request's pages in a round: 32 hexadecimal digits."""
        return [
            [
                hashlib.blake2b(f"{number} {request} {page}".encode(), digest_size=16).hexdigest()
                for page in range(self.pages)
            ]
            for request in range(self.requests)
        ]

    def files(self) -> Iterator[Path]:
        """All files with pages."""
        return (path for path in self.folder.rglob("*") if path.is_file())

    @abstractmethod
    def open(self) -> None:
        """Makes the tier on `folder`."""

    @abstractmethod
    def put(self, number: int) -> None:
        """Writes all requests."""

    @abstractmethod
    def get(self, number: int) -> None:
        """Reads all requests."""

    def remove(self, number: int) -> None:
        """Removes them."""
        del number
        for path in self.files():
            path.unlink()

    # ---- what peers.py asks for beside that ------------------------------------------------

    def sync(self, number: int) -> None:
        """Makes what was written outlive a power cut, where the tier didn't."""
        del number
        files = list(self.files())
        folders = {path.parent for path in files} | {self.folder}
        with ThreadPoolExecutor(SYNC_THREADS) as threads:
            for _ in threads.map(sync_path, [*files, *folders]):
                pass

    def drop(self, number: int) -> None:
        """Files leave the system's cache, as they do when memory is needed for other things."""
        del number
        for path in self.files():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)

    def check(self, number: int) -> None:
        """What was read is what was written; then the target is filled with other bytes."""
        del number
        assert np.array_equal(self.source, self.target), "other bytes came back"
        self.target[:] = 0xA5


def sync_path(path: Path) -> None:
    """Syncs a file or a folder."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


# ---- kvtide ------------------------------------------------------------------------------------


class Kvtide(Peer):
    """kvtide's DiskTier. A request is a snapshot, in one file, and its pages are the chunks.

    Two are written and read side by side, as `kvtide run` does.
    """

    at_once = 2

    def open(self) -> None:
        from kvtide.tier import DiskTier

        self.tier = DiskTier(self.folder / "tier", limit_bytes=4 * self.source.nbytes)
        self.threads = ThreadPoolExecutor(self.at_once)

    def snapshots(self, number: int) -> list[tuple[str, Any, Any]]:
        """Key, source and target of each snapshot, [chunk, byte]."""
        return [
            (f"bench/{names[0]}", self.source[request], self.target[request])
            for request, names in enumerate(self.names(number))
        ]

    def files(self) -> Iterator[Path]:
        return (self.folder / "tier").rglob("*.safetensors")

    def put(self, number: int) -> None:
        list(self.threads.map(self._put, self.snapshots(number)))

    def _put(self, snapshot: tuple[str, Any, Any]) -> None:
        from kvtide.seal import Seal

        key, source, _ = snapshot
        chunks = [memoryview(page) for page in source]
        seal = Seal('{"groups":[]}', key, 1, (), (), self.page_bytes, spans_of(chunks))
        self.tier.put(key, seal, chunks)

    def get(self, number: int) -> None:
        list(self.threads.map(self._get, self.snapshots(number)))

    def _get(self, snapshot: tuple[str, Any, Any]) -> None:
        key, _, target = snapshot
        self.tier.get(key, lambda _: [memoryview(page) for page in target])

    def remove(self, number: int) -> None:
        for key, _, _ in self.snapshots(number):
            self.tier.remove(key)


def spans_of(chunks: list[memoryview]) -> tuple[Any, ...]:
    """Sealing is part of kvtide's write here; in a server the copy to host memory has done it."""
    import xxhash

    from kvtide.form import SPAN_BYTES
    from kvtide.seal import Span

    spans = []
    for number, chunk in enumerate(chunks):
        for first in range(0, chunk.nbytes, SPAN_BYTES):
            stop = min(chunk.nbytes, first + SPAN_BYTES)
            spans.append(Span(number, first, stop, xxhash.xxh3_64_intdigest(chunk[first:stop])))
    return tuple(spans)


@final
class KvtidePages(Kvtide):
    """The same with a file for each page, as under SGLang's HiCache and vLLM, by 16 threads."""

    at_once = 16

    def snapshots(self, number: int) -> list[tuple[str, Any, Any]]:
        return [
            (
                f"bench/{name}",
                self.source[request, page : page + 1],
                self.target[request, page : page + 1],
            )
            for request, names in enumerate(self.names(number))
            for page, name in enumerate(names)
        ]


# ---- SGLang ------------------------------------------------------------------------------------


@final
class Sglang(Peer):
    """SGLang's HiCacheFile. Its controller's thread hands it the pages of a request in one call."""

    def open(self) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="bench",
        )
        self.tier = HiCacheFile(config, str(self.folder / "tier"))

    def put(self, number: int) -> None:
        for request, names in enumerate(self.names(number)):
            pages = [torch.from_numpy(page) for page in self.source[request]]
            assert self.tier.batch_set(names, pages)

    def get(self, number: int) -> None:
        for request, names in enumerate(self.names(number)):
            pages = [torch.from_numpy(page) for page in self.target[request]]
            found = self.tier.batch_get(names, pages)
            assert not any(page is None for page in found)


# ---- vLLM --------------------------------------------------------------------------------------


@final
class Vllm(Peer):
    """vLLM's FileSystemTierManager, with its 32 threads, its C extension and direct I/O.

    A request's pages are one job. Pages lie in one region, which is vLLM's tier in host memory.
    """

    def make_memory(self, shape: tuple[int, int, int]) -> tuple[Any, Any]:
        requests, pages, page_bytes = shape
        region = memory_of(2 * requests * pages * page_bytes)
        self.region = region.reshape(2 * requests * pages, page_bytes)
        source, target = self.region.reshape(2, requests, pages, page_bytes)
        return source, target

    def open(self) -> None:
        from vllm.v1.kv_offload import config as of
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        parallel = of.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)
        config = of.OffloadingConfig(
            groups=(of.OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=self.page_bytes,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="bench",
            model=of.OffloadingModelConfig("bench", "bfloat16"),
            cache=of.OffloadingCacheConfig(16, 1),
            parallel=parallel,
        )
        spec: Any = SimpleNamespace(
            config=config, blocks_per_chunk=1, kv_events_config=SimpleNamespace()
        )
        self.tier = FileSystemTierManager(
            spec, memoryview(self.region), "fs", str(self.folder / "tier")
        )

    def files(self) -> Iterator[Path]:
        return (self.folder / "tier").rglob("*.bin")

    def put(self, number: int) -> None:
        self._move(number, self.tier.submit_store, 0)

    def get(self, number: int) -> None:
        self._move(number, self.tier.submit_load, self.requests * self.pages)

    def _move(self, number: int, submit: Callable[[Any], None], first: int) -> None:
        from vllm.v1.kv_offload.base import make_offload_key
        from vllm.v1.kv_offload.tiering.base import TransferJob

        for request, names in enumerate(self.names(number)):
            keys = [make_offload_key(bytes.fromhex(name), 0) for name in names]
            blocks = np.arange(self.pages) + first + request * self.pages
            context: Any = SimpleNamespace(req_id=str(request))
            submit(TransferJob(request, keys, blocks, first > 0, context))
        self.tier.drain_jobs()
        done = list(self.tier.get_finished_jobs())
        assert len(done) == self.requests
        assert all(job.success for job in done)


# ---- LMCache -----------------------------------------------------------------------------------


class Lmcache(Peer):
    """LMCache's LocalDiskBackend, which writes and reads with four threads, through the cache."""

    direct = False

    def make_memory(self, shape: tuple[int, int, int]) -> tuple[Any, Any]:
        """LMCache reads into memory of its own, so the target is made at each read."""
        return memory_of(shape[0] * shape[1] * shape[2]).reshape(shape), None

    def open(self) -> None:
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        gib = self.source.nbytes / 2**30
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=256,
            local_cpu=False,
            max_local_cpu_size=2.5 * gib,
            local_disk=f"{self.folder}/tier/",
            max_local_disk_size=1000,  # GiB: it goes on to count pages that were removed
            extra_config={"use_odirect": self.direct},
        )
        shape = (1, 2, 256, 1, self.page_bytes // 1024)
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, shape)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        memory = LocalCPUBackend(config, metadata, "cpu")
        self.tier = LocalDiskBackend(config, self.loop, memory, "cpu")
        self.form = MemoryFormat.KV_2LTD
        self.held: list[Any] = []
        self.pages_in = []
        for request in range(self.requests):
            for page in range(self.pages):
                place = memory.allocate(
                    torch.Size([2, 1, 256, self.page_bytes // 1024]), torch.bfloat16, self.form
                )
                place.tensor.view(torch.uint8).view(-1).copy_(
                    torch.from_numpy(self.source[request, page])
                )
                self.pages_in.append(place)

    def keys(self, number: int) -> list[list[Any]]:
        """LMCache's keys of each request's pages."""
        from lmcache.utils import CacheEngineKey

        return [
            [CacheEngineKey("bench", 1, 0, int(name[:15], 16), torch.bfloat16) for name in names]
            for names in self.names(number)
        ]

    def put(self, number: int) -> None:
        written = threading.Semaphore(0)
        for request, keys in enumerate(self.keys(number)):
            pages = self.pages_in[request * self.pages : (request + 1) * self.pages]
            self.tier.batched_submit_put_task(
                keys, pages, on_complete_callback=lambda _: written.release()
            )
        for _ in range(self.requests * self.pages):
            assert written.acquire(timeout=60), "a page wasn't written"

    def get(self, number: int) -> None:
        self.held = [
            page for keys in self.keys(number) for page in self.tier.batched_get_blocking(keys)
        ]

    def check(self, number: int) -> None:
        del number
        for place, page in zip(self.held, self.source.reshape(-1, self.page_bytes), strict=True):
            assert bytes(place.byte_array) == page.tobytes(), "other bytes came back"
            place.tensor.fill_(1)
            place.ref_count_down()
        self.held = []

    def remove(self, number: int) -> None:
        for keys in self.keys(number):
            for key in keys:
                self.tier.remove(key)


@final
class LmcacheDirect(Lmcache):
    """The same with its setting `use_odirect`."""

    direct = True


TIERS: dict[str, type[Peer]] = {
    "kvtide": Kvtide,
    "kvtide-pages": KvtidePages,
    "sglang": Sglang,
    "vllm": Vllm,
    "lmcache": Lmcache,
    "lmcache-direct": LmcacheDirect,
}


def main() -> None:
    """Opens the tier, then does what each line asks for."""
    name, folder, *numbers = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print isn't an answer
    peer = TIERS[name](Path(folder), *map(int, numbers))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        gc.collect()
        verb, number = line.split()
        cpu, start = time.process_time(), time.perf_counter()
        getattr(peer, verb)(int(number))
        times = {"s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
        print(json.dumps(times), file=answers, flush=True)
    os._exit(0)  # an engine's threads and its books of memory end with the process


if __name__ == "__main__":
    main()
