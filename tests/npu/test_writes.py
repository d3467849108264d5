"""Engines write to the NPU pools, move tokens within them, and register their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvtide.errors import LayoutError, SlotError
from kvtide.npu import NPUTokenToKVPool
from support.npu_pools import (
    FIRST_LAYER,
    KINDS,
    LAYER_COUNT,
    PAGE_SIZE,
    AnyLayer,
    Image,
    differences,
    image_of,
    mha,
    mla,
    packed,
    planes_of,
    scramble,
)
from support.simulated import SCHEDULES, simulated

SLOTS = [4, 67, 9, 30, 31]


def written(pool: NPUTokenToKVPool, count: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """Makes random tokens [token, …] for each plane of the middle layer, in the stored dtype."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand((count, *tensor.shape[2:]), generator=generator).to(tensor.dtype)
        for name, layer, tensor in planes_of(pool)
        if layer == 1
    }


def with_rows(image: Image, tokens: dict[str, torch.Tensor], slots: list[int]) -> Image:
    """Returns `image` with those tokens in the middle layer."""
    expected = {part: rows.copy() for part, rows in image.items()}
    for name, values in tokens.items():
        if values.numel():
            raw = values.contiguous().view(torch.uint8).numpy().reshape(len(slots), -1)
            expected[name, 1][slots] = raw
    return expected


def model_values(pool: NPUTokenToKVPool, values: torch.Tensor) -> torch.Tensor:
    """Converts stored tokens to the model's dtype, on the pool's device."""
    typed = values.view(pool.dtype) if values.dtype == torch.uint8 else values
    return typed.to(planes_of(pool)[0][2].device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("where", ["cpu", *SCHEDULES])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("packed")])
def test_tokens_are_written_to_their_slots(kind: str, where: str, dtype: torch.dtype) -> None:
    """A copy reads the tokens, and no other byte changes."""
    with simulated("lazy" if where == "cpu" else where) as name:
        pool = KINDS[kind]("cpu" if where == "cpu" else name)
        scramble(pool, 1)
        before = image_of(pool)
        tokens = written(pool, len(SLOTS))
        keys, values = (model_values(pool, tokens[name]) for name in ("k", "v"))
        loc = torch.tensor(SLOTS, dtype=dtype).to(keys.device)
        pool.set_kv_buffer(AnyLayer(FIRST_LAYER + 1), loc, keys, values)
        expected = with_rows(before, {name: tokens[name] for name in ("k", "v")}, SLOTS)
        assert [] == differences(expected, image_of(pool))
        pool.close()


@pytest.mark.parametrize("where", ["cpu", "npu"])
@pytest.mark.parametrize("kind", ["mla_index", "mla_nz_index", "packed"])
def test_index_keys_and_scales_are_written_to_their_slots(kind: str, where: str) -> None:
    """Only the named layer changes; layer 7 is the second that has index keys."""
    with simulated("lazy"):
        pool = KINDS[kind](where)
        scramble(pool, 1)
        expected = image_of(pool)
        keys = torch.rand(len(SLOTS), 1, 8).to(pool.dtype)
        loc = torch.tensor(SLOTS)
        pool.set_index_k_buffer(7, loc, keys.to(where))
        expected["index_k", 2][SLOTS] = keys.view(torch.uint8).numpy().reshape(len(SLOTS), -1)
        if kind == "packed":
            scales = torch.rand(len(SLOTS), 1)
            pool.set_index_k_scale_buffer(7, loc, scales.to(where))
            expected["index_k_scale", 2][SLOTS] = scales.view(torch.uint8).numpy()
        assert [] == differences(expected, image_of(pool))
        assert (
            pool.get_index_k_buffer(7).cpu().view(torch.uint8).numpy().tobytes()
            == expected["index_k", 2].tobytes()
        )
        pool.close()


def test_records_are_written_as_they_are() -> None:
    """A kernel of the engine may have packed the records already."""
    pool = packed("cpu")
    records = torch.randint(0, 256, (2, 148), dtype=torch.uint8)
    expected = image_of(pool)
    pool.set_kv_buffer(AnyLayer(6), torch.tensor([4, 8]), records, None)
    expected["k", 1][[4, 8]] = records.numpy()
    assert [] == differences(expected, image_of(pool))


