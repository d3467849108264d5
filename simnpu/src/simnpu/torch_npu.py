"""A shim of `torch_npu`: the operators by which KV pools move KV, made of ordinary torch operators.

`install()` puts a module `torch_npu` into `sys.modules`, so that pool code written for Ascend runs
unchanged on simnpu. It also registers the operators as `torch.ops.npu.*` and `torch.ops.atb.*`.
Each operator is a few operations on the device, and as asynchronous as they are: a slot out of
range shows at the next synchronisation, as on the real device. Arguments are checked at the call,
by the rules that the interface's documents state and by no others. If the documents of two
generations differ, the shim accepts what either accepts: fp8 and uint8 need an Ascend 950.

Sources, by the short names used below: op-plugin is github.com/Ascend/op-plugin, ops-nn is
github.com/hicann/ops-nn (a mirror of CANN's), ATB is "Ascend Transformer Boost" in CANN's API
reference on hiascend.com.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NoReturn, final

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCATTERED = (
    *(torch.float32, *_HALVES, *_FP8, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
)
_CACHED = (*_HALVES, torch.int8)
_PAGED = (
    *(torch.float32, *_HALVES, *_FP8, torch.int8, torch.uint8),
    *(torch.int16, torch.uint16, torch.int32, torch.uint32),
)
_INDICES = (torch.int32, torch.int64)
_QUANTIZED = (torch.int8, *_FP8)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NZ_BYTES = 32  # the innermost dimension of an NZ cache


def npu_scatter_nd_update_(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Writes `updates` into `self` at `indices`, in place, and returns `self`.

    `self` has 1 to 8 dimensions, of any strides; `indices` is int32 or int64 [*batch, depth] with
    depth <= self.dim(); `updates` is [*batch, *self.shape[depth:]] of `self`'s dtype. An index
    must be within bounds and not negative; if two indices are equal, either update may win.

    Source: op-plugin docs/zh/custom_APIs/torch_npu/torch_npu-npu_scatter_nd_update_.md; dtypes
    from ops-nn index/scatter_nd_update/op_api/aclnn_scatter_nd_update.cpp (lists 910B and 950).
    """
    op = "npu_scatter_nd_update_"
    _check_devices(op, {"self": self, "indices": indices, "updates": updates})
    _check_dtype(op, "self", self, _SCATTERED)
    _check_dtype(op, "updates", updates, (self.dtype,))
    _check_dtype(op, "indices", indices, _INDICES)
    if not 1 <= self.dim() <= 8:
        _refuse(op, f"self has 1 to 8 dimensions, got {list(self.shape)}")
    depth = indices.shape[-1] if indices.dim() >= 2 else 0
    if not 1 <= depth <= self.dim():
        _refuse(
            op,
            "indices is [..., depth] of at least 2 dimensions with depth from 1 to "
            f"self.dim() = {self.dim()}, got {list(indices.shape)}",
        )
    _check_shape(op, "updates", updates, [*indices.shape[:-1], *self.shape[depth:]])
    rows = indices.reshape(-1, depth).to(torch.int64)
    bits = _bits(updates).reshape(rows.shape[0], *self.shape[depth:])
    if depth == 1:
        _bits(self).index_copy_(0, rows[:, 0], bits)
        return self
    # index_put_ takes -1 for the last row, but the device refuses it: it becomes too large here.
    sizes = self.shape[:depth]
    axes = [torch.where(rows[:, i] < 0, sizes[i], rows[:, i]) for i in range(depth)]
    _bits(self).index_put_(tuple(axes), bits)
    return self


def _npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """Writes the keys and values of tokens into their slots of a paged cache, in place.

    `key` is [token, head, head_dim] and `key_cache` contiguous [block, block_size, head, head_dim];
    `value` and `value_cache` have the same form, but may have another head_dim. All four have the
    same dtype: float16, bfloat16 or int8. `slot_indices` is int32 [token], block * block_size +
    offset; a token with a negative slot is left out, and no other slot may appear twice.

    Source: op-plugin op_plugin/ops/atb/ReshapeAndCachAtb.cpp for the schema; ATB
    "ReshapeAndCacheOperation" (ascendtb_01_0073, ascendtb_01_0242) for shapes, dtypes and slots.
    """
    op = "_npu_reshape_and_cache"
    new, caches = {"key": key, "value": value}, {"key": key_cache, "value": value_cache}
    _check_paged(op, new, caches, {"slot_indices": slot_indices}, _CACHED, (torch.int32,))
    for label, cache in caches.items():
        _write_slots(cache.flatten(0, 1), slot_indices, new[label])


