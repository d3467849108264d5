from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvtide.arena import HostArena
from kvtide.device import CPUDevice
from kvtide.errors import LayoutError, SlotError
from kvtide.integers import shown
from kvtide.layout import GQA, Layout, Mapped, OfRequest, Plane
from kvtide.layout.gqa import GQA_HND
from kvtide.pool import Pool
from kvtide.tide import Tide
from support.lazy_device import LazyDevice
from support.pools import POOL_KINDS, fill, image_of, make_pool, rows_of, small_geometry
from support.values import NO_ROWS, ONES, name_of

Planes = dict[str, list[torch.Tensor]]


def engine_tensors() -> Planes:
    """Makes an engine's tensors for `small_geometry()` and 3 pages of 4 slots."""
    return {
        "k": [torch.zeros(12, 1, 6, dtype=torch.bfloat16) for _ in range(2)],
        "v": [torch.zeros(12, 1, 3, dtype=torch.bfloat16) for _ in range(2)],
    }


@pytest.mark.parametrize("kind", POOL_KINDS)
def test_a_pool_counts_its_slots(kind: str) -> None:
    """Created and adopted pools count pages, slots and bytes alike."""
    pool = make_pool(kind, small_geometry(), LazyDevice(), 3).pool
    assert (4, 3, 12) == (pool.page_size, pool.page_count, pool.slot_count)
    assert 12 * 36 == pool.size_bytes


@pytest.mark.parametrize("kind", POOL_KINDS)
def test_a_plane_is_a_tensor_by_slots(kind: str) -> None:
    """Each layer is [slot, *row_shape] of the declared dtype; writing to it writes the pool."""
    case = make_pool(kind, small_geometry(), LazyDevice(), 3)
    for name, width in (("k", 6), ("v", 3)):
        for layer in range(2):
            plane = case.pool.plane(name, layer)
            assert (12, 1, width) == tuple(plane.shape)
            assert torch.bfloat16 == plane.dtype
            plane[11] = 1
    assert 2 * 9 * 2 == sum(int(memory.astype(bool).sum()) for memory in case.memory)


@pytest.mark.parametrize("kind", POOL_KINDS)
def test_layer_rows_say_where_each_slot_is(kind: str) -> None:
    """Row `layer_rows[i] + slot` of a buffer has the slot's bytes, in order of plane and layer."""
    case = make_pool(kind, small_geometry(), LazyDevice(), 3)
    fill(case, 1)
    pool = case.pool
    layers = []
    for buffer, rows in zip(pool.buffers, pool.buffer_rows, strict=True):
        table = buffer.numpy()[: buffer.numel()].reshape(-1, rows.row_bytes)
        layers += [table[first : first + 12] for first in rows.layer_rows]
    image = image_of(pool)
    assert len(image) == len(layers)
    for expected, layer in zip(image.values(), layers, strict=True):
        assert expected.tolist() == layer.tolist()


def test_a_created_pool_is_zeroed() -> None:
    """A page that nobody wrote holds zeros, not old bytes."""
    pool = Pool.create(small_geometry(), LazyDevice(), page_count=2)
    assert all(not rows.any() for rows in image_of(pool).values())


@pytest.mark.parametrize("page_count", [0, -1])
def test_a_pool_below_one_page_is_refused(page_count: int) -> None:
    """The message has the count."""
    with pytest.raises(
        LayoutError, match=f"page_count must be an integer from 1, not {page_count}"
    ):
        Pool.create(small_geometry(), LazyDevice(), page_count=page_count)


def test_adopting_copies_nothing() -> None:
    """The pool's planes are the memory of the engine's tensors."""
    tensors = engine_tensors()
    pool = Pool.adopt(small_geometry(), LazyDevice(), tensors)
    tensors["v"][1][5, 0, 2] = 3
    assert 3 == pool.plane("v", 1)[5, 0, 2]
    assert [t.data_ptr() for t in (*tensors["k"], *tensors["v"])] == [
        buffer.data_ptr() for buffer in pool.buffers
    ]


