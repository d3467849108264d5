"""A scheduler with a prefix cache whose model writes what stands for KV; and all is checked."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvtide.arena import HostArena
from kvtide.device import open_device
from kvtide.layout import GQA
from kvtide.pool import PageAllocator, Pool
from kvtide.serve.admission import SchedulerOptions
from kvtide.serve.prefix import PrefixCache, block_tokens_for
from kvtide.serve.request import PrefixBlock, Request, SamplingParams
from kvtide.serve.scheduler import Scheduler
from kvtide.tide import Tide
from kvtide.tier import DiskTier, Spill
from kvtide.tier.namespace import is_shared

BLOCK_PREFIX = "shared/"
PAGE_SIZE = 4
CHUNK_TOKENS = 8


class CountedTokens(list[int]):
    """Token ids that count how many of them were copied by slices."""

    copied_count = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.copied_count += len(found) if isinstance(place, slice) else 0
        return found


_benches: list[Bench] = []


def close_benches() -> None:
    """Closes those of a test: without requests and blocks all pages and host memory are free."""
    while _benches:
        _benches[-1].close()


@dataclass(eq=False)
class Bench:
    """A scheduler with a prefix cache over a small pool, and a model that writes `kv_of`."""

    page_count: int
    on_pressure: str = "offload"
    exact: bool = True
    host_blocks: int = 0
    chunk_tokens: int = CHUNK_TOKENS
    max_running: int = 64
    block_tokens: int | None = None
    disk_dir: Path | None = None
    """Where a disk tier has its files, to which requests' own snapshots go."""
    leaves_blocks: bool = False
    """Whether blocks go to the disk, too, where they stay for others."""
    computed: dict[str, list[int]] = field(default_factory=dict)
    """For each request the numbers of the tokens that were computed, in order."""

    def __post_init__(self) -> None:
        _benches.append(self)
        self._rows: dict[Request, list[int]] = {}
        geometry = GQA.bind(
            dtype="uint8", layer=1, token=PAGE_SIZE, head=1, head_dim=8, v_head_dim=8
        )
        device = open_device("cpu")
        block_bytes = 2 * geometry.page_bytes
        self.arena = HostArena(
            device, limit_bytes=self.host_blocks * block_bytes, block_bytes=block_bytes
        )
        self.pages = PageAllocator(self.page_count)
        pool = Pool.create(geometry, device, page_count=self.page_count)
        directory = self.disk_dir
        self.disk = disk = None if directory is None else DiskTier(directory, limit_bytes=1 << 20)
        self.spill = None if disk is None else Spill(self.arena, [disk], name_of=_shared_name)
        self.tide = Tide(pool, self.arena, self.pages, self.spill)
        self.prefixes = PrefixCache(
            self.tide,
            self.pages,
            self.block_tokens
            or block_tokens_for(self.chunk_tokens, PAGE_SIZE, whole_chunks=self.exact),
            key_of=lambda request, chain: f"{BLOCK_PREFIX}{request.salt.hex()} {chain}",
            shares_answers=not self.exact,
            below_bytes=self.arena.limit_bytes if disk is None or self.leaves_blocks else 0,
            spill=self.spill,
        )
        options = SchedulerOptions(
            self.chunk_tokens, self.max_running, self.on_pressure, self.exact
        )
        self.scheduler = Scheduler(
            self.tide, self.pages, options, lambda request: request.id, self.prefixes
        )
        self._check_who_comes_back()

    def _check_who_comes_back(self) -> None:
        """Has an error raised where requests are retracted for one that has no room even so."""
        may_resume = self.scheduler._may_resume

        def may_resume_or_nobody_leaves(request: Request) -> bool:
            before = self.scheduler.retracted
            comes = may_resume(request)
            assert comes or before == self.scheduler.retracted, "they were retracted for nothing"
            return comes

        self.scheduler._may_resume = may_resume_or_nobody_leaves  # type: ignore[method-assign]

    def plane(self, name: str) -> torch.Tensor:
        """The rows of a plane, [slot, 8]."""
        return self.tide.pool.plane(name, 0).view(-1, 8)

    def rows_of(self, request: Request) -> torch.Tensor:
        """What stands for its tokens' KV, [token, 8]: all tokens up to one decide its bytes."""
        rows = self._rows.setdefault(request, [])
        for number in range(len(rows) // 8, request.token_count):
            before = bytes(rows[-8:] + request.tokens(number, 1))
            rows.extend(hashlib.blake2b(before, digest_size=8).digest())
        return torch.tensor(rows, dtype=torch.uint8).view(-1, 8)

    def step(self) -> list[tuple[str, int]]:
        """Runs a step, and checks all that requests read before and after; gives its counts."""
        steps = self.scheduler.plan()
        assert steps or not self._has_requests, "somebody can always go on"
        self.check()
        for request, count in steps:
            part = slice(request.stored, request.stored + count)
            slots = torch.from_numpy(self.tide.pool.slots_of(request.pages)[part])
            for name in ("k", "v"):
                self.plane(name)[slots] = self.rows_of(request)[part]
            self.computed.setdefault(request.id, []).extend(range(part.start, part.stop))
        self.scheduler.note_computed(steps)
        for request, _ in steps:
            if request.stored == request.token_count:
                request.output_ids.append(len(request.output_ids))
        self.check()
        return [(request.id, count) for request, count in steps]

    @property
    def _has_requests(self) -> bool:
        books = self.scheduler
        return bool(books.running or books.retracted_count or books.waiting_count)

    def check(self) -> None:
        """Each request's slots hold the KV of its own tokens, and each page has its holders."""
        held: list[int] = []
        readers: Counter[PrefixBlock] = Counter()
        for request in self.scheduler.running:
            slots = torch.from_numpy(self.tide.pool.slots_of(request.pages)[: request.stored])
            for name in ("k", "v"):
                expected = self.rows_of(request)[: request.stored]
                assert torch.equal(expected, self.plane(name)[slots]), request
            held += self.prefixes.pages_of(request)
            readers.update(request.blocks)
        held += [page for block in readers for page in block.pages]
        assert len(held) == len(set(held))
        assert self.pages.held_count == len(held) + self.prefixes.idle_page_count
        assert all(count == block.readers for block, count in readers.items())

    def close(self) -> None:
        """Ends all requests and drops all blocks: then everything is free.

        Blocks that went to the disk stay there.
        """
        _benches.remove(self)
        for request in (*self.scheduler.running, *self._rows):
            self.scheduler.remove(request)
        assert self.pages.held_count == self.prefixes.idle_page_count
        if self.prefixes._finder._seeker is not None:
            self.prefixes._finder._take_found()
        self.prefixes.blocks.clear()
        if self.spill is not None:
            assert 0 == len(self.spill._entries)
            self.spill.close()
        if self.disk is not None:
            self.disk.close()
        free = (self.pages.free_count, len(self.prefixes.blocks.known), self.arena.used_bytes)
        assert (self.page_count, 0, 0) == free

    def leave(self) -> None:
        """Has the disk keep all blocks that nobody reads, and ends."""
        assert self.spill is not None, "a bench with a disk"
        self.prefixes.blocks.leave()
        self.spill.leave()
        self.close()

    def answer(self, *requests: Request) -> None:
        """Answers requests, and lets each end after `max_new_tokens`."""
        for request in requests:
            self.scheduler.add(request)
        while self.step():
            self.end_those_that_are_done()

    def end_those_that_are_done(self) -> None:
        """Removes requests whose answers are complete."""
        for request in self.scheduler.running:
            if len(request.output_ids) >= request.params.max_new_tokens:
                self.scheduler.remove(request)


def _shared_name(key: str) -> str | None:
    """The name in a tier of the snapshot with that key, if it is a block's."""
    return key if is_shared(key) else None


def make(name: str, prompt: list[int], new_tokens: int = 1, *, salt: bytes = b"") -> Request:
    """Makes a request."""
    params = SamplingParams(max_new_tokens=new_tokens)
    return Request(name, prompt, params, salt=salt)


def numbers(count: int, first: int = 0) -> list[int]:
    """Makes a prompt of ascending tokens."""
    return list(range(first, first + count))


def wander(bench: Bench, dice: random.Random, steps: int) -> None:
    """Takes steps, in which requests come, are retracted and aborted at random."""
    beginnings = [numbers(40, 50 * number) for number in range(4)]
    alive: list[Request] = []
    for number in range(steps):
        if len(alive) < 8 and dice.random() < 0.5:
            prompt = dice.choice(beginnings)[: dice.randint(1, 40)]
            prompt = [*prompt, *(dice.randrange(250) for _ in range(dice.randint(0, 12)))]
            salt = dice.choice([b"", b"x"])
            alive.append(make(str(number), prompt, dice.randint(1, 20), salt=salt))
            bench.scheduler.add(alive[-1])
        running = bench.scheduler.running
        if running and bench.on_pressure != "wait" and dice.random() < 0.1:
            bench.scheduler.retract(dice.choice(running))
        if alive and dice.random() < 0.05:
            bench.scheduler.remove(alive.pop(dice.randrange(len(alive))))
        bench.step()
        ended = [r for r in bench.scheduler.running if len(r.output_ids) >= r.params.max_new_tokens]
        for request in ended:
            bench.scheduler.remove(request)
            alive.remove(request)
    for request in alive:
        bench.scheduler.remove(request)
