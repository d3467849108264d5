"""Pools with recurrent state to make round trips with: MambaPool, and attention beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import (
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.ple_state_pool import NGramPool, ShortConvPool
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool

from kvtide.plugin.sglang.cases.keys_values import (
    allocator_for,
    key_value_probes,
    layer_probes,
    scattered,
)
from kvtide.plugin.sglang.cases.latent import NO_CUDA, index_probes, last_first, tail_probes
from kvtide.plugin.sglang.cases.round_trips import Built, ByteProbe, Case, Refusal, request_rows

STATE_LAYERS = [0, 2, 4]
ATTENTION_LAYERS = [1, 3]
SIZE = 512
SOURCES, TARGETS = {"request": 1, "mamba": 1}, {"request": 3, "mamba": 4}
ALIASED = "Req gives a 0-d index, so that the copy is a view of the state, and changes with it"


def state_params() -> Mamba2CacheParams:
    """Two heads of 16 with 8 states each, bfloat16 windows of three tokens, float32 states."""
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=32,
        n_groups=1,
        num_heads=2,
        head_dim=16,
        state_size=8,
        conv_kernel=4,
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    return Mamba2CacheParams(shape=shape, dtype=dtype, layers=STATE_LAYERS)


def state_pool(*siblings: Any, **options: Any) -> Any:
    """Makes a pool with room for the state of six requests in three layers."""
    pool = memory_pool.MambaPool(
        size=6,
        spec_state_size=6,
        cache_params=state_params(),
        mamba_layer_ids=STATE_LAYERS,
        device="cpu",
        **options,
    )
    for sibling in siblings:
        pool.register_slot_state(sibling)
    return pool


def state_probes(pool: Any) -> list[ByteProbe]:
    """Probes of the windows and the states, [layer, row, …]."""
    cache = pool.mamba_cache
    named = [
        *((f"conv{n}", buffer) for n, buffer in enumerate(cache.conv)),
        ("temporal", cache.temporal),
    ]
    return [layered_rows(name, buffer, "mamba") for name, buffer in named]


def layered_rows(name: str, buffer: torch.Tensor, kind: str) -> ByteProbe:
    """A probe of a tensor [layer, row, …], of which a request has one row of its kind."""
    return ByteProbe(name, lambda _, rows: buffer[:, rows[kind]].clone(), [buffer])


def hybrid(
    state: Any, page_size: int = 16, *, kind: Any = memory_pool.HybridLinearKVPool, **options: Any
) -> tuple[Any, Any]:
    """Makes a pool of two layers with attention beside the state, and its allocator."""
    pool = kind(
        size=SIZE,
        dtype=torch.bfloat16,
        page_size=page_size,
        head_num=2,
        head_dim=16,
        full_attention_layer_ids=ATTENTION_LAYERS,
        device="cpu",
        mamba_pool=state,
        **options,
    )
    allocator = allocator_for(pool, SIZE, page_size, torch.bfloat16)
    return pool, last_first(scattered(allocator))


def _mha(state: Any, more: Sequence[ByteProbe] = (), page_size: int = 16) -> Built:
    pool, allocator = hybrid(state, page_size)
    probes = [*key_value_probes(pool.full_kv_pool), *state_probes(state), *more]
    return Built(pool, allocator, probes, SOURCES, TARGETS)


def _mla() -> Built:
    state = state_pool()
    pool, allocator = hybrid(state, use_mla=True, kv_lora_rank=64, qk_rope_head_dim=16)
    probes = layer_probes("latent", pool.full_kv_pool.kv_buffer)
    return Built(pool, allocator, [*probes, *state_probes(state)], SOURCES, TARGETS)


def _dsa() -> Built:
    """Builds latents with an index key for two tokens each, and the request's unfinished pair."""
    state = state_pool()
    pool, allocator = hybrid(
        state,
        128,
        use_mla=True,
        use_dsa=True,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        kv_cache_dim=80,
        index_head_dim=128,
        index_kpool=2,
        index_kpool_compress=True,
        max_running_requests=4,
    )
    full = pool.full_kv_pool
    probes = [*layer_probes("latent", full.kv_buffer), *index_probes(full), *tail_probes(full)]
    return Built(pool, allocator, [*probes, *state_probes(state)], SOURCES, TARGETS)


def _with_siblings() -> Built:
    convolution = ShortConvPool(
        size=6, state_shape=(16, 3), layer_ids=[0, 1], dtype=torch.bfloat16, device="cpu"
    )
    ngrams = NGramPool(size=6, context_len=3, eos_token_id=2, device="cpu")
    more = [
        layered_rows("short_conv", convolution.conv_state, "mamba"),
        request_rows("ngram", ngrams.context, "mamba"),
    ]
    return _mha(state_pool(convolution, ngrams), more)


def _with_ring() -> Built:
    """Builds ReplaySSM: a ring has the tokens since the recurrence was last written."""
    state = state_pool(enable_linear_replayssm=True)
    rings = [(name, getattr(state.mamba_cache, f"replayssm_{name}")) for name in ("d", "k", "g")]
    more = [layered_rows(f"ring_{name}", ring, "mamba") for name, ring in rings]
    return _mha(state, [*more, request_rows("write_pos", state.replayssm_write_pos, "mamba")])