def test_an_adopted_pool_may_end_within_a_page() -> None:
    """Engines reserve slots; all slots can be moved, but only whole pages are counted."""
    tensors = {
        name: [torch.zeros(13, *tensor.shape[1:], dtype=tensor.dtype) for tensor in layers]
        for name, layers in engine_tensors().items()
    }
    pool = Pool.adopt(small_geometry(), LazyDevice(), tensors)
    assert (13, 3) == (pool.slot_count, pool.page_count)
    assert (13, 12) == rows_of(pool, "k", 0).shape


ORDERS_OF_ONE_HEAD = {
    "slots": (12, 1, 6),
    "pages of tokens": (3, 4, 1, 6),
    "pages of heads": (3, 1, 4, 6),
}


@pytest.mark.parametrize("order", ORDERS_OF_ONE_HEAD)
@pytest.mark.parametrize("layout", [GQA, GQA_HND], ids=lambda layout: layout.name)
def test_tensors_are_adopted_in_any_order_that_has_the_same_bytes(
    layout: Layout, order: str
) -> None:
    """With one head a token's bytes are together, whichever axis a layout names first."""
    sizes: dict[str, Any] = {"layer": 2, "head": 1, "head_dim": 6, "v_head_dim": 6}
    geometry = layout.bind(dtype="bfloat16", token=4, **sizes)
    shape = ORDERS_OF_ONE_HEAD[order]
    planes = {name: [torch.randn(shape).bfloat16() for _ in range(2)] for name in ("k", "v")}
    pool = Pool.adopt(geometry, LazyDevice(), planes)
    assert (12, 3) == (pool.slot_count, pool.page_count)
    for name, layers in planes.items():
        for layer, tensor in enumerate(layers):
            assert tensor.data_ptr() == pool.plane(name, layer).data_ptr()
            assert tensor.reshape(12, 1, 6).equal(pool.plane(name, layer))


@pytest.mark.parametrize("shape", [(12, 2, 6), (12, 1, 2, 6), (12, 2, 1, 6)])
def test_tensors_of_pages_of_one_token_are_adopted_in_any_order(shape: tuple[int, ...]) -> None:
    """With one token in a page, heads first and tokens first are the same."""
    geometry = GQA_HND.bind(dtype="float32", token=1, layer=1, head=2, head_dim=6, v_head_dim=6)
    planes = {name: [torch.randn(shape)] for name in ("k", "v")}
    pool = Pool.adopt(geometry, LazyDevice(), planes)
    assert planes["k"][0].view(12, 2, 6).equal(pool.plane("k", 0))


def test_pages_with_several_heads_first_have_no_token_rows() -> None:
    """With heads first a token's bytes are in several places, which doesn't fit tokens first."""
    planes = {name: [torch.zeros(3, 2, 4, 6)] for name in ("k", "v")}
    sizes: dict[str, Any] = {"layer": 1, "head": 2, "head_dim": 6, "v_head_dim": 6}
    pool = Pool.adopt(GQA_HND.bind(dtype="float32", token=4, **sizes), LazyDevice(), planes)
    assert (12, 3) == (pool.slot_count, len(pool.plane("k", 0)))
    with pytest.raises(LayoutError, match=r"shape \[3, 2, 4, 6\] is neither"):
        Pool.adopt(GQA.bind(dtype="float32", token=4, **sizes), LazyDevice(), planes)


def without_v(planes: Planes) -> None:
    """Removes a plane."""
    del planes["v"]


def with_scale(planes: Planes) -> None:
    """Adds a plane."""
    planes["scale"] = planes["k"]


def one_layer(planes: Planes) -> None:
    """Removes a layer."""
    planes["v"].pop()


def wrong_dtype(planes: Planes) -> None:
    """Gives a layer another dtype of equal width."""
    planes["k"][1] = planes["k"][1].to(torch.float16)


def wrong_width(planes: Planes) -> None:
    """Gives a layer the other plane's rows."""
    planes["v"][0] = planes["k"][0]


def wrong_page(planes: Planes) -> None:
    """Makes pages of 6 tokens, where 4 are declared."""
    planes["k"][0] = planes["k"][0].view(2, 6, 1, 6)


