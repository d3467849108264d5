"""Runs torch's own samples of its operators on the device and compares with the CPU.

This is a script, since an operator that crashes would end the tests. It prints one line of JSON for
each operator that differs, and names each on stderr before it runs.
"""

from __future__ import annotations

import itertools
import json
import sys
import unittest
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import simnpu
import torch

# torch's database of samples imports expecttest, but needs nothing of it here.
_expecttest = ModuleType("expecttest")
_expecttest.TestCase = unittest.TestCase  # type: ignore[attr-defined]
sys.modules.setdefault("expecttest", _expecttest)

from torch.testing._internal.common_methods_invocations import op_db

MOST_SAMPLES = 3
SEED = 11


def moved(value: Any, device: str) -> Any:
    """Moves the tensors in a value to `device`, and replaces the devices that it names."""
    if isinstance(value, torch.Tensor):
        return moved_tensor(value.detach(), device)
    if isinstance(value, list | tuple):
        parts = [moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: moved(part, device) for key, part in value.items()}
    return torch.device(device) if value in ("cpu", torch.device("cpu")) else value


def moved_tensor(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Moves the tensor with its whole storage, which some operators read beyond the elements."""
    if tensor.device.type == device or tensor.layout != torch.strided:
        return tensor
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    if device == "cpu" or tensor.is_conj() or tensor.is_neg() or count == 0:
        return tensor.to(device)
    storage = tensor.as_strided((count,), (1,), 0).to(device)
    return storage.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def name_of(info: Any) -> str:
    """Returns the operator's name with its variant, such as `linalg.norm.subgradients_at_zero`."""
    return ".".join(filter(None, (info.name, info.variant_test_name)))


def run(info: Any, sample: Any, device: str) -> Any:
    """Runs the operator on a device, and returns the result on the CPU."""
    torch.manual_seed(SEED)
    arguments = moved((sample.input, sample.args, sample.kwargs), device)
    result = info.op(arguments[0], *arguments[1], **arguments[2])
    if device != "cpu":
        torch.accelerator.synchronize()
    return moved(result, "cpu")


def samples(info: Any) -> Iterator[Any]:
    """Returns the first few samples."""
    every = info.sample_inputs("cpu", torch.float32, requires_grad=False)
    yield from itertools.islice(every, MOST_SAMPLES)


def sweep(left_out: set[str]) -> int:
    """Compares all operators but those left out, and returns how many were compared."""
    count = 0
    database: list[Any] = op_db
    for info in database:
        name = name_of(info)
        if name in left_out or torch.float32 not in info.supported_dtypes("cpu"):
            continue
        sys.stderr.write(f"{name}\n")
        sys.stderr.flush()
        count += 1
        try:
            for sample in samples(info):
                torch.testing.assert_close(
                    run(info, sample, "npu"), run(info, sample, "cpu"), equal_nan=True
                )
        except Exception as error:
            simnpu.reset()
            simnpu.set_schedule("random", seed=SEED)
            sys.stdout.write(json.dumps({"name": name, "error": str(error)[:400]}) + "\n")
    return count


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    simnpu.install("npu", refuse=None)
    simnpu.set_schedule("random", seed=SEED)
    sys.stdout.write(json.dumps({"compared": sweep(set(json.loads(sys.argv[1])))}) + "\n")
