"""MiniCPM's compressed keys: kvtide's description compared with SGLang's own code."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import numpy as np
import pytest
import sglang
import torch
from requests_of import keeper_over
from sglang.srt.disaggregation.decode import (
    DecodeReqToTokenPool,
    HybridMambaDecodeReqToTokenPool,
)
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache import memory_pool

from kvtide.errors import SlotError
from kvtide.layout import Rows, apply_rules
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.cases.compressed_keys import attach, grow, request_pool
from kvtide.plugin.sglang.cases.keys_values import ON_CPU, mha
from kvtide.plugin.sglang.cases.recurrent_state import STATE_LAYERS, state_params
from kvtide.plugin.sglang.ordinary import allocation
from kvtide.plugin.sglang.pools.describe import describe
from kvtide.plugin.sglang.pools.subject import Subject
from kvtide.plugin.sglang.rules import EntriesOfRequest
from kvtide.plugin.sglang.settings import Settings

SRT = Path(sglang.__path__[0]) / "srt"
SIZE, STRIDE = 4, 2
TOKENS = 40


def entries_of(table: torch.Tensor, request: int, token_count: int, times: int = 1) -> Rows:
    """Returns a request's entries of 4 tokens every 2 tokens, or of `times` as many."""
    rule = EntriesOfRequest("k", table.shape[1], SIZE * times, STRIDE * times)
    flat = table.view(-1).numpy()
    maps = {"k": lambda ids: flat[ids], "request": lambda _: np.array([request])}
    return apply_rules([rule], np.arange(500, 500 + token_count), maps, row_count=1000)