def heads_first(planes: Planes) -> None:
    """Spreads a token's bytes: every second element belongs to something else."""
    planes["k"][0] = torch.zeros(12, 1, 12, dtype=torch.bfloat16)[:, :, ::2]


def fewer_slots(planes: Planes) -> None:
    """Gives a layer fewer slots than the others have."""
    planes["v"][1] = planes["v"][1][:8]


def elsewhere(planes: Planes) -> None:
    """Moves a tensor to another device."""
    planes["k"][0] = planes["k"][0].to("meta")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_v, r"planes \['k'\] given, \['k', 'v'\] declared"),
        (with_scale, "'scale'"),
        (one_layer, "plane 'v': 1 tensors for 2 layers"),
        (wrong_dtype, "plane 'k', layer 1: dtype torch.float16, declared torch.bfloat16"),
        (wrong_width, r"plane 'v', layer 0: shape \[12, 1, 6\]"),
        (wrong_page, r"plane 'k', layer 0: shape \[2, 6, 1, 6\]"),
        (heads_first, r"plane 'k', layer 0: strides \(12, 12, 2\) leave gaps within a row"),
        (fewer_slots, r"plane 'v' has rows \[8, 12\]"),
        (elsewhere, "plane 'k', layer 0: on meta, the pool's device is 'cpu'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    spoil: Callable[[Planes], None], message: str
) -> None:
    """The error has the declared value, and nothing has moved."""
    tensors = engine_tensors()
    spoil(tensors)
    with pytest.raises(LayoutError, match=message):
        Pool.adopt(small_geometry(), LazyDevice(), tensors)


@pytest.mark.parametrize(("name", "layer"), [("latent", 0), ("k", -1), ("k", 2)])
def test_an_unknown_plane_is_refused(name: str, layer: int) -> None:
    """A negative layer is not counted from the end."""
    pool = Pool.create(small_geometry(), LazyDevice(), page_count=2)
    with pytest.raises(LayoutError, match="has no plane"):
        pool.plane(name, layer)


def test_tensors_that_share_memory_are_refused() -> None:
    """A restore of one layer would overwrite another layer."""
    planes = engine_tensors()
    planes["v"] = [planes["v"][0]] * len(planes["v"])
    with pytest.raises(LayoutError, match="share memory"):
        Pool.adopt(small_geometry(), LazyDevice(), planes)


def test_an_engine_may_promise_that_each_byte_has_only_one_owner(device: CPUDevice) -> None:
    """One buffer has rows of 12 bytes by one map and rows of 8 by another, which don't overlap."""
    layout = Layout(
        "shared",
        Plane("wide", "layer page token 12", rows=(Mapped("wide"),)),
        Plane("narrow", "layer page token 8", rows=(Mapped("narrow"),)),
    )
    buffer = torch.randint(0, 256, (96,), dtype=torch.uint8)
    planes = {"wide": [buffer.view(8, 12)], "narrow": [buffer.view(12, 8)]}
    maps = {"wide": np.array([0, 1, 2, 3]), "narrow": np.array([11, 10, 9, 8])}
    geometry = layout.bind(dtype="uint8", token=1, layer=1)
    pool = Pool.adopt(geometry, device, planes, maps=maps, slot_count=4, shares_memory=True)
    tide = Tide(pool, HostArena(device, limit_bytes=4096, block_bytes=256))
    before = buffer.clone()
    snapshot = tide.offload([0, 1])
    buffer.random_()
    poisoned = buffer.clone()
    tide.restore(snapshot, [3, 2])
    poisoned[36:48], poisoned[24:36] = before[0:12], before[12:24]
    poisoned[64:72], poisoned[72:80] = before[88:96], before[80:88]
    assert poisoned.equal(buffer)
    tide.discard(snapshot)


def test_tensors_without_slots_are_refused() -> None:
    """A pool needs at least one slot."""
    planes = {name: [tensor[:0] for tensor in layers] for name, layers in engine_tensors().items()}
    with pytest.raises(LayoutError, match=r"plane 'k' has rows \[0\]"):
        Pool.adopt(small_geometry(), LazyDevice(), planes)


