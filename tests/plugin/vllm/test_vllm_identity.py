"""What decides the bytes of KV under vLLM: other weights at the same path have another name."""

from __future__ import annotations

import json
import os
import time
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtide.device import CPUDevice
from kvtide.errors import UsageError
from kvtide.plugin.vllm.groups import BlockGroup
from kvtide.plugin.vllm.identity import namespace_of
from kvtide.plugin.vllm.settings import OffloadSettings
from kvtide.tier import Namespace
from kvtide.tier.namespace import SALT


class Fields:
    """An object with the fields that it is given."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class VllmConfig(Fields): ...


class ModelConfig(Fields): ...


class CacheConfig(Fields): ...


class ParallelConfig(Fields): ...


class LoadConfig(Fields): ...


class CompilationConfig(Fields): ...


def config_for(model: Path, **changed: Any) -> VllmConfig:
    """vLLM's configuration for a model in a folder; `changed` are fields of any part."""
    hf_config = {"layers": changed.pop("layers", 2), "_name_or_path": str(model)}
    values = {
        "model": str(model),
        "hf_config": SimpleNamespace(to_json_string=lambda use_diff: json.dumps(hf_config)),
        "dtype": torch.bfloat16,
        "quantization": None,
        "seed": 0,
        "max_model_len": 4096,
        "cache_dtype": "auto",
        "kv_cache_dtype_skip_layers": [],
        "prefix_caching_hash_algo": "sha256",
        "kv_cache_layout": "LBHNC",
        "rank": 0,
        "world_size": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "data_parallel_index": 0,
        "load_format": "auto",
        "model_loader_extra_config": {},
        "static_forward_context": {},
        **changed,
    }
    parts = {
        "model_config": ModelConfig(**values),
        "cache_config": CacheConfig(**values),
        "parallel_config": ParallelConfig(**values),
        "load_config": LoadConfig(**values),
        "compilation_config": CompilationConfig(**values),
    }
    return VllmConfig(**parts)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with weights."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def named(
    config: VllmConfig,
    settings: OffloadSettings = OffloadSettings(),  # noqa: B008 - it is frozen
    *,
    width: int = 32,
    started_s: float = inf,
) -> Namespace:
    """The namespace of blocks of `width` bytes that outlive the process."""
    device = CPUDevice(lanes=1)
    group = BlockGroup.adopt(0, [(torch.zeros(3, 40, dtype=torch.int8), width)], device)
    device.close()
    layouts = [group.pool.geometry.canonical]
    return namespace_of(config, settings, layouts, is_durable=True, started_s=started_s)


@pytest.mark.parametrize(
    "changed",
    [
        {"layers": 3},
        {"dtype": torch.float16},
        {"cache_dtype": "fp8"},
        {"quantization": "awq"},
        {"kv_cache_layout": "BLHNC"},
        {"prefix_caching_hash_algo": "xxhash"},
        {"rank": 1},
        {"world_size": 2, "tensor_parallel_size": 2},
        {"world_size": 2, "pipeline_parallel_size": 2},
        {"decode_context_parallel_size": 2},
        {"load_format": "dummy"},
        {"load_format": "pt"},
        {"model_loader_extra_config": {"qlora_adapter": "elsewhere"}},
        {"max_model_len": 8192},
        {"kv_cache_dtype_skip_layers": ["0"]},
        {"static_forward_context": {"layer": object()}},
    ],
)
def test_whatever_decides_a_byte_makes_another_namespace(
    changed: dict[str, Any], model: Path
) -> None:
    """Each field by itself does."""
    assert named(config_for(model)) == named(config_for(model))
    assert named(config_for(model)) != named(config_for(model, **changed))
    assert named(config_for(model)) != named(config_for(model), width=31)


def test_new_weights_at_an_old_path_are_others(model: Path) -> None:
    """A file of the same size and time isn't the same file."""
    before = named(config_for(model))
    about = (model / "model.safetensors").stat()
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    os.utime(model / "model.safetensors", ns=(about.st_atime_ns, about.st_mtime_ns))

    assert before.weights != named(config_for(model)).weights


def test_weights_that_came_while_vllm_started_are_refused(model: Path) -> None:
    """Nobody can tell whether vLLM read these, or those that were there before."""
    assert named(config_for(model), started_s=time.time() + 60).weights
    with pytest.raises(UsageError, match="changed after vLLM"):
        named(config_for(model), started_s=time.time() - 60)


def test_the_same_weights_elsewhere_are_the_same(model: Path, tmp_path: Path) -> None:
    """A path decides nothing."""
    before = named(config_for(model))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").write_bytes(b"weights")
    (elsewhere / "notes.txt").write_text("no weights")

    assert before == named(config_for(elsewhere))


def test_a_model_of_the_hub_is_known_by_its_revision(tmp_path: Path) -> None:
    """vLLM has its name alone, and has put its files into a cache."""
    cache = tmp_path / "models--org--name"
    for revision in ("a" * 40, "b" * 40):
        (cache / "snapshots" / revision).mkdir(parents=True)
        (cache / "snapshots" / revision / "model.safetensors").write_bytes(b"weights")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    hub = config_for(Path("org/name"), download_dir=str(tmp_path))
    pinned = config_for(Path("org/name"), download_dir=str(tmp_path), revision="b" * 40)

    assert ["revision " + "a" * 40, "revision " + "b" * 40] == [
        named(config).weights for config in (hub, pinned)
    ]


def test_a_model_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    """Another loader of vLLM's may have it from elsewhere."""
    with pytest.raises(UsageError, match="org/name: there are no files of weights"):
        named(config_for(Path("org/name"), download_dir=str(tmp_path)))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """Unless the operator names them, or nothing outlives the process."""
    with pytest.raises(UsageError, match="no files of weights"):
        named(config_for(tmp_path))
    assert "named r1" == named(config_for(tmp_path), OffloadSettings(weights="r1")).weights
    found = namespace_of(config_for(tmp_path), OffloadSettings(), [], is_durable=False)
    assert "" == found.weights


def test_a_tenants_salt_changes_every_key(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who doesn't have it finds nothing."""
    before = named(config_for(model)).key_of("a")
    monkeypatch.setenv(SALT, "secret")

    assert before != named(config_for(model)).key_of("a")
