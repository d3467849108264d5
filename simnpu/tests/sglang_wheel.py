"""SGLang 0.5.23's NPU pools, from its own wheel: real code for simnpu to run.

The wheel is fetched once into the user's cache folder and checked by its sha256. Nothing of it is
installed: `memory_pool_npu.py` and the classes of `memory_pool.py` that it derives from are
executed unmodified. Stand-ins replace the few other names that they import, so that neither
SGLang's dependencies nor its kernels are needed.
"""

from __future__ import annotations
import __future__

import abc
import ast
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Optional, Union

import numpy as np
import torch

WHEEL = "sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl"
SHA256 = "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937"
POOLS = "sglang/srt/hardware_backend/npu/memory_pool_npu.py"
_BASES = "sglang/srt/mem_cache/memory_pool.py"
_LAYOUT = "sglang/srt/layers/dcp/layout.py"
_BASE_NAMES = (
    *("KVWriteLoc", "unwrap_write_loc", "get_tensor_size_bytes"),
    *("KVCache", "MHATokenToKVPool", "MLATokenToKVPool"),
)


def cache_folder() -> Path:
    """Returns the folder that keeps the wheel between runs."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "simnpu"


def pip_download(folder: Path) -> None:
    """Makes pip download the wheel into `folder`, for any Python and machine."""
    command = [sys.executable, "-m", "pip", "download", "sglang==0.5.23", "--no-deps", "--quiet"]
    command += ["--only-binary", ":all:", "--platform", "manylinux_2_34_x86_64"]
    command += ["--implementation", "cp", "--python-version", "3.11", "--abi", "cp311"]
    result = subprocess.run(
        [*command, "--dest", str(folder)], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(f"pip ended with {result.returncode}: {result.stderr.strip()[-2000:]}")


def fetch(folder: Path, download: Callable[[Path], None] = pip_download) -> Path:
    """Returns the wheel's path in `folder`; downloads it if it is missing or damaged.

    Raises RuntimeError if that fails: these tests need it, and skipping them would hide that.
    """
    path = folder / WHEEL
    if path.exists() and _sha256(path) == SHA256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        try:
            download(Path(scratch))
            found = _sha256(Path(scratch) / WHEEL)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(
                f"the tests of SGLang's pools need {WHEEL} (sha256 {SHA256}), and downloading it "
                f"failed: {error}\nGo online once, or put the file into {folder}"
            ) from error
        if found != SHA256:
            raise RuntimeError(f"the downloaded {WHEEL} has sha256 {found}, expected {SHA256}")
        (Path(scratch) / WHEEL).replace(path)
    return path


def import_pools(wheel: Path) -> ModuleType:
    """Executes the NPU pools' module of `wheel`, under its own name in `sys.modules`.

    A module `torch_npu` must exist. The stand-ins stay in `sys.modules`, too, since the pools
    import at run time as well: the caller restores sys.modules afterwards.
    """
    with zipfile.ZipFile(wheel) as files:
        texts = {name: files.read(name).decode() for name in (POOLS, _BASES, _LAYOUT)}
    parallel = SimpleNamespace(attn_dcp_size=1, attn_dcp_rank=0)
    _stand_in("sglang.srt.constants", GPU_MEMORY_TYPE_KV_CACHE="kv_cache")
    _stand_in("sglang.srt.environ", envs=_Environment())
    _stand_in("sglang.srt.runtime_context", get_parallel=lambda: parallel)
    _stand_in("sglang.srt.utils", get_bool_env_var=_is_set)
    _stand_in("sglang.srt.utils.async_probe", maybe_detect_oob=lambda *_: None)
    _stand_in("sglang.srt.utils.common", is_npu=lambda: True)
    _stand_in(
        "sglang.srt.layers.attention.dsa.dsa_npu_indexer",
        create_npu_hadamard_128=lambda *_: None,  # for attention; no method that is tested reads it
    )
    _execute(texts[_LAYOUT], _LAYOUT)
    tree = ast.parse(texts[_BASES])
    chosen = [node for node in tree.body if getattr(node, "name", None) in _BASE_NAMES]
    _run(ast.Module(chosen, []), _BASES, _base_module())
    return _execute(texts[POOLS], POOLS)


def without_last_synchronise(module: ModuleType, method: FunctionType) -> FunctionType:
    """Returns `method`, of a class in `module`, without its last torch.npu.synchronize()."""
    tree = ast.parse(module.__dict__["__text__"])
    class_name, name = method.__qualname__.split(".")
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    (owner,) = (node for node in classes if node.name == class_name)
    functions = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
    (function,) = (node for node in functions if node.name == name)
    calls = [node for node in function.body if ast.unparse(node) == "torch.npu.synchronize()"]
    assert len(calls) == 2, f"{method.__qualname__} synchronises {len(calls)} times, not twice"
    function.body.remove(calls[-1])
    scope = ModuleType(module.__name__)
    scope.__dict__.update(module.__dict__)
    _run(ast.Module([function], []), POOLS, scope)
    changed = scope.__dict__[name]
    assert isinstance(changed, FunctionType)
    return changed


class _Environment:
    """SGLang's `envs`: every variable is a switch, which is off unless the environment sets it."""

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(get=lambda: _is_set(name))


def _is_set(name: str, default: str = "") -> bool:
    return os.environ.get(name, default).lower() in ("1", "true")


def _base_module() -> ModuleType:
    """Makes the module of the base classes, with the other names that they use."""
    saver = SimpleNamespace(region=lambda _: _Nothing())
    return _stand_in(
        "sglang.srt.mem_cache.memory_pool",
        abc=abc,
        np=np,
        torch=torch,
        dataclass=dataclass,
        Optional=Optional,
        Union=Union,
        GB=1 << 30,
        envs=_Environment(),
        logger=logging.getLogger("sglang"),
        _is_npu=True,
        _is_cuda=False,
        _is_hip=False,
        _use_aiter=False,
        current_platform=SimpleNamespace(is_cuda_alike=lambda: False),
        maybe_detect_oob=lambda *_: None,
        maybe_init_custom_mem_pool=lambda **_: (False, None, None),
        TorchMemorySaverAdapter=SimpleNamespace(create=lambda **_: saver),
        UnquantizedKVCacheMethod=object,
        # The NPU module derives two more pools from these; the tests don't use them.
        MHATokenToKOnlyPool=object,
        MiniMaxSparseKVPool=object,
    )


class _Nothing:
    """A context that does nothing."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _stand_in(name: str, **names: object) -> ModuleType:
    """Puts a module with these names into sys.modules, with the packages above it."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        module = sys.modules.setdefault(path, ModuleType(path))
        module.__dict__.setdefault("__path__", [])
    module.__dict__.update(names)
    return module


def _execute(text: str, path: str) -> ModuleType:
    module = _stand_in(path.removesuffix(".py").replace("/", "."), __text__=text)
    _run(ast.parse(text), path, module)
    return module


def _run(tree: ast.Module, path: str, module: ModuleType) -> None:
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, path, "exec", flags=flags, dont_inherit=True), module.__dict__)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
