"""The deny lists: every line takes effect, and no list refuses what KV movement needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import simnpu
import torch
from simnpu import _C, refusals
from torch import Tensor

ASCEND = refusals.load("ascend")
Sample = Callable[[torch.dtype], Any]
ops = torch.ops.aten


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    """Makes small numbers on the device, [*shape]; (3, 2) if no shape is given."""
    sizes = shape or (3, 2)
    return (torch.arange(torch.Size(sizes).numel()) % 3).view(sizes).to(dtype).to("npu")


def index() -> Tensor:
    """Selects two of three rows."""
    return torch.tensor([0, 2]).to("npu")


# Calls of each operator on the lists, by its name without an overload, for a dtype.
SAMPLES: dict[str, Sample] = {
    "aten::index": lambda dtype: some(dtype)[index()],
    "aten::_index_put_impl_": lambda dtype: ops.index_put_(some(dtype), [index()], some(dtype)[:2]),
    "aten::index_select": lambda dtype: some(dtype).index_select(0, index()),
    "aten::index_add": lambda dtype: some(dtype).index_add(0, index(), some(dtype)[:2]),
    "aten::gather": lambda dtype: some(dtype).gather(0, some(torch.int64, 1, 2)),
    "aten::cat": lambda dtype: torch.cat([some(dtype), some(dtype)]),
    "aten::mm": lambda dtype: some(dtype) @ some(dtype, 2, 3),
    "aten::bmm": lambda dtype: torch.bmm(some(dtype, 1, 3, 2), some(dtype, 1, 2, 3)),
    "aten::addmm": lambda dtype: torch.addmm(some(dtype, 3, 3), some(dtype), some(dtype, 2, 3)),
    "aten::masked_fill_": lambda dtype: some(dtype).masked_fill_(some(torch.bool), 1),
    "aten::abs": lambda dtype: some(dtype).abs(),
    "aten::roll": lambda dtype: some(dtype).roll(1, 0),
    "aten::logaddexp": lambda dtype: torch.logaddexp(some(dtype), some(dtype)),
    "aten::logaddexp2": lambda dtype: torch.logaddexp2(some(dtype), some(dtype)),
}


@pytest.fixture
def deny() -> Iterator[Callable[..., None]]:
    """deny(*refusals) sets other refusals for the test, and deny() sets none."""

    def deny(*lines: refusals.Refusal) -> None:
        _C.set_refusals([(line.op, dtype, line.reason) for line in lines for dtype in line.dtypes])

    yield deny
    deny(*ASCEND)


def name_of(line: refusals.Refusal) -> str:
    """Returns the operator's name without an overload."""
    return line.op.split(".")[0]


def test_every_refused_operator_has_a_sample() -> None:
    """A new operator on a list needs a call here, or its line would not be tested."""
    assert sorted(SAMPLES) == sorted({name_of(line) for line in ASCEND})


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("aten::index", "float8_e4m3fn"),
        ("aten::_index_put_impl_", "float8_e4m3fn"),
        ("aten::index", "complex64"),
        ("aten::cat", "complex128"),
        ("aten::cat", "uint64"),
        ("aten::mm", "float64"),
        ("aten::mm", "int64"),
    ],
)
def test_known_pitfalls_are_on_the_list(op: str, dtype: str) -> None:
    """The other tests take their cases from the list, so these known cases are named here."""
    assert any(op == line.op and dtype in line.dtypes for line in ASCEND)


CASES = [
    pytest.param(line, dtype, id=f"{name_of(line)}-{dtype}")
    for line in ASCEND
    for dtype in line.dtypes
]


@pytest.mark.parametrize(("line", "dtype"), CASES)
def test_a_refused_call_raises_at_once_with_the_reason(line: refusals.Refusal, dtype: str) -> None:
    """The error comes at the call without a synchronisation, and says how to turn it off."""
    message = rf"^simnpu: {name_of(line)}\S* refuses {dtype} as .*; install\(refuse=None\)"
    with pytest.raises(RuntimeError, match=message) as caught:
        SAMPLES[name_of(line)](getattr(torch, dtype))
    assert line.reason in str(caught.value)


@pytest.mark.parametrize(("line", "dtype"), CASES)
def test_without_its_line_a_refused_call_is_accepted(
    line: refusals.Refusal, dtype: str, deny: Callable[..., None]
) -> None:
    """Without this line the call works, so no other line refuses it."""
    deny(*(other for other in ASCEND if other != line))
    SAMPLES[name_of(line)](getattr(torch, dtype))
    torch.accelerator.synchronize()


@pytest.mark.parametrize("op", SAMPLES)
def test_dtypes_that_no_line_names_are_accepted(op: str) -> None:
    """bfloat16 is accepted by every operator on the list."""
    SAMPLES[op](torch.bfloat16)
    torch.accelerator.synchronize()


MOVED = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128),
]


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_moving_rows_is_not_refused(dtype: torch.dtype) -> None:
    """Rows are selected into a buffer and copied back, in every dtype that a row is viewed as."""
    rows, buffer = some(dtype), some(dtype)[:2].clone()
    torch.index_select(rows, 0, index(), out=buffer)
    rows.index_copy_(0, index(), buffer)
    assert torch.equal(some(dtype).cpu(), rows.cpu())