def _with_speculative_ring() -> Built:
    """Builds ReplaySSM for speculative decoding, where the ring has the row of the request."""
    state = state_pool(enable_linear_replayssm_spec=True, speculative_num_draft_tokens=3)
    cache = state.mamba_cache
    rings = [(name, getattr(cache, f"replayssm_{name}")) for name in ("d", "k", "g", "rawv")]
    more = [layered_rows(f"ring_{name}", ring, "request") for name, ring in rings]
    cursors = ("spec_write_pos", "cache_base", "is_flush")
    more += [
        request_rows(cursor, getattr(state, f"replayssm_{cursor}"), "request") for cursor in cursors
    ]
    return _mha(state, more)


def _transposed() -> Built:
    """Builds windows as CPUs with AMX keep them: in memory the last two axes are swapped."""
    state = state_pool()
    conv = state.mamba_cache.conv
    conv[0] = conv[0].transpose(2, 3).contiguous().transpose(2, 3)
    return _mha(state)


def _envelope() -> Built:
    """Builds state of which a request has one range of bytes, layer after layer."""
    return _mha(state_pool(envelope_layout=True))


def _qsa(dtype: torch.dtype = torch.bfloat16) -> Built:
    state, ratio = state_pool(), 4
    pool, allocator = hybrid(
        state,
        kind=QSATokenToKVPool,
        qsa_index_kv_heads=1,
        qsa_index_head_dim=16,
        qsa_compress_ratio=ratio,
        qsa_token_topk=16,
        num_request_slots=5,
        qsa_indexer_dtype=dtype,
    )
    probes = [*key_value_probes(pool.full_kv_pool), *state_probes(state)]
    for layer, keys in enumerate(pool.qsa_compressed_k_buffer_pool):
        probes.append(_groups(f"index_k{layer}", keys, ratio))
    for layer, ring in enumerate(pool.qsa_key_state_buffer_pool):
        probes.append(_ring(f"pending_k{layer}", ring, ratio))
    probes.append(_ring("pending_rope", pool.qsa_rope_position_buffer, ratio))
    return Built(pool, allocator, probes, SOURCES, TARGETS)


def _groups(name: str, buffer: torch.Tensor, ratio: int) -> ByteProbe:
    """A probe of [slot // ratio, …], in the order of the tokens wherever their pages lie."""

    def read(slots: torch.Tensor, _: Any) -> torch.Tensor:
        return buffer[torch.unique_consecutive(slots // ratio)].clone()

    return ByteProbe(name, read, [buffer])


def _ring(name: str, buffer: torch.Tensor, ratio: int) -> ByteProbe:
    """A probe of [request * ratio + place, …]."""

    def read(_: torch.Tensor, rows: Any) -> torch.Tensor:
        return buffer[rows["request"] * ratio : (rows["request"] + 1) * ratio].clone()

    return ByteProbe(name, read, [buffer])


CASES = [
    Case(
        "MHA beside state, page 1",
        lambda: _mha(state_pool(), (), 1),
        "wrong",
        13,
        1,
        ALIASED,
        "CPU",
    ),
    Case("MHA beside state", lambda: _mha(state_pool()), "wrong", reason=ALIASED, only_on="CPU"),
    Case("MLA beside state", _mla, "wrong", reason=ALIASED, only_on="CPU"),
    Case(
        "DSA beside state",
        _dsa,
        "crash",
        100,
        128,
        NO_CUDA,
        "no CUDA",
    ),
    Case(
        "state, a short convolution and n-grams",
        _with_siblings,
        "wrong",
        reason=ALIASED,
        only_on="CPU",
    ),
    Case("state of transposed windows", _transposed, "wrong", reason=ALIASED, only_on="CPU"),
    Case("state in one piece a request", _envelope, "wrong", reason=ALIASED, only_on="CPU"),
    Case(
        "state with a ReplaySSM ring",
        _with_ring,
        "wrong",
        reason="the ring isn't copied, and what was decoded since its last flush is only there",
    ),
    Case(
        "state with a ReplaySSM ring of the request's, for speculation",
        _with_speculative_ring,
        "wrong",
        reason="the ring isn't copied, and what was decoded since its last flush is only there",
    ),
    Case(
        "QSA: compressed keys, pending keys, positions",
        _qsa,
        "wrong",
        reason="keys, ring and positions of the indexer aren't copied",
    ),
    Case(
        "QSA with fp8 keys",
        lambda: _qsa(torch.float8_e4m3fn),
        "wrong",
        reason="keys, ring and positions of the indexer aren't copied",
    ),
]


class _Stranger:
    """State in the rows of a MambaPool, of a class that isn't SGLang's."""


def _of_an_unknown_class() -> Built:
    """A MambaPool that may hold more than SGLang's own."""
    state = state_pool()
    state.__class__ = type("OtherMambaPool", (memory_pool.MambaPool,), {})
    return _mha(state)


def _two_rings() -> Built:
    both = {"enable_linear_replayssm": True, "enable_linear_replayssm_spec": True}
    return _mha(state_pool(speculative_num_draft_tokens=3, **both))


REFUSED = [
    Refusal("state of an unknown class", _of_an_unknown_class, "doesn't know .*OtherMambaPool"),
    Refusal("unknown rows with the state", lambda: _mha(state_pool(_Stranger())), "_Stranger"),
    Refusal("two ReplaySSM rings in one", _two_rings, "use one of them"),
]
