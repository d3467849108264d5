"""The shim of torch_npu: each operator equals plain Python, and refuses invalid arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import simnpu
import simnpu.torch_npu
import torch
from torch import Tensor

HALF, FP8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
I32, I64 = torch.int32, torch.int64
SCATTERED = [
    *(F32, torch.float16, HALF, FP8, torch.float8_e5m2, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, I32, I64),
]
INDICES = [I32, I64]
SLOTS = [13, 0, -1, 31, 6, -7]  # of 4 blocks of 8; negative slots are left out
BLOCKS, BLOCK, HEADS = 4, 8, 2


@pytest.fixture
def torch_npu() -> ModuleType:
    """The shim's module."""
    return simnpu.torch_npu.install()


def noise(dtype: torch.dtype, *shape: int) -> Tensor:
    """Makes random bits on the host, but 0 and 1 for bool: [*shape]."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    octets = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return octets.view(dtype)


def content(tensor: Tensor) -> bytes:
    """Waits for the device, and returns the tensor's bytes."""
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("index_dtype", INDICES, ids=str)
@pytest.mark.parametrize("dtype", SCATTERED, ids=str)
@pytest.mark.usefixtures("schedule")
def test_scatter_nd_update_writes_rows(
    torch_npu: ModuleType, dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    """With one index in each row it writes whole rows, and all other rows stay."""
    host, updates, rows = noise(dtype, 9, 3, 4), noise(dtype, 4, 3, 4), [8, 0, 5, 3]
    device = host.to("npu")
    indices = torch.tensor(rows, dtype=index_dtype).view(-1, 1)
    result = torch_npu.npu_scatter_nd_update_(device, indices.to("npu"), updates.to("npu"))
    for row, update in zip(rows, updates, strict=True):
        host[row] = update
    assert content(host) == content(device)
    assert result is device


@pytest.mark.parametrize("index_dtype", INDICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, HALF, FP8], ids=str)
@pytest.mark.usefixtures("schedule")
def test_scatter_nd_update_writes_below_several_indices(
    torch_npu: ModuleType, dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    """The batch has any shape and two indices for each update; the tensor has gaps between rows."""
    host, updates = noise(dtype, 5, 4, 6), noise(dtype, 3, 2, 6)
    places = [[[4, 3], [0, 0]], [[2, 1], [2, 2]], [[1, 3], [3, 1]]]
    backing = noise(dtype, 5, 4, 9)
    around = backing.to("npu")
    device = around[:, :, 1:7]
    device.copy_(host.to("npu"))
    indices = torch.tensor(places, dtype=index_dtype)
    torch_npu.npu_scatter_nd_update_(device, indices.to("npu"), updates.to("npu"))
    for i, batch in enumerate(places):
        for j, (block, row) in enumerate(batch):
            host[block, row] = updates[i, j]
    backing[:, :, 1:7] = host
    assert content(backing) == content(around)


@pytest.mark.parametrize(("count", "width"), [(2, 0), (0, 4)], ids=["no width", "no rows"])
def test_scatter_nd_update_accepts_empty_updates(
    torch_npu: ModuleType, count: int, width: int
) -> None:
    """A buffer may have no width, such as the values of a pool that packs them with the keys."""
    device = torch.zeros(9, 1, width, device="npu")
    for depth in (1, 2):
        indices = torch.zeros(count, depth, dtype=torch.int64, device="npu")
        updates = torch.ones(count, *device.shape[depth:], device="npu")
        torch_npu.npu_scatter_nd_update_(device, indices, updates)
    torch.accelerator.synchronize()
    assert content(torch.zeros(9, 1, width)) == content(device)


@pytest.mark.parametrize("dtype", [torch.float16, HALF, torch.int8], ids=str)
@pytest.mark.usefixtures("schedule")
def test_reshape_and_cache_writes_slots(torch_npu: ModuleType, dtype: torch.dtype) -> None:
    """Keys and values of different widths are written only to slots that aren't negative."""
    caches = [noise(dtype, BLOCKS, BLOCK, HEADS, width) for width in (16, 4)]
    tokens = [noise(dtype, len(SLOTS), HEADS, width) for width in (16, 4)]
    devices = [cache.to("npu") for cache in caches]
    slots = torch.tensor(SLOTS, dtype=torch.int32, device="npu")
    torch_npu._npu_reshape_and_cache(*(token.to("npu") for token in tokens), *devices, slots)
    for cache, token in zip(caches, tokens, strict=True):
        write_slots(cache, token, SLOTS)
    assert [content(cache) for cache in caches] == [content(device) for device in devices]


@pytest.mark.parametrize("slots", [SLOTS, [-1, -1]], ids=["some", "none"])
@pytest.mark.usefixtures("schedule")
def test_reshape_and_cache_with_one_tensor_writes_slots(
    torch_npu: ModuleType, slots: list[int]
) -> None:
    """The cache holds keys and values in one tensor; a step with only padding changes nothing."""
    cache, token = noise(HALF, BLOCKS, BLOCK, 1, 20), noise(HALF, len(slots), 1, 20)
    device, places = cache.to("npu"), torch.tensor(slots, dtype=torch.int32, device="npu")
    torch_npu._npu_reshape_and_cache_siso(token.to("npu"), device, places)
    write_slots(cache, token, slots)
    assert content(cache) == content(device)


@pytest.mark.parametrize("index_dtype", INDICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, HALF, FP8, torch.uint8], ids=str)
@pytest.mark.parametrize("mode", ["Norm", None, "PA_NZ"])
@pytest.mark.usefixtures("schedule")
def test_scatter_pa_kv_cache_writes_slots(
    torch_npu: ModuleType, mode: str | None, dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    """It writes both layouts; in NZ a token's pieces of 32 bytes lie block_size apart."""
    last, widths = 32 // dtype.itemsize, (64, 32)
    if mode == "PA_NZ":
        caches = [noise(dtype, BLOCKS, HEADS * width // last, BLOCK, last) for width in widths]
    else:
        caches = [noise(dtype, BLOCKS, BLOCK, HEADS, width) for width in widths]
    tokens = [noise(dtype, len(SLOTS), HEADS, width) for width in widths]
    devices = [cache.to("npu") for cache in caches]
    slots = torch.tensor(SLOTS, dtype=index_dtype, device="npu")
    torch_npu.npu_scatter_pa_kv_cache(
        *(token.to("npu") for token in tokens), *devices, slots, cache_mode=mode
    )
    write = write_tiles if mode == "PA_NZ" else write_slots
    for cache, token in zip(caches, tokens, strict=True):
        write(cache, token, SLOTS)
    assert [content(cache) for cache in caches] == [content(device) for device in devices]


def write_slots(cache: Tensor, tokens: Tensor, slots: list[int]) -> None:
    """Writes as the operator must: cache [block, block_size, head, head_dim]."""
    for slot, token in zip(slots, tokens, strict=True):
        if slot >= 0:
            cache[slot // BLOCK, slot % BLOCK] = token


def write_tiles(cache: Tensor, tokens: Tensor, slots: list[int]) -> None:
    """Writes as the operator must: cache [block, tile, block_size, last]."""
    for slot, token in zip(slots, tokens, strict=True):
        if slot >= 0:
            for tile in range(cache.shape[1]):
                piece = token.flatten()[tile * cache.shape[3] :][: cache.shape[3]]
                cache[slot // BLOCK, tile, slot % BLOCK] = piece


@pytest.mark.parametrize("dtype", [None, torch.int8, FP8], ids=str)
@pytest.mark.usefixtures("schedule")
def test_dynamic_quant_scales_each_row(torch_npu: ModuleType, dtype: torch.dtype | None) -> None:
    """A row's largest element becomes the dtype's largest; a row of zeros stays zeros."""
    host = torch.randn(3, 2, 16).bfloat16()
    host[1, 1] = 0
    limit = 448.0 if dtype == FP8 else 127.0
    expected, scales = torch.zeros(3, 2, 16), torch.zeros(3, 2)
    for row in [(i, j) for i in range(3) for j in range(2)]:
        scale = host[row].float().abs().max() / limit
        scales[row] = scale
        if scale > 0:
            expected[row] = host[row].float() / scale
    quantized, scale = torch_npu.npu_dynamic_quant(host.to("npu"), dst_type=dtype)
    assert content(scales) == content(scale)
    rounded = expected.to(FP8) if dtype == FP8 else expected.round().to(torch.int8)
    assert content(rounded) == content(quantized)


@pytest.mark.parametrize("index", [-1, 4])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.usefixtures("schedule")
def test_an_index_out_of_bounds_shows_at_a_synchronisation(
    torch_npu: ModuleType, depth: int, index: int
) -> None:
    """A negative index is out of bounds, too: the device doesn't count from the end."""
    device = torch.zeros(4, 4, 3, device="npu")
    indices = torch.tensor([[0] * (depth - 1) + [index]], device="npu")
    updates = torch.ones(1, *device.shape[depth:], device="npu")
    with pytest.raises(RuntimeError, match="out of bounds"):  # noqa: PT012, eager raises at the call
        torch_npu.npu_scatter_nd_update_(device, indices, updates)
        torch.accelerator.synchronize()


@pytest.mark.usefixtures("schedule")
def test_a_slot_beyond_the_cache_shows_at_a_synchronisation(torch_npu: ModuleType) -> None:
    """The slot is the first one after the last block."""
    token, cache = torch.ones(1, 1, 4, dtype=HALF), torch.zeros(2, 8, 1, 4, dtype=HALF)
    slots = torch.tensor([16], dtype=torch.int32, device="npu")
    with pytest.raises(RuntimeError, match="out of bounds"):  # noqa: PT012, eager raises at the call
        torch_npu._npu_reshape_and_cache_siso(token.to("npu"), cache.to("npu"), slots)
        torch.accelerator.synchronize()


Call = tuple[str, dict[str, Any]]  # an operator and its arguments


def on_npu(dtype: torch.dtype, *shape: int) -> Tensor:
    """Makes zeros on the device."""
    return torch.zeros(shape, dtype=dtype, device="npu")


def nd(**changes: Tensor) -> Call:
    """Makes a valid call of npu_scatter_nd_update_ with changes, as the functions below do."""
    good = {"self": on_npu(HALF, 9, 3), "indices": on_npu(I32, 2, 1), "updates": on_npu(HALF, 2, 3)}
    return "npu_scatter_nd_update_", {**good, **changes}


def paged(op: str, **changes: Any) -> Call:
    """Makes a call of `op`, which writes keys and values."""
    tiled = op == "npu_scatter_pa_kv_cache" and "cache_mode" not in changes
    shape = (BLOCKS, HEADS, BLOCK, 16) if tiled else (BLOCKS, BLOCK, HEADS, 16)
    slots = "slot_mapping" if op == "npu_scatter_pa_kv_cache" else "slot_indices"
    good: dict[str, Any] = {label: on_npu(HALF, 3, HEADS, 16) for label in ("key", "value")}
    good |= {label: on_npu(HALF, *shape) for label in ("key_cache", "value_cache")}
    return op, {**good, slots: on_npu(torch.int32, 3), **changes}


def cached(**changes: Any) -> Call:
    """Makes a call of _npu_reshape_and_cache."""
    return paged("_npu_reshape_and_cache", **changes)


def pa(**changes: Any) -> Call:
    """Makes a call of npu_scatter_pa_kv_cache."""
    return paged("npu_scatter_pa_kv_cache", **changes)


def quant(**changes: Any) -> Call:
    """Makes a call of npu_dynamic_quant."""
    return "npu_dynamic_quant", {"input": on_npu(HALF, 2, 16), **changes}


REFUSED: list[tuple[Callable[[], Call], str]] = [
    (lambda: nd(self=torch.zeros(9, 3, dtype=HALF)), "one npu device, got self on cpu"),
    (lambda: nd(self=on_npu(torch.float64, 9, 3)), "self is float32 or .* got float64"),
    (lambda: nd(updates=on_npu(F32, 2, 3)), "updates is bfloat16, got float32"),
    (lambda: nd(indices=on_npu(torch.int16, 2, 1)), "indices is int32 or int64, got int16"),
    (lambda: nd(indices=on_npu(I64, 2)), r"indices is \[\.\.\., depth\] .* got \[2\]"),
    (lambda: nd(indices=on_npu(I64, 2, 0)), r"depth from 1 to self.dim\(\) = 2, got \[2, 0\]"),
    (lambda: nd(indices=on_npu(I64, 2, 3)), r"depth from 1 to self.dim\(\) = 2, got \[2, 3\]"),
    (lambda: nd(updates=on_npu(HALF, 3, 3)), r"updates must be \[2, 3\] .* got \[3, 3\]"),
    (lambda: nd(updates=on_npu(HALF, 2, 1)), r"updates must be \[2, 3\] .* got \[2, 1\]"),
    (lambda: nd(self=on_npu(HALF, *[1] * 9)), "self has 1 to 8 dimensions"),
    (lambda: cached(slot_indices=on_npu(I64, 3)), "slot_indices is int32, got int64"),
    (lambda: cached(slot_indices=on_npu(I32, 4)), r"slot_indices must be \[3\] .* got \[4\]"),
    (lambda: cached(slot_indices=on_npu(I32, 3, 1)), r"slot_indices must be \[3\] .* got \[3, 1\]"),
    (lambda: cached(key=on_npu(F32, 3, HEADS, 16)), "key is float16 or bfloat16 or int8, got"),
    (lambda: cached(value=on_npu(torch.float16, 3, HEADS, 16)), "value is bfloat16, got float16"),
    (lambda: cached(value_cache=on_npu(torch.int8, 4, 8, 2, 16)), "value_cache is bfloat16, got"),
    (lambda: cached(key=on_npu(HALF, 3, 32)), r"key has 3 dimensions, got \[3, 32\]"),
    (lambda: cached(key_cache=on_npu(HALF, 32, 2, 16)), "key_cache has 4 dimensions"),
    (lambda: cached(value=on_npu(HALF, 2, HEADS, 16)), r"value must be \[3, 2, 16\] .* got \[2,"),
    (lambda: cached(value=on_npu(HALF, 3, 1, 16)), r"value must be \[3, 2, 16\] .* got \[3, 1"),
    (lambda: cached(key_cache=on_npu(HALF, 4, 8, 2, 8)), r"key_cache must be \[4, 8, 2, 16\]"),
    (lambda: cached(value_cache=on_npu(HALF, 3, 8, 2, 16)), r"value_cache must be \[4, 8, 2, 16"),
    (lambda: cached(value_cache=on_npu(HALF, 4, 8, 2, 32)[..., ::2]), "value_cache must be cont"),
    (lambda: pa(key=on_npu(HALF, 3, HEADS, 32)[..., ::2]), "key must be contiguous"),
    (lambda: pa(slot_mapping=on_npu(I32, 6)[::2]), "slot_mapping must be contiguous"),
    (lambda: pa(slot_mapping=on_npu(F32, 3)), "slot_mapping is int32 or int64, got float32"),
    (lambda: pa(key_cache=on_npu(HALF, 4, 2, 8, 8)), r"key_cache must be \[4, 2, 8, 16\]"),
    (lambda: pa(cache_mode="NZ"), "cache_mode is 'Norm', 'PA_NZ' or None, got 'NZ'"),
    (lambda: pa(seq_lens=on_npu(I32, 3)), "no compression: seq_lens must be None"),
    (
        lambda: pa(value=on_npu(HALF, 3, HEADS, 8), value_cache=on_npu(HALF, 4, 1, 8, 16)),
        "value's head_dim 8 is no multiple of 16",
    ),
    (lambda: quant(input=on_npu(F32, 2, 16)), "input is float16 or bfloat16, got float32"),
    (lambda: quant(input=on_npu(HALF, 16)), r"at least 2 dimensions, got \[16\]"),
    (lambda: quant(dst_type=torch.int16), "dst_type is int8 or .* got int16"),
    (lambda: quant(quant_mode="pertensor"), "'pertoken' alone, got 'pertensor'"),
    (lambda: quant(smooth_scales=on_npu(HALF, 16)), "has no smooth_scales"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_an_invalid_argument_is_refused_at_the_call(
    torch_npu: ModuleType, call: Callable[[], Call], message: str
) -> None:
    """The error names the operator, the argument and both values."""
    op, arguments = call()
    torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match=rf"^torch_npu\.{op}: .*{message}"):
        getattr(torch_npu, op)(**arguments)


def nd_below() -> Call:
    """Makes a call of npu_scatter_nd_update_ with two indices for each element."""
    return nd(indices=on_npu(I64, 2, 2), updates=on_npu(HALF, 2))


def siso() -> Call:
    """Makes a call of _npu_reshape_and_cache_siso."""
    op, arguments = paged("_npu_reshape_and_cache_siso")
    return op, {label: arguments[label] for label in ("key", "key_cache", "slot_indices")}


def pa_norm() -> Call:
    """Makes a call of npu_scatter_pa_kv_cache for caches that are not NZ."""
    return pa(cache_mode="Norm")


@pytest.mark.parametrize("call", [nd, nd_below, cached, siso, pa, pa_norm, quant])
def test_an_operator_does_not_wait(torch_npu: ModuleType, call: Callable[[], Call]) -> None:
    """Earlier operations still pend after the call, and so do its own."""
    simnpu.set_schedule("lazy")
    op, arguments = call()
    torch.accelerator.synchronize()
    earlier = torch.zeros(1, device="npu")
    for _ in range(200):
        earlier.fill_(1)
    before = simnpu.pending()
    getattr(torch_npu, op)(**arguments)
    assert simnpu.pending() > before > 200
    torch.accelerator.synchronize()


@pytest.mark.parametrize("call", [nd, cached, siso, pa, pa_norm, quant])
def test_an_operator_is_registered_with_torch(
    torch_npu: ModuleType, call: Callable[[], Call]
) -> None:
    """torch.ops.npu and torch.ops.atb have the same keywords and do the same."""
    op, ours = call()
    for label in ours.keys() & {"key", "value", "updates", "input"}:
        ours[label].fill_(1)
    theirs = {k: v.clone() if isinstance(v, Tensor) else v for k, v in ours.items()}
    before = everything(ours)
    results = getattr(torch_npu, op)(**ours)
    also = getattr(torch.ops.atb if op.startswith("_") else torch.ops.npu, op)(**theirs)
    assert everything(ours, results) == everything(theirs, also) != before


def everything(arguments: dict[str, Any], results: object = None) -> list[bytes]:
    """Returns the tensors' bytes."""
    tensors = [*arguments.values(), *(results if isinstance(results, tuple) else [results])]
    return [content(tensor) for tensor in tensors if isinstance(tensor, Tensor)]


def test_an_operator_that_the_shim_lacks_is_named(torch_npu: ModuleType) -> None:
    """The error says that this is a shim, and which operators it has."""
    with pytest.raises(AttributeError, match=r"no 'npu_prefetch'; it has .*npu_scatter_nd"):
        _ = torch_npu.npu_prefetch
    assert not hasattr(torch_npu, "npu_prefetch")


def test_install_returns_the_module_that_import_finds(torch_npu: ModuleType) -> None:
    """Each call returns the same module, which leads to torch.npu."""
    assert torch_npu is simnpu.torch_npu.install()
    assert torch_npu is sys.modules["torch_npu"]
    assert torch_npu.npu is torch.get_device_module("npu")


@pytest.fixture
def absent(torch_npu: ModuleType) -> Iterator[None]:
    """Removes the shim from sys.modules during the test."""
    del sys.modules["torch_npu"]
    yield
    sys.modules["torch_npu"] = torch_npu


@pytest.mark.usefixtures("absent")
def test_install_does_not_replace_a_real_torch_npu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real torch_npu may be imported already, or only be installed."""
    (tmp_path / "torch_npu.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="a real torch_npu is installed"):
        simnpu.torch_npu.install()
    assert "torch_npu" not in sys.modules
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    with pytest.raises(RuntimeError, match="a real torch_npu is installed"):
        simnpu.torch_npu.install()


@pytest.mark.usefixtures("absent")
def test_install_needs_a_device_called_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that imports torch_npu uses the name "npu", so another name is refused."""
    monkeypatch.setattr(simnpu.torch_npu, "_backend", lambda: "tpu")
    with pytest.raises(RuntimeError, match=r"here it is 'tpu'; call simnpu\.install\(\"npu\"\)"):
        simnpu.torch_npu.install()