def _npu_reshape_and_cache_siso(key: Tensor, key_cache: Tensor, slot_indices: Tensor) -> None:
    """`_npu_reshape_and_cache` for a cache that holds keys and values in one tensor.

    Source: op-plugin op_plugin/ops/atb/ReshapeAndCacheSisoAtb.cpp.
    """
    op = "_npu_reshape_and_cache_siso"
    slots = {"slot_indices": slot_indices}
    _check_paged(op, {"key": key}, {"key": key_cache}, slots, _CACHED, (torch.int32,))
    _write_slots(key_cache.flatten(0, 1), slot_indices, key)


def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Writes the keys and values of tokens into their slots of a paged cache, in place.

    `key` is [token, head, head_dim]. With `cache_mode` "Norm" or None, `key_cache` is
    [block, block_size, head, head_dim]; with "PA_NZ" it is
    [block, head * head_dim / last, block_size, last], where `last` elements make 32 bytes. `value`
    and `value_cache` have the same form. All are contiguous and have the same dtype.
    `slot_mapping` is int32 or int64 [token]; a token with a negative slot is left out. The shim has
    no compression: `compress_lens`, `compress_seq_offsets` and `seq_lens` must be None.

    Source: op-plugin docs/zh/custom_APIs/torch_npu/torch_npu-npu_scatter_pa_kv_cache.md, negative
    slots from test/test_custom_ops/test_scatter_pa_kv_cache.py; `last` from ops-transformer
    attention/scatter_pa_kv_cache/docs/aclnnScatterPaKvCache.md.
    """
    op = "npu_scatter_pa_kv_cache"
    extra = {"compress_lens": compress_lens, "compress_seq_offsets": compress_seq_offsets}
    for label, tensor in {**extra, "seq_lens": seq_lens}.items():
        if tensor is not None:
            _refuse(op, f"the shim has no compression: {label} must be None")
    if cache_mode not in (None, "Norm", "PA_NZ"):
        _refuse(op, f"cache_mode is 'Norm', 'PA_NZ' or None, got {cache_mode!r}")
    tiled = cache_mode == "PA_NZ"
    new, caches = {"key": key, "value": value}, {"key": key_cache, "value": value_cache}
    slots = {"slot_mapping": slot_mapping}
    _check_paged(op, new, caches, slots, _PAGED, _INDICES, tiled=tiled)
    for label, tensor in {**new, **slots}.items():
        if not tensor.is_contiguous():
            _refuse(op, f"{label} must be contiguous, has strides {tensor.stride()}")
    for label, cache in caches.items():
        if tiled:
            _write_tiles(cache, slot_mapping, new[label])
        else:
            _write_slots(cache.flatten(0, 1), slot_mapping, new[label])


def npu_dynamic_quant(
    input: Tensor,  # noqa: A002, the schema's name
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: torch.dtype | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Quantizes each row of `input` by its largest element: (quantized, scale).

    `input` is float16 or bfloat16 of at least 2 dimensions. The result has its shape and
    `dst_type`: int8 (also for None) or fp8. `scale` is float32 [*input.shape[:-1]], and
    quantized * scale gives the values back. A row of zeros stays zeros. The shim has only the mode
    "pertoken", without smoothing and groups.

    Source: op-plugin docs/zh/custom_APIs/torch_npu/torch_npu-npu_dynamic_quant.md (which doesn't
    say what becomes of a row of zeros).
    """
    op = "npu_dynamic_quant"
    dtype = torch.int8 if dst_type is None else dst_type
    if smooth_scales is not None or group_index is not None or dst_type_max != 0.0:
        _refuse(op, "the shim has no smooth_scales, no group_index and no dst_type_max")
    if quant_mode != "pertoken":
        _refuse(op, f"the shim has quant_mode 'pertoken' alone, got {quant_mode!r}")
    if dtype not in _QUANTIZED:
        _refuse(op, f"dst_type is {_names(_QUANTIZED)}, got {_name(dtype)}")
    _check_devices(op, {"input": input})
    _check_dtype(op, "input", input, _HALVES)
    if input.dim() < 2:
        _refuse(op, f"input has at least 2 dimensions, got {list(input.shape)}")
    rows = input.to(torch.float32)
    limit = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    scale = rows.abs().amax(dim=-1) / limit
    scaled = rows / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    if dtype.is_floating_point:
        # A rounding error in the division must not push the largest element out of range.
        return scaled.clamp(-limit, limit).to(dtype), scale
    return scaled.round().clamp(-limit, limit).to(dtype), scale