@pytest.mark.parametrize("joined", [True, False])
def test_latents_are_packed_into_records(joined: bool) -> None:
    """fp8 latent, bfloat16 rotary key and scale together give the latent back."""
    pool = packed("cpu")
    latent, rope = torch.randn(3, 128) * 5, torch.randn(3, 8)
    latent[2] = 0
    given = (torch.cat([latent, rope], -1), None) if joined else (latent, rope)
    pool.set_kv_buffer(AnyLayer(6), torch.tensor([4, 8, 9]), *given)
    record = pool.get_key_buffer(6).view(-1, 148)[[4, 8, 9]].view(torch.uint8)
    scale = record[:, 144:].contiguous().view(torch.float32)
    found = record[:, :128].contiguous().view(torch.float8_e4m3fn).float() * scale
    assert torch.equal(rope.bfloat16(), record[:, 128:144].contiguous().view(torch.bfloat16))
    assert torch.allclose(latent, found, rtol=0.07, atol=0.05)
    assert torch.equal(latent.abs().amax(-1, keepdim=True)[:2] / 448, scale[:2])


def test_values_of_another_dtype_are_scaled_and_converted() -> None:
    """The caller's tensors don't change."""
    pool = mha("cpu", dtype=torch.float8_e4m3fn)
    keys, values = torch.full((1, 2, 6), 3.0), torch.full((1, 2, 3), 8.0)
    pool.set_kv_buffer(AnyLayer(6), torch.tensor([4]), keys, values, k_scale=2.0, v_scale=4.0)
    key, value = (tensor.view(68, 2, -1)[4].float() for tensor in pool.get_kv_buffer(6))
    assert ({1.5}, {2.0}) == (set(key.view(-1).tolist()), set(value.view(-1).tolist()))
    assert (3.0, 8.0) == (float(keys.max()), float(values.max()))
    plain = mha("cpu")
    plain.set_kv_buffer(
        AnyLayer(6), torch.tensor([4]), keys.bfloat16(), values.bfloat16(), 2.0, 4.0
    )
    assert 3.0 == plain.get_key_buffer(6).max()


def test_latent_and_rope_may_come_as_one() -> None:
    """Some attention kernels give them so."""
    pool, apart = mla("cpu"), mla("cpu")
    rows = torch.randn(2, 1, 48).bfloat16()
    pool.set_kv_buffer(AnyLayer(7), torch.tensor([4, 6]), rows, None)
    apart.set_kv_buffer(AnyLayer(7), torch.tensor([4, 6]), rows[..., :32], rows[..., 32:])
    assert [] == differences(image_of(apart), image_of(pool))
    with pytest.raises(LayoutError, match="47"):
        pool.set_kv_buffer(AnyLayer(7), torch.tensor([4, 6]), rows[..., :47], None)


def test_slots_may_come_in_an_object_with_another_layer() -> None:
    """SGLang gives a KVWriteLoc and an override of the layer."""
    pool = mha("cpu")
    expected = image_of(pool)
    tokens = written(pool, 1)
    loc = type("KVWriteLoc", (), {"loc": torch.tensor([9]), "swa_loc": None})()
    pool.set_kv_buffer(AnyLayer(99), loc, tokens["k"], tokens["v"], layer_id_override=6)
    assert [] == differences(with_rows(expected, tokens, [9]), image_of(pool))


@pytest.mark.parametrize("layer", [4, 8, 0, -1])
def test_layers_of_other_stages_are_refused(layer: int) -> None:
    """Layers before and after the stage are refused; a negative one isn't counted from the end."""
    pool = mla("cpu", index_head_dim=8)
    tokens = written(pool, 1)
    calls: list[Any] = [
        lambda: pool.get_key_buffer(layer),
        lambda: pool.get_value_buffer(layer),
        lambda: pool.get_kv_buffer(layer),
        lambda: pool.get_index_k_buffer(layer),
        lambda: pool.set_index_k_buffer(layer, torch.tensor([4]), tokens["index_k"]),
        lambda: pool.set_kv_buffer(AnyLayer(layer), torch.tensor([4]), tokens["k"], tokens["v"]),
    ]
    for call in calls:
        with pytest.raises(LayoutError, match=rf"layer {layer} "):
            call()


def test_rows_of_another_width_are_refused_before_any_is_written() -> None:
    """If only the values are wrong, the keys aren't written either."""
    pool = mha("cpu")
    before, tokens = image_of(pool), written(pool, 2)
    for keys, values in ((tokens["k"], tokens["k"]), (tokens["k"][:1], tokens["v"])):
        with pytest.raises(LayoutError, match="for 2 slots"):
            pool.set_kv_buffer(AnyLayer(6), torch.tensor([4, 5]), keys, values)
    with pytest.raises(LayoutError, match="cache_v"):
        pool.set_kv_buffer(AnyLayer(6), torch.tensor([4, 5]), tokens["k"])
    assert [] == differences(before, image_of(pool))