MANY_ROWS = Layout(
    "many_rows",
    Plane("k", "layer page token 3", rows=(Mapped("moved"),)),
    Plane("state", "layer request 5", rows=(OfRequest("state"),)),
    Plane("tail", "layer request 2", rows=(OfRequest("tail"),)),
)


def test_a_row_must_exist_in_all_planes_of_its_group() -> None:
    """An engine's tensors of the same kind of rows may have different numbers of rows."""
    rules = (OfRequest(),)
    layout = Layout(
        "two", Plane("long", "layer request 5", rules), Plane("short", "layer request 2", rules)
    )
    planes = {"long": [torch.zeros(4, 5)], "short": [torch.zeros(3, 2)]}
    geometry = layout.bind(dtype="float32", layer=1)
    pool = Pool.adopt(geometry, LazyDevice(), planes, slot_count=4)
    assert [[2]] == [group.ids.tolist() for group in pool.rows_of(np.arange(1), 2)]
    with pytest.raises(SlotError, match="row 3, which isn't in 0 … 2"):
        pool.rows_of(np.arange(1), 3)


def test_keys_and_values_may_fill_each_others_gaps() -> None:
    """An engine may have them side by side in one row; if they share a byte, they are refused."""
    geometry = GQA.bind(dtype="uint8", layer=1, head=1, head_dim=6, v_head_dim=2)
    memory = torch.zeros(4, 1, 8, dtype=torch.uint8)
    planes = {"k": [memory[..., :6]], "v": [memory[..., 6:]]}
    assert 4 == Pool.adopt(geometry, LazyDevice(), planes).slot_count
    with pytest.raises(LayoutError, match="share memory"):
        Pool.adopt(geometry, LazyDevice(), {**planes, "v": [memory[..., 5:7]]})


def test_a_request_has_a_row_of_each_kind() -> None:
    """Planes of requests may number rows differently; a map may be a function."""
    geometry = MANY_ROWS.bind(dtype="float32", layer=1)
    planes = {"k": (9, 3), "state": (4, 5), "tail": (6, 2)}
    pool = Pool.adopt(
        geometry,
        LazyDevice(),
        {name: [torch.zeros(shape)] for name, shape in planes.items()},
        maps={"moved": lambda slots: slots + 4},
        slot_count=5,
    )
    rows = pool.rows_of(np.array([3, 1]), {"state": 2, "tail": 5})
    assert [[7, 5], [2], [5]] == [group.ids.tolist() for group in rows]
    with pytest.raises(SlotError, match=r"each tail; name it: request={'tail': ROW}"):
        pool.rows_of(np.array([3, 1]), {"state": 2})


# ---- invalid arguments --------------------------------------------------------------------------


def owning_pool() -> Pool:
    """Makes a pool of nine slots, with request rows of two kinds and a map that is a list."""
    planes = {"k": (9, 3), "state": (4, 5), "tail": (6, 2)}
    return Pool.adopt(
        MANY_ROWS.bind(dtype="float32", layer=1),
        LazyDevice(),
        {name: [torch.zeros(shape)] for name, shape in planes.items()},
        maps={"moved": list(range(9))},
        slot_count=9,
    )


@pytest.mark.parametrize("value", [None, *NO_ROWS], ids=name_of)
def test_an_invalid_row_of_a_request_is_refused(value: Any) -> None:
    """2.7 isn't row 2, True isn't row 1, and an empty list doesn't mean that nothing is saved."""
    pool = owning_pool()
    with pytest.raises(SlotError, match="request: its row of 'tail' must be an integer") as raised:
        pool.rows_of(np.array([3, 1]), {"state": 2, "tail": value})
    assert shown(value) in str(raised.value)


@pytest.mark.parametrize("value", ONES, ids=name_of)
def test_a_row_of_a_request_may_be_a_numpy_or_torch_integer(value: Any) -> None:
    """SGLang gives a tensor without axes."""
    rows = owning_pool().rows_of(np.array([3, 1]), {"state": value, "tail": 2})
    assert [[3, 1], [1], [2]] == [group.ids.tolist() for group in rows]