# Each operator of torch_npu with its namespace, schema and function. The namespaces are those of
# op-plugin: ATB's operators lie in `atb`, all others in `npu`.
_OPERATORS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "npu_scatter_nd_update_": (
        "npu",
        "(Tensor(a!) self, Tensor indices, Tensor updates) -> Tensor(a!)",
        npu_scatter_nd_update_,
    ),
    "_npu_reshape_and_cache": (
        "atb",
        "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_indices) -> ()",
        _npu_reshape_and_cache,
    ),
    "_npu_reshape_and_cache_siso": (
        "atb",
        "(Tensor key, Tensor(a!) key_cache, Tensor slot_indices) -> ()",
        _npu_reshape_and_cache_siso,
    ),
    "npu_scatter_pa_kv_cache": (
        "npu",
        "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, "
        "Tensor? seq_lens=None, str? cache_mode='PA_NZ') -> ()",
        npu_scatter_pa_kv_cache,
    ),
    "npu_dynamic_quant": (
        "npu",
        "(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, "
        "ScalarType? dst_type=None, str quant_mode='pertoken', float dst_type_max=0.0) "
        "-> (Tensor, Tensor)",
        npu_dynamic_quant,
    ),
}

_libraries: list[Any] = []  # an operator lasts as long as its library object


@final
class _Shim(ModuleType):
    """The module that `import torch_npu` finds."""

    @property
    def npu(self) -> ModuleType:
        """The device's module, which is torch.npu."""
        module: ModuleType = torch.get_device_module("npu")
        return module

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"simnpu's shim of torch_npu has no {name!r}; it has npu, {', '.join(_OPERATORS)}"
        )


def install() -> ModuleType:
    """Makes `import torch_npu` find the shim, and returns it; further calls return the same.

    Raises RuntimeError if a real torch_npu could be imported, and if simnpu's device isn't
    installed or isn't called `npu`, which is the name that such code uses.
    """
    present = sys.modules.get("torch_npu")
    if isinstance(present, _Shim):
        return present
    if present is not None or importlib.util.find_spec("torch_npu") is not None:
        raise RuntimeError(
            "simnpu: a real torch_npu is installed here, so the shim keeps out of its way; "
            "run the code on the device, or in an environment without torch_npu"
        )
    if _backend() != "npu" or not hasattr(torch, "npu"):
        raise RuntimeError(
            f"simnpu: code that imports torch_npu calls its device npu, here it is {_backend()!r}; "
            'call simnpu.install("npu") before install_torch_npu()'
        )
    shim = _Shim("torch_npu", __doc__)
    shim.__spec__ = importlib.machinery.ModuleSpec("torch_npu", loader=None)
    for name, (_, _, function) in _OPERATORS.items():
        setattr(shim, name, function)
    if not _libraries:
        _register()
    sys.modules["torch_npu"] = shim
    return shim


def _register() -> None:
    make_library: Any = torch.library.Library  # torch gives it no types
    for namespace in ("npu", "atb"):
        library = make_library(namespace, "FRAGMENT")
        for name, (home, schema, function) in _OPERATORS.items():
            if home == namespace:
                library.define(name + schema)
                library.impl(name, function, "CompositeImplicitAutograd")
        _libraries.append(library)