@pytest.mark.parametrize("where", ["cpu", *SCHEDULES])
@pytest.mark.parametrize("kind", KINDS)
def test_moved_tokens_keep_their_bytes(kind: str, where: str) -> None:
    """All layers and planes move, and source and target may overlap."""
    with simulated("lazy" if where == "cpu" else where) as name:
        pool = KINDS[kind]("cpu" if where == "cpu" else name)
        scramble(pool, 1)
        expected = image_of(pool)
        source, target = [4, 5, 6, 7, 8, 60], [5, 6, 7, 8, 9, 4]
        for rows in expected.values():
            rows[target] = rows[source].copy()
        device = planes_of(pool)[0][2].device
        as_int32 = torch.tensor(target, dtype=torch.int32, device=device)
        pool.move_kv_cache(as_int32, torch.tensor(source, device=device))
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        pool.move_kv_cache(nothing, nothing)
        assert [] == differences(expected, image_of(pool))
        pool.close()


def test_a_move_needs_equally_many_slots() -> None:
    """Otherwise it is refused."""
    with pytest.raises(SlotError, match="2 slots to move to 1"):
        mha("cpu").move_kv_cache(torch.tensor([4]), torch.tensor([5, 6]))


@pytest.mark.parametrize("kind", KINDS)
def test_buffer_infos_describe_the_tensors(kind: str) -> None:
    """Each plane and layer has its address, its length and the length of a page."""
    pool = KINDS[kind]("cpu")
    tensors = [(name, tensor) for name, _, tensor in planes_of(pool) if tensor.numel()]
    state = [(name, tensor) for name, tensor in tensors if name.startswith("index")]
    for infos, those in (
        (pool.get_contiguous_buf_infos(), tensors),
        (pool.get_state_buf_infos(), state),
    ):
        pointers, lengths, page_lengths = infos
        assert [tensor.data_ptr() for _, tensor in those] == pointers
        assert [tensor.nbytes for _, tensor in those] == lengths
        assert [tensor.nbytes // 17 for _, tensor in those] == page_lengths


def test_sizes_are_the_bytes_of_the_tensors() -> None:
    """SGLang's MHA pool gives two numbers, and its MLA pool gives their sum."""
    pool = mha("cpu")
    assert (3 * 68 * 24, 3 * 68 * 12) == pool.get_kv_size_bytes()
    assert 3 * 68 * 96 + 2 * 68 * 16 == KINDS["mla_index"]("cpu").get_kv_size_bytes()
    assert 3 * 68 * (148 + 8 + 4) == packed("cpu").get_kv_size_bytes()


def test_storage_has_the_shape_of_sglangs() -> None:
    """The shape is [layer, page, token, head, dim] with one page more, or a list of FIA's views."""
    assert (3, 17, 4, 2, 6) == torch.as_tensor(mha("cpu").k_buffer).shape
    fia = mha("cpu", use_fia=True)
    assert isinstance(fia.v_buffer, list)
    assert [(68, 1, 2, 3)] * 3 == [tuple(tensor.shape) for tensor in fia.v_buffer]
    nbytes = fia.v_buffer[0].nbytes
    assert [0, nbytes, 2 * nbytes] == [
        tensor.data_ptr() - fia.v_buffer[0].data_ptr() for tensor in fia.v_buffer
    ]
    pool = packed("cpu")
    assert (17, 4, 1, 148) == pool.get_key_buffer(5).shape
    assert (17, 4, 1, 0) == pool.get_value_buffer(5).shape
    assert (17, 4, 1, 8) == pool.get_index_k_buffer(5).shape
    assert (17, 4, 1) == pool.get_index_k_scale_buffer(5).shape
    assert torch.float8_e4m3fn == mha("cpu", dtype=torch.float8_e4m3fn).get_key_buffer(5).dtype


def test_a_write_in_nz_order_lies_in_tiles() -> None:
    """The token has the first 16 columns in one tile of its page and the others in the next."""
    pool = mla("cpu", use_fia_nz=True)
    latent = torch.arange(32).bfloat16().view(1, 1, 32)
    pool.set_kv_buffer(AnyLayer(5), torch.tensor([6]), latent, torch.zeros(1, 1, 16).bfloat16())
    flat = torch.as_tensor(pool.k_buffer)[0].reshape(-1)
    page = PAGE_SIZE * 32
    assert torch.equal(torch.arange(16).bfloat16(), flat[page + 32 : page + 48])
    assert torch.equal(torch.arange(16, 32).bfloat16(), flat[page + 96 : page + 112])
    assert 31 == int(np.count_nonzero(flat.float().numpy()))
    assert LAYER_COUNT == len(pool.k_buffer)