@pytest.mark.parametrize(
    "kinds",
    [
        ["state"],
        ["tail"],
        [],
        ["state", "tail", "other"],
        ["state", "tail", "moved"],
        ["request"],
        ["state", 3],
    ],
    ids=str,
)
def test_a_request_names_a_row_of_each_kind_and_no_other(kinds: list[Any]) -> None:
    """A name without a plane would be lost, and a map's name would stand in for the map."""
    with pytest.raises(SlotError, match=r"name it|give one integer for each"):
        owning_pool().rows_of(np.array([3, 1]), dict.fromkeys(kinds, 1))


def test_a_layout_without_request_rows_refuses_them() -> None:
    """A caller who names such a row believes that it is saved."""
    pool = Pool.create(small_geometry(), LazyDevice(), page_count=2)
    for request in (1, {"request": 1}, {"mamba": 1}, True, "1"):
        with pytest.raises(SlotError, match="this layout has no rows of requests"):
            pool.rows_of(np.array([3]), request)  # type: ignore[arg-type]
    assert [[3]] == [group.ids.tolist() for group in pool.rows_of(np.array([3]), {})]


WINDOWED = Layout("windowed", Plane("k", "layer page token 3", rows=(Mapped("moved", hole=0),)))


def windowed_tide(device: CPUDevice, held: Any) -> Tide:
    """Makes a tide of ten slots that a map leads to rows."""
    pool = Pool.create(
        WINDOWED.bind(dtype="uint8", layer=1), device, page_count=10,
        maps={"moved": held}, mapped_rows={"moved": 10},
    )  # fmt: skip
    pool.buffers[0].random_()
    return Tide(pool, HostArena(device, limit_bytes=4096, block_bytes=64))


def raising(error: BaseException) -> Any:
    """Makes a map that raises the error."""

    def fail(_: Any) -> Any:
        raise error

    return fail


BAD_MAPS: list[Any] = [
    lambda ids: ids[1:], lambda ids: [*ids, 1], lambda ids: ids[:, None], lambda ids: 3,
    lambda ids: ids.astype(float), lambda ids: np.full(ids.size, np.nan), lambda ids: None,
    lambda ids: [None] * ids.size, lambda ids: ids > 0, lambda ids: [True] * ids.size,
    lambda ids: ids.astype(str), lambda ids: np.full(ids.size, 2**64 - 1, np.uint64),
    lambda ids: [2**200] * ids.size, lambda ids: torch.from_numpy(ids)[1:],
    lambda ids: torch.from_numpy(ids).float(), lambda: None, raising(IndexError("of the map")),
    raising(KeyError("of the map")), raising(RuntimeError("of the map")),
    lambda ids: ids + 10, lambda ids: ids * 0 + 1, [*range(4)], np.arange(4), torch.arange(4),
]  # fmt: skip


@pytest.mark.parametrize("held", BAD_MAPS)
def test_a_map_without_a_row_for_each_slot_is_refused_by_name(device: CPUDevice, held: Any) -> None:
    """Offload and restore refuse it without any effect. NaN doesn't mean "no row"; 0 does here."""
    tide, whole = windowed_tide(device, held), windowed_tide(device, lambda ids: ids)
    before, snapshot = tide.pool.buffers[0].clone(), whole.offload([7, 5, 3])
    for refused in (lambda: tide.offload([7, 5, 3]), lambda: tide.start_offload([7, 5, 3]),
                    lambda: tide.restore(snapshot, [7, 5, 3])):  # fmt: skip
        with pytest.raises((SlotError, LayoutError), match=r"moved|row"):
            refused()
    assert 0 == tide.arena.used_bytes
    assert before.equal(tide.pool.buffers[0])
    whole.discard(snapshot)


def test_a_map_may_write_to_its_argument(device: CPUDevice) -> None:
    """The argument is a copy, so later planes get the slots unchanged."""

    def shift(ids: Any) -> Any:
        ids -= 1
        return ids

    rows = windowed_tide(device, shift).pool.rows_of(slots := np.array([7, 5]))
    assert ([6, 4], [7, 5]) == (rows[0].ids.tolist(), slots.tolist())