def _write_slots(rows: Tensor, slots: Tensor, values: Tensor) -> None:
    """rows[slots[i]] = values[i] for every slot that isn't negative, without a synchronisation.

    Only the device knows which slots are negative, so none can be left out here: in its place the
    first slot that isn't negative is written again, or row 0 with its own content if there is none.
    """
    if values.numel() == 0:
        return
    target, source, slots = _bits(rows), _bits(values), slots.to(torch.int64)
    wanted = slots >= 0
    first = wanted.to(torch.int32).argmax().view(1)
    spare = torch.where(wanted.any(), source.index_select(0, first), target[:1])
    mask = wanted.view(-1, *[1] * (source.dim() - 1))
    slots = torch.where(wanted, slots, slots.index_select(0, first).clamp(min=0))
    target.index_copy_(0, slots, torch.where(mask, source, spare))


def _write_tiles(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """`_write_slots` for an NZ cache [block, tile, block_size, last]: a token lies in all tiles.

    A negative slot has a negative block, so all of its rows are negative.
    """
    _, tiles, block_size, last = cache.shape
    slots = slots.to(torch.int64)
    block = torch.div(slots, block_size, rounding_mode="floor")
    tile = torch.arange(tiles, device=cache.device)
    rows = (block[:, None] * tiles + tile) * block_size + slots.remainder(block_size)[:, None]
    _write_slots(cache.view(-1, last), rows.view(-1), values.reshape(-1, last))


def _bits(tensor: Tensor) -> Tensor:
    """Views the memory as integers of the same size, since torch can't index fp8."""
    return tensor.view(_BITS[tensor.element_size()])


def _check_paged(
    op: str,
    new: Mapping[str, Tensor],
    caches: Mapping[str, Tensor],
    slots: Mapping[str, Tensor],
    dtypes: tuple[torch.dtype, ...],
    slot_dtypes: tuple[torch.dtype, ...],
    *,
    tiled: bool = False,
) -> None:
    """Checks tokens, their caches (under the same labels) and their slots."""
    ((slot_label, slot),) = slots.items()
    named_caches = {f"{label}_cache": cache for label, cache in caches.items()}
    _check_devices(op, {**new, **named_caches, **slots})
    _check_dtype(op, slot_label, slot, slot_dtypes)
    key, key_cache = new["key"], caches["key"]
    _check_dtype(op, "key", key, dtypes)
    for label, tensor in {**new, **named_caches}.items():
        _check_dtype(op, label, tensor, (key.dtype,))
        dim = 4 if label in named_caches else 3
        if tensor.dim() != dim:
            _refuse(op, f"{label} has {dim} dimensions, got {list(tensor.shape)}")
    blocks, block_size = key_cache.shape[0], key_cache.shape[2 if tiled else 1]
    _check_shape(op, slot_label, slot, [key.shape[0]])
    for label, tensor in new.items():
        _check_shape(op, label, tensor, [*key.shape[:2], tensor.shape[2]])
        cache = caches[label]
        if tiled:
            last = _NZ_BYTES // key.element_size()
            size = math.prod(tensor.shape[1:])
            shape = [blocks, size // last, block_size, last]
            if tensor.shape[2] % last:
                _refuse(op, f"{label}'s head_dim {tensor.shape[2]} is no multiple of {last}")
        else:
            shape = [blocks, block_size, *tensor.shape[1:]]
        _check_shape(op, f"{label}_cache", cache, shape)
        if not cache.is_contiguous():
            _refuse(op, f"{label}_cache must be contiguous, has strides {cache.stride()}")


def _check_devices(op: str, tensors: Mapping[str, Tensor]) -> None:
    devices = {label: tensor.device for label, tensor in tensors.items()}
    if len(set(devices.values())) != 1 or next(iter(devices.values())).type != _backend():
        found = ", ".join(f"{label} on {device}" for label, device in devices.items())
        _refuse(op, f"all tensors must be on one {_backend()} device, got {found}")


def _check_dtype(op: str, label: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        _refuse(op, f"{label} is {_names(dtypes)}, got {_name(tensor.dtype)}")


def _check_shape(op: str, label: str, tensor: Tensor, shape: list[int]) -> None:
    if list(tensor.shape) != shape:
        _refuse(op, f"{label} must be {shape} by the other arguments, got {list(tensor.shape)}")


def _refuse(op: str, why: str) -> NoReturn:
    raise RuntimeError(f"torch_npu.{op}: {why}")


def _backend() -> str:
    name: str = torch._C._get_privateuse1_backend_name()
    return name


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(_name(dtype) for dtype in dtypes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