@pytest.mark.parametrize("dtype", [d for d in MOVED if not d.is_complex], ids=str)
def test_indexing_by_pools_is_not_refused(dtype: torch.dtype) -> None:
    """Advanced indexing reads and writes rows of every dtype but complex numbers and fp8."""
    rows = some(dtype)
    rows[index()] = rows[index()]
    assert torch.equal(some(dtype).cpu(), rows.cpu())


def test_a_star_stands_for_every_dtype(deny: Callable[..., None]) -> None:
    """A line with `*` refuses the operator for every dtype."""
    deny(refusals.Refusal("aten::roll", ("*",), "a test says so", "here"))
    for dtype in (torch.float64, torch.int32, torch.bfloat16):
        with pytest.raises(RuntimeError, match="aten::roll refuses every dtype as a test says so"):
            some(dtype).roll(1, 0)


def test_an_overload_is_refused_alone(deny: Callable[..., None]) -> None:
    """`aten::masked_fill_.Tensor` doesn't refuse `aten::masked_fill_.Scalar`."""
    deny(refusals.Refusal("aten::masked_fill_.Tensor", ("*",), "a test says so", "here"))
    mask = some(torch.bool)
    some(torch.float32).masked_fill_(mask, 1.0)
    with pytest.raises(RuntimeError, match=r"masked_fill_\.Tensor refuses"):
        some(torch.float32).masked_fill_(mask, some(torch.float32, 1)[0])


def test_the_sources_are_given_in_full() -> None:
    """Each source names a repository and a place in it."""
    for line in ASCEND:
        repository, _, rest = line.source.partition(" ")
        assert repository.startswith("github.com/"), line
        assert "/" in rest or rest.startswith("issue "), line


GOOD = {
    "op": '"aten::abs"',
    "dtypes": '["float64"]',
    "reason": '"it does"',
    "source": '"here"',
}


def toml(**changes: str | None) -> str:
    """Returns a valid refusal with changes; None leaves a field out."""
    fields = {**GOOD, **changes}
    lines = [f"{field} = {value}" for field, value in fields.items() if value is not None]
    return "\n".join(["[[refusal]]", *lines])


def test_a_valid_list_is_read_in_order() -> None:
    """Fields and order are those of the file."""
    text = toml() + "\n" + toml(op='"aten::index.Tensor"', dtypes='["*"]')
    expected = (
        refusals.Refusal("aten::abs", ("float64",), "it does", "here"),
        refusals.Refusal("aten::index.Tensor", ("*",), "it does", "here"),
    )
    assert expected == refusals.parse(text, "test.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[refusal", "test.toml: not TOML"),
        ("", r"\[\[refusal\]\] tables and nothing else, found \[\]"),
        ("refusal = 3", r"\[\[refusal\]\] tables and nothing else, found \['refusal'\]"),
        ("[other]", r"\[\[refusal\]\] tables and nothing else, found \['other'\]"),
        (toml(reason=None), r"refusal 1: .* missing: \['reason'\], unknown: \[\]"),
        (toml(source='""'), r"refusal 1: .* missing: \['source'\], unknown: \[\]"),
        (toml(dtypes="[]"), r"refusal 1: .* missing: \['dtypes'\], unknown: \[\]"),
        (toml(colour='"red"'), r"refusal 1: .* missing: \[\], unknown: \['colour'\]"),
        (toml(dtypes='"float64"'), "dtypes is a list of names, got 'float64'"),
        (toml(dtypes="[64]"), r"dtypes is a list of names, got \[64\]"),
        (toml(dtypes='["float65"]'), r"\(aten::abs\): torch has no dtype 'float65'"),
        (toml(dtypes='["Tensor"]'), "torch has no dtype 'Tensor'"),
        (toml(dtypes='["float64", "*"]'), r"torch has no dtype '\*'; '\*' stands alone"),
        (toml(reason="3"), "reason is a string, got 3"),
        (toml(op='"abs"'), "'abs' is no operator's name; write it as aten::index.Tensor"),
        (toml(op='"aten::nosuch"'), "torch .* has no operator 'aten::nosuch'"),
        (toml(op='"aten::abs.Foo"'), "aten::abs has no overload 'Foo', it has default, out"),
        (toml() + "\n" + toml(op='"abs"'), "test.toml, refusal 2: 'abs'"),
    ],
)
def test_an_invalid_list_is_refused_with_the_place(text: str, message: str) -> None:
    """The error names the line that is wrong, and what it should be."""
    with pytest.raises(ValueError, match=message):
        refusals.parse(text, "test.toml")


@pytest.mark.parametrize("name", ["nosuch", "../simnpu/ascend", ""])
def test_an_unknown_list_is_refused_with_the_known_ones(name: str) -> None:
    """Lists have names, not paths."""
    with pytest.raises(ValueError, match=r"no deny list named .*; there are: ascend"):
        refusals.load(name)


def test_the_package_exports_refusal() -> None:
    """`simnpu.Refusal` is the class of a deny list's lines."""
    assert simnpu.Refusal is refusals.Refusal
