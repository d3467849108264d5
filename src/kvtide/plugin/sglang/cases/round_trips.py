"""Round trips of SGLang's pools, by SGLang's own methods or by kvtide: save slots, load others.

What is compared is read from the pool's tensors by probes, which know where a token's bytes lie
and use nothing that is under test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch

from kvtide.arena import HostArena
from kvtide.conformance.tensors import randomise, same_bytes
from kvtide.device import open_device
from kvtide.plugin.sglang.pools.draft_model import describe_with_draft
from kvtide.plugin.sglang.pools.subject import Subject
from kvtide.tide import Tide

BLOCK_BYTES = 1 << 14
LIMIT_BYTES = 1 << 24
ROWS_READ = 8
"""How many rows of each kind are looked at for damage to other requests."""

Read = Callable[[torch.Tensor, Mapping[str, int]], torch.Tensor]
"""Copies what some slots, int64 [token], and a request's rows (by kind) own of a buffer."""


@final
@dataclass(frozen=True)
class ByteProbe:
    """Reads one kind of bytes. `buffers` are the whole tensors that these bytes lie in."""

    name: str
    read: Read
    buffers: Sequence[torch.Tensor]


def set_what_servers_set() -> None:
    """Sets what a server's arguments set in its process; pools of latents need it."""
    from sglang.srt.runtime_context import get_parallel

    get_parallel().override_permanently(attn_dcp_size=1, attn_dcp_rank=0)


def token_rows(name: str, buffer: torch.Tensor) -> ByteProbe:
    """A probe of a tensor [slot, …]."""
    return ByteProbe(name, lambda slots, _: buffer[slots].clone(), [buffer])


def request_rows(name: str, buffer: torch.Tensor, kind: str) -> ByteProbe:
    """A probe of a tensor [row, …], of which a request has one row of its `kind`."""
    return ByteProbe(name, lambda _, rows: buffer[rows[kind]].clone(), [buffer])


@final
@dataclass
class Built:
    """A pool with its allocator, and how to make a round trip with it.

    `sources` and `targets` are a request's rows before and after, by kind: `request` is its row in
    SGLang's req_to_token, `mamba` the row of its recurrent state.
    """

    pool: Any
    allocator: Any
    probes: Sequence[ByteProbe]
    sources: Mapping[str, int] = field(default_factory=lambda: {"request": 1})
    targets: Mapping[str, int] = field(default_factory=lambda: {"request": 2})
    request_pool: Any = None
    prepare: Callable[[torch.Tensor], None] = lambda slots: None
    """Called with the source slots once they are allocated; frees what has left a window."""
    allocate: Callable[[int], torch.Tensor] | None = None
    """Gives slots for a number of tokens; None where the allocator's `alloc` does that."""
    window_tokens: int | None = None
    """How many tokens sliding-window attention sees; None without a window."""
    draft_pools: Sequence[Any] = ()
    """The pools of draft models, which keep their KV in the same slots."""
    undo: Callable[[], None] = lambda: None
    """Called at the end: undoes what was set for the whole process to build the pool."""


OnlyOn = Literal["", "NPU", "ROCm", "no CUDA", "CPU"]
"""Kinds of machines. `NPU` and `ROCm` alone have such a pool. `no CUDA` are those where torch has
no CUDA, such as XPU. On a `CPU` the copy is a view, or torch lacks an operation."""


@final
@dataclass(frozen=True)
class Case:
    """A pool to be built, and what SGLang makes of it alone: `exact`, `wrong` or `crash`."""

    name: str
    build: Callable[[], Built]
    alone: str
    token_count: int = 37
    page_size: int = 16
    reason: str = ""
    """Why SGLang alone is wrong or crashes, for the table in the documentation."""
    only_on: OnlyOn = ""
    """The only machines on which it does that; empty if CUDA machines are among them."""


@final
@dataclass(frozen=True)
class Refusal:
    """A pool that kvtide leaves to SGLang, and words of the reason that its refusal gives."""

    name: str
    build: Callable[[], Built]
    reason: str


@final
@dataclass(frozen=True)
class TripResult:
    """The result of a round trip: `exact`, `wrong` or `crash`, and which bytes or which error."""

    verdict: str
    detail: str = ""


class Way:
    """SGLang's way to save and load. `open` is called before anything is saved."""

    name = "sglang"

    def open(self, built: Built) -> None:
        """Prepares for the pool; SGLang needs nothing."""

    def save(self, built: Built, slots: torch.Tensor, rows: Mapping[str, int]) -> Any:
        """Makes a copy on the host, as Req.offload_kv_cache does."""
        copy = built.allocator.get_cpu_copy(slots, **_as_req_gives(rows))
        beside = self._state_beside(built)
        return copy, beside and beside.get_cpu_copy(torch.tensor([rows["mamba"]]))

    def load(self, built: Built, copy: Any, slots: torch.Tensor, rows: Mapping[str, int]) -> None:
        """Writes a copy to some slots, as Req.load_kv_cache does."""
        beside = self._state_beside(built)
        if beside:
            beside.load_cpu_copy(copy[1], torch.tensor([rows["mamba"]]))
        built.allocator.load_cpu_copy(copy[0], slots, **_as_req_gives(rows))

    def _state_beside(self, built: Built) -> Any:
        """The request pool's pool of state; None if the KV pool's copy has the state."""
        if built.request_pool is None or built.pool.cpu_copy_carries_mamba:
            return None
        return getattr(built.request_pool, "mamba_pool", None)

    def close(self) -> None:
        """Frees what `open` made."""