@pytest.mark.parametrize(
    "held",
    [None, 3, "moved", {0: 1}, [0.5], [True], np.zeros((2, 2), int), np.zeros(3), np.zeros(3, bool),
     torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64), torch.tensor(3), torch.ones(3).bool()],
    ids=name_of,
)  # fmt: skip
def test_an_invalid_map_is_refused_when_the_pool_is_made(device: CPUDevice, held: Any) -> None:
    """It is refused at the start, not under load."""
    with pytest.raises(LayoutError, match=r"map 'moved' is .*must be integers"):
        windowed_tide(device, held)


def test_a_map_and_a_request_row_need_different_names() -> None:
    """With equal names one would stand in for the other."""
    layout = Layout(
        "both", Plane("k", "layer request 3", rows=(OfRequest("moved"), Mapped("moved")))
    )
    geometry = layout.bind(dtype="uint8", layer=1)
    with pytest.raises(LayoutError, match=r"\['moved'\] are maps and requests' rows"):
        Pool.create(
            geometry, LazyDevice(), page_count=1, request_count=1, maps={"moved": [0]},
            mapped_rows={"moved": 1},
        )  # fmt: skip


@pytest.mark.parametrize("value", NO_ROWS, ids=name_of)
def test_an_invalid_count_makes_no_pool(value: Any) -> None:
    """The error names the count."""
    device, geometry = LazyDevice(), MANY_ROWS.bind(dtype="float32", layer=1)
    good: dict[str, Any] = {"page_count": 2, "request_count": 2, "mapped_rows": {"moved": 2}}
    for name, bad in (("page_count", value), ("request_count", value),
                      ("mapped_rows", {"moved": value})):  # fmt: skip
        with pytest.raises(LayoutError, match=f"'many_rows': {name}.* must be an integer from"):
            Pool.create(geometry, device, maps={"moved": [0, 1]}, **{**good, name: bad})
    planes = {
        name: [torch.zeros(2, plane)] for name, plane in (("k", 3), ("state", 5), ("tail", 2))
    }
    with pytest.raises(LayoutError, match="slot_count must be an integer from 1"):
        Pool.adopt(geometry, device, planes, maps={"moved": [0, 1]}, slot_count=value)


@pytest.mark.parametrize("value", NO_ROWS, ids=name_of)
def test_an_invalid_layer_has_no_plane(value: Any) -> None:
    """For example, True isn't layer 1."""
    with pytest.raises(LayoutError, match="has no plane 'k', layer"):
        Pool.create(small_geometry(), LazyDevice(), page_count=2).plane("k", value)


def test_an_engines_padding_slots_are_refused(device: CPUDevice) -> None:
    """An adopted pool states its padding slots; a created pool has none."""
    pool = Pool.adopt(small_geometry(), device, engine_tensors(), padding_slots=4)
    tide = Tide(pool, HostArena(device, limit_bytes=4096, block_bytes=256))
    snapshot = tide.offload([11, 4])
    for slots in ([11, 0], [3, 4]):
        with pytest.raises(SlotError, match="is padding"):
            tide.offload(slots)
        with pytest.raises(SlotError, match="is padding"):
            tide.restore(snapshot, slots)
    assert snapshot.size_bytes == tide.arena.used_bytes
    tide.discard(snapshot)
    assert 0 == Pool.create(small_geometry(), device, page_count=1).padding_slots


@pytest.mark.parametrize("value", NO_ROWS, ids=name_of)
def test_an_invalid_number_of_padding_slots_is_refused(value: Any) -> None:
    """It is checked like other counts."""
    with pytest.raises(LayoutError, match="padding_slots must be an integer"):
        Pool.adopt(small_geometry(), LazyDevice(), engine_tensors(), padding_slots=value)


@pytest.mark.parametrize(
    "given",
    [None, 3, [[1.0]], [None, None], [[1.0], [1.0]], np.zeros((12, 1, 6)), torch.tensor(1)],
    ids=name_of,
)
def test_invalid_tensors_are_not_adopted(given: Any) -> None:
    """The error names the plane."""
    with pytest.raises(LayoutError, match="plane 'k'"):
        Pool.adopt(small_geometry(), LazyDevice(), {**engine_tensors(), "k": given})
