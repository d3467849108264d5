"""The deny lists: which operators and dtypes a real device refuses, as data.

simnpu runs torch's CPU kernels, which accept more than an accelerator does. A list names calls
that the real device refuses, so that they fail here, too, at the call and with the reason.

A list is a TOML file of this package, such as `ascend.toml`, of tables like this one:

    [[refusal]]
    op = "aten::index_select"      # all overloads; "aten::index.Tensor" means only that one
    dtypes = ["float8_e4m3fn"]     # names of torch's dtypes; ["*"] for every dtype
    reason = "aclnnIndexSelect knows no fp8"
    source = "github.com/... path/to/file, and where in it"

A call is refused when any tensor among its arguments, lists of tensors included, has one of the
dtypes. To add a line:

1. Find a source that says that the device refuses the call: its maker's code, documents or issues.
   A list of supported types counts only if the device's code checks it. This is the `source`.
2. Name the operator that reaches the device: torch takes some operators apart before (`inverse`
   becomes `linalg_inv_ex`, `index_put_` becomes `_index_put_impl_`).
3. Let `reason` end the sentence "aten::x refuses float64 as ...".
4. Add a sample call of a new operator to `tests/test_refusals.py`, which fails without it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, final

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import torch

_FIELDS = ("op", "dtypes", "reason", "source")
_OP = re.compile(r"(\w+)::(\w+)(?:\.(\w+))?")


@final
@dataclass(frozen=True, slots=True)
class Refusal:
    """A line of a deny list: `op` with a tensor of any of `dtypes` is refused.

    `op` is an operator of torch's dispatcher; without an overload it means all of them. `dtypes`
    are names such as `float64`, or only `*`. `reason` completes "... is refused as". `source` says
    where the device's maker states it.
    """

    op: str
    dtypes: tuple[str, ...]
    reason: str
    source: str


def load(name: str) -> tuple[Refusal, ...]:
    """Returns the deny list `name`, such as `ascend`, in the order of its file.

    Raises ValueError if there is no such list, and for an invalid line: a field is missing, unknown
    or empty, this torch lacks the operator, or a dtype is unknown.
    """
    path = resources.files("simnpu") / f"{name}.toml"
    if not re.fullmatch(r"\w+", name) or not path.is_file():
        raise ValueError(f"no deny list named {name!r}; there are: {', '.join(_names())}")
    return parse(path.read_text(encoding="utf-8"), f"{name}.toml")


def parse(text: str, where: str) -> tuple[Refusal, ...]:
    """Parses a deny list from TOML; errors name it `where`. Raises as `load` does."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where}: not TOML: {error}") from error
    if set(tables) != {"refusal"} or not isinstance(tables["refusal"], list):
        raise ValueError(
            f"{where}: a deny list has [[refusal]] tables and nothing else, found {sorted(tables)}"
        )
    return tuple(
        _refusal(table, f"{where}, refusal {number}")
        for number, table in enumerate(tables["refusal"], start=1)
    )


def _names() -> list[str]:
    files = resources.files("simnpu").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def _refusal(table: Mapping[str, Any], where: str) -> Refusal:
    missing = [field for field in _FIELDS if not table.get(field)]
    unknown = [field for field in table if field not in _FIELDS]
    if missing or unknown:
        raise ValueError(
            f"{where}: a refusal has the fields {', '.join(_FIELDS)}, none empty; "
            f"missing: {missing}, unknown: {unknown}"
        )
    op, dtypes, reason, source = (table[field] for field in _FIELDS)
    if not isinstance(dtypes, list) or not all(isinstance(dtype, str) for dtype in dtypes):
        raise ValueError(f"{where} ({op}): dtypes is a list of names, got {dtypes!r}")
    for field, text in (("op", op), ("reason", reason), ("source", source)):
        if not isinstance(text, str):
            raise ValueError(f"{where}: {field} is a string, got {text!r}")
    _check_op(op, where)
    _check_dtypes(tuple(dtypes), f"{where} ({op})")
    return Refusal(op, tuple(dtypes), reason, source)


def _check_op(op: str, where: str) -> None:
    match = _OP.fullmatch(op)
    if match is None:
        raise ValueError(f"{where}: {op!r} is no operator's name; write it as aten::index.Tensor")
    namespace, name, overload = match.groups()
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        raise ValueError(f"{where}: torch {torch.__version__} has no operator {op!r}")
    if overload is not None and overload not in packet.overloads():
        raise ValueError(
            f"{where}: {namespace}::{name} has no overload {overload!r}, "
            f"it has {', '.join(packet.overloads())}"
        )


def _check_dtypes(dtypes: tuple[str, ...], where: str) -> None:
    if dtypes == ("*",):
        return
    for dtype in dtypes:
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            hint = "; '*' stands alone" if dtype == "*" else ""
            raise ValueError(f"{where}: torch has no dtype {dtype!r}{hint}")