@pytest.mark.parametrize(("level", "times"), [("k1", 1), ("k2", 4)])
def test_a_request_has_the_entries_of_sglang(level: str, times: int) -> None:
    """This holds for each number of tokens, in the order of the table."""
    requests = request_pool()
    _, allocator = mha(page_size=1)
    cache = attach(requests, allocator)
    table = getattr(requests, f"req_to_sparse_{level}_token")
    for count in range(1, TOKENS):
        grow(requests, [2], count)
        rows = entries_of(table, 2, count, times)
        held = cache.allocated_lens[times // 4][2]
        assert cache._sparse_len(count, times) == held == rows.ids.size
        assert table[2, :held].tolist() == rows.ids.tolist()
        assert [*range(0, held * STRIDE * times, STRIDE * times)] == rows.tokens.tolist()


def test_an_entry_without_a_slot_is_named() -> None:
    """Slot 0 is padding, which belongs to nobody."""
    table = torch.tensor([[0, 0, 0], [7, 0, 5]])
    with pytest.raises(SlotError, match="request 1 has no slot for entry 1 of 'k'"):
        entries_of(table, 1, 6)
    assert [7] == entries_of(table, 1, 5).ids.tolist()


def test_more_entries_than_the_table_has_are_refused() -> None:
    """They would be the next request's entries."""
    with pytest.raises(SlotError, match="10 tokens need 4 entries of 'k', whose table has 3"):
        entries_of(torch.ones(2, 3, dtype=torch.int32), 0, 10)


def test_a_decode_server_has_no_place_for_them() -> None:
    """One of its request pools can't have such a cache, and kvtide refuses it beside the other."""
    pool, allocator = mha(page_size=1)
    plain = DecodeReqToTokenPool(4, 256, "cpu", False, pre_alloc_size=0)
    with pytest.raises(AttributeError, match="attach_aux_cache"):
        attach(plain, allocator)
    requests = HybridMambaDecodeReqToTokenPool(
        size=4,
        max_context_len=256,
        cache_params=state_params(),
        mamba_layer_ids=STATE_LAYERS,
        speculative_num_draft_tokens=0,
        enable_mamba_extra_buffer=False,
        pre_alloc_size=0,
        enable_overlap_schedule=False,
        **ON_CPU,
    )
    attach(requests, allocator)
    name = "HybridMambaDecodeReqToTokenPool"
    with pytest.raises(Refused, match=f"{name} .* has no slots .* nowhere to write"):
        describe(Subject(pool, allocator, requests))


def test_no_decode_server_gives_slots_for_them() -> None:
    """SGLang does so in prefill and decode steps, but not for a request that comes back."""
    asking = [
        path.name for path in SRT.rglob("*.py") if ".alloc_aux_to_lengths(" in path.read_text()
    ]
    assert ["allocation.py"] == asking


def test_sglang_starts_no_decode_server_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang starts no prefill server with them either, but it starts ordinary servers."""
    from sglang.srt.arg_groups.model_overrides import minicpm

    monkeypatch.setattr(minicpm, "resolving_view", lambda arguments: arguments)
    monkeypatch.setattr(minicpm, "attn_dp_enabled_of", lambda arguments: False)
    model = SimpleNamespace(has_minicpm_sparse_attention=True)
    for mode in ("null", "decode", "prefill"):
        arguments = SimpleNamespace(
            attention_backend="minicpm_flashattn",
            prefill_attention_backend=None,
            decode_attention_backend=None,
            enable_hierarchical_cache=False,
            disaggregation_mode=mode,
        )
        if mode == "null":
            assert minicpm._minicpm_sala_overrides(arguments, model)["disable_radix_cache"]
            continue
        with pytest.raises(ValueError, match="does not support PD disaggregation"):
            minicpm._minicpm_sala_overrides(arguments, model)


def test_another_cache_beside_the_pool_is_refused_by_name() -> None:
    """Such a cache may hold anything."""
    pool, allocator = mha(page_size=1)
    requests = request_pool()
    requests.attach_aux_cache(object())
    with pytest.raises(Refused, match=r"MHATokenToKVPool: kvtide doesn't know builtins.object"):
        describe(Subject(pool, allocator, requests))


def test_keys_with_scales_are_refused() -> None:
    """SGLang's kernel reads and writes keys, but no scales."""
    pool, allocator = mha(page_size=1, kind=memory_pool.MHATokenToKVPoolFP4)
    requests = request_pool()
    attach(requests, allocator)
    with pytest.raises(Refused, match=r"MHATokenToKVPoolFP4: .* not beside k, v, k_scale"):
        describe(Subject(pool, allocator, requests))


def test_a_missing_table_is_named() -> None:
    """A later SGLang may name it otherwise."""
    pool, allocator = mha(page_size=1)
    requests = request_pool()
    attach(requests, allocator)
    del requests.req_to_sparse_k2_token
    with pytest.raises(Refused, match="ReqToTokenPool has no table 'req_to_sparse_k2_token'"):
        describe(Subject(pool, allocator, requests))


# ---- a request's steps, with what reads and writes these keys --------------------------


def compress(keys: torch.Tensor, tokens: torch.Tensor, table: torch.Tensor, times: int) -> Any:
    """Does what SGLang's kernel does in a step whose new token is the last of `tokens`.

    It returns the entries that the step reads. Old entries are in the slots of the table, [entry],
    and new entries are written there.
    """
    size, stride = SIZE * times, STRIDE * times
    old, total = (max(0, (count - size) // stride + 1) for count in (len(tokens) - 1, len(tokens)))
    for entry in range(old, total):
        mean = torch.zeros(keys.shape[1:])
        for token in tokens[entry * stride : entry * stride + size].tolist():
            mean += keys[token]
        keys[int(table[entry])] = mean / size
    return keys[table[:total].long()]


@pytest.mark.parametrize("count", [3, 4, 5, 6, 9])
def test_compression_does_what_sglangs_kernel_does(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Triton's interpreter runs the kernel: results and all written bytes are equal."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tl = importlib.import_module("triton.language")
    # Without that variable set at import, the kernel would be compiled.
    monkeypatch.setattr(tl, "zeros", lambda shape, dtype: tl.full(shape, 0, dtype))
    path = SRT / "layers/attention/minicpm/sparse_kernels.py"
    spec = importlib.util.spec_from_file_location("sparse_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    keys = torch.randn(64, 1, 16, generator=torch.Generator().manual_seed(1))
    tokens = torch.randperm(40, generator=torch.Generator().manual_seed(2))[:count].int()
    table = torch.arange(50, 60, dtype=torch.int32)
    old, total = (max(0, (number - SIZE) // STRIDE + 1) for number in (count - 1, count))
    theirs, found = keys.clone(), torch.zeros(total, 1, 16)
    module.compress_k_complete_kernel_new[(1, 1, 1)](
        theirs, tokens[None], _int32(0, count - old * STRIDE), _int32(old), table[None],
        _int32(0, total), found, 1, 10, count, 10, 1, 16, SIZE, STRIDE, 16, 1,
    )  # fmt: skip
    assert torch.equal(found, compress(keys, tokens, table, 1))
    assert torch.equal(theirs, keys)


@final
class Server:
    """An ordinary server's pools, and its requests' steps as far as keys matter."""

    def __init__(self) -> None:
        self.pool, self.token_to_kv_pool_allocator = mha(page_size=1, dtype=torch.float32)
        self.req_to_token_pool = request_pool()
        self.cache = attach(self.req_to_token_pool, self.token_to_kv_pool_allocator)
        self.tree_cache = self
        self.page_size, self.is_hybrid_swa = 1, False
        settings = Settings(host_memory_bytes=1 << 20)
        allocator = self.token_to_kv_pool_allocator
        self.keeper = keeper_over(allocator, self.req_to_token_pool, [], settings)

    def supports_mamba(self) -> bool:
        """Returns False: the prefix cache has no states."""
        return False

    def supports_prefix_sharing(self) -> bool:
        """Returns False: SGLang turns the prefix cache off for such models."""
        return False

    def admit(self, rid: str) -> Any:
        """Makes a request without tokens."""
        req = SimpleNamespace(rid=rid, seqlen=1, kv=ReqKvInfo(), is_dllm=lambda: False)
        self.req_to_token_pool.alloc([req])
        return req

    def step(self, req: Any) -> list[torch.Tensor]:
        """Adds a token, whose keys follow from its place, and returns the entries that are read."""
        count, requests = req.seqlen, self.req_to_token_pool
        slot, row = self.token_to_kv_pool_allocator.alloc(1), req.kv.req_pool_idx
        requests.write((row, slice(count - 1, count)), slot)
        grow(requests, [row], count)
        tokens, seen = requests.req_to_token[row, :count], []
        tables = (
            (requests.req_to_sparse_k1_token[row], 1),
            (requests.req_to_sparse_k2_token[row], 4),
        )
        for layer, keys in enumerate(self.pool.k_buffer):
            keys[slot] = torch.randn(keys[slot].shape, generator=_seeded(req.rid, count, layer))
            seen += [compress(keys, tokens, table, times) for table, times in tables]
        req.seqlen += 1
        return seen

    def retract(self, req: Any) -> None:
        """Frees the request's slots and row."""
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.seqlen - 1]
        self.token_to_kv_pool_allocator.free(row.long())
        self.req_to_token_pool.free(req)

    def free_counts(self) -> tuple[int, int, int]:
        """Returns the free slots of tokens, free rows, and free slots of compressed keys."""
        slots = self.token_to_kv_pool_allocator.available_size()
        return slots, self.req_to_token_pool.available_size(), len(self.cache.free_slots)


def _seeded(rid: str, count: int, layer: int) -> torch.Generator:
    return torch.Generator().manual_seed(ord(rid) * 10_000 + count * 10 + layer)


def _int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server without requests, which must have no backups in the end."""
    made = Server()
    yield made
    assert 0 == made.keeper.arena.used_bytes
    made.keeper.close()


@pytest.mark.parametrize("token_count", [3, 4, 17, 24, 40])
def test_a_retracted_request_reads_the_same_keys(server: Server, token_count: int) -> None:
    """Each later step reads the same entries, and some steps make new ones."""
    control = Server()
    req, never = server.admit("a"), control.admit("a")
    for _ in range(token_count):
        server.step(req)
        control.step(never)
    backup = server.keeper.save(req)
    server.retract(req)
    other = server.admit("b")
    for _ in range(token_count + 3):
        server.step(other)
    assert allocation.take_slots(server, req)
    server.keeper.restore(req, backup)
    for _ in range(10):
        expected, found = control.step(never), server.step(req)
        assert [keys.tolist() for keys in expected] == [keys.tolist() for keys in found]
    control.keeper.close()


def test_a_request_that_comes_back_uses_as_many_slots_as_before(server: Server) -> None:
    """It gets exactly the slots that a step needs."""
    before = server.free_counts()
    req = server.admit("a")
    for _ in range(TOKENS):
        server.step(req)
    held = server.free_counts()
    backup = server.keeper.save(req)
    server.retract(req)
    assert before == server.free_counts()
    assert allocation.take_slots(server, req)
    server.keeper.restore(req, backup)
    assert held == server.free_counts()
    server.retract(req)
    assert before == server.free_counts()


def test_without_slots_for_them_a_request_waits(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request gives its other slots back."""
    req = server.admit("a")
    for _ in range(TOKENS):
        server.step(req)
    server.retract(req)
    before, server.cache.free_slots = server.free_counts(), server.cache.free_slots[:5]
    given_back = []
    monkeypatch.setattr(allocation, "give_slots_back", lambda _, req: given_back.append(req))
    assert not allocation.take_slots(server, req)
    assert ([req], 5) == (given_back, len(server.cache.free_slots))
    server.retract(req)
    assert before[:2] == server.free_counts()[:2]