class KvtideWay(Way):
    """kvtide's way to save and load: it describes the pool, and moves its bytes by a Tide."""

    name = "kvtide"

    def open(self, built: Built) -> None:
        """Describes and adopts the pool."""
        subject = Subject(
            built.pool, built.allocator, built.request_pool, window_tokens=built.window_tokens
        )
        self.description = describe_with_draft(subject, built.draft_pools)
        self.device = open_device(str(built.pool.device).split(":")[0])
        arena = HostArena(self.device, limit_bytes=LIMIT_BYTES, block_bytes=BLOCK_BYTES)
        self.tide = Tide(self.description.adopt(self.device), arena)

    def save(self, built: Built, slots: torch.Tensor, rows: Mapping[str, int]) -> Any:
        """See Way."""
        return self.tide.offload(slots, request=self._request(rows))

    def load(self, built: Built, copy: Any, slots: torch.Tensor, rows: Mapping[str, int]) -> None:
        """See Way."""
        self.tide.restore(copy, slots, request=self._request(rows))
        self.tide.discard(copy)
        assert 0 == self.tide.arena.used_bytes

    def _request(self, rows: Mapping[str, int]) -> Mapping[str, int]:
        return {kind: rows[kind] for kind in self.tide.pool.request_kinds}

    def close(self) -> None:
        """See Way."""
        self.tide.close()
        self.device.close()


def _as_req_gives(rows: Mapping[str, int]) -> dict[str, Any]:
    """The arguments that Req gives to its allocator for its rows: a mamba index is a 0-d tensor."""
    mamba = torch.tensor(rows["mamba"]) if "mamba" in rows else None
    return {"mamba_indices": mamba, "req_pool_index": rows.get("request")}


def round_trip(case: Case, way: Way) -> TripResult:
    """Saves, overwrites all buffers, loads to other slots, and compares all bytes."""
    torch.manual_seed(1)
    built = case.build()
    try:
        way.open(built)
        try:
            wrong = _moved_wrong(case, built, way)
        finally:
            way.close()
    except Exception as error:
        message = str(error).splitlines()[0] if str(error) else ""
        return TripResult("crash", f"{type(error).__name__}: {message}")
    finally:
        built.undo()
    return TripResult("wrong", ", ".join(wrong)) if wrong else TripResult("exact")


def _moved_wrong(case: Case, built: Built, way: Way) -> list[str]:
    """The names of the probes that read other bytes than they should afterwards."""
    _randomise_all(built)
    whole = -(-case.token_count // case.page_size) * case.page_size
    allocate = built.allocate or built.allocator.alloc
    held = allocate(whole)
    source = held[: case.token_count].clone()
    built.prepare(source)
    expected = [probe.read(source, built.sources) for probe in built.probes]
    copy = way.save(built, source, built.sources)
    _randomise_all(built)
    held = allocate(whole)
    target = held[: case.token_count].clone()
    assert not set(source.tolist()) & set(target.tolist()), "a restore goes to other slots"
    bystanders = _bystanders(built, held, case.page_size)
    untouched = [_read_others(probe, bystanders, built) for probe in built.probes]
    way.load(built, copy, target, built.targets)
    wrong = []
    for probe, bytes_before, others in zip(built.probes, expected, untouched, strict=True):
        if not same_bytes(bytes_before, probe.read(target, built.targets)):
            wrong.append(probe.name)
        if not all(map(same_bytes, others, _read_others(probe, bystanders, built))):
            wrong.append(f"{probe.name} of others")
    return wrong


def _randomise_all(built: Built) -> None:
    for probe in built.probes:
        for buffer in probe.buffers:
            randomise(buffer)


def _bystanders(built: Built, held: torch.Tensor, page_size: int) -> torch.Tensor:
    """All slots but those of the target's pages and of the padding."""
    slots = torch.arange(page_size, built.pool.size)
    taken = torch.isin(slots // page_size, held.cpu() // page_size)
    return slots[~taken].to(held.device)


def _read_others(probe: ByteProbe, bystanders: torch.Tensor, built: Built) -> list[torch.Tensor]:
    """What the probe reads for other requests: their slots, with each row that they may have.

    The source's rows come first; a row that the buffer lacks is an empty tensor.
    """
    rows = [
        {**built.sources, kind: row}
        for kind, source in built.sources.items()
        for row in range(ROWS_READ)
        if row not in (source, built.targets[kind]) and _can_be_held(built, kind, row)
    ]
    reads = [_read_if_any(probe, bystanders, others) for others in rows]
    return [probe.read(bystanders, built.sources), *reads]


def _can_be_held(built: Built, kind: str, row: int) -> bool:
    """False for a virtual slot of state that has no physical one: index -1 would be the last."""
    allocator = getattr(built.request_pool, "mamba_allocator", None)
    table = getattr(allocator, "virtual_to_physical", None)
    return kind != "mamba" or table is None or (row < len(table) and int(table[row]) >= 0)


def _read_if_any(probe: ByteProbe, slots: torch.Tensor, rows: Mapping[str, int]) -> torch.Tensor:
    try:
        return probe.read(slots, rows)
    except IndexError:
        return torch.empty(0)
