"""What decides the bytes of KV under vLLM: other weights at the same path have another name."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from kvtide.device import CPUDevice
from kvtide.errors import UsageError
from kvtide.plugin import package
from kvtide.plugin.versions import installed_version
from kvtide.plugin.vllm import identity
from kvtide.plugin.vllm.groups import BlockGroup
from kvtide.plugin.vllm.identity import namespace_of
from kvtide.plugin.vllm.settings import OffloadSettings
from kvtide.tier import Namespace
from kvtide.tier.namespace import SALT
from support.fake_vllm import VllmConfig, config_for


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with weights."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


@pytest.fixture(autouse=True)
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions of packages that may be installed here or not. Tests may change them."""
    found = {"vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.19.0", "builtins": ""}

    def installed(name: str) -> str:
        return found[name] if name in found else installed_version(name)

    for module in (package, identity):
        monkeypatch.setattr(module, "installed_version", installed)
    return found


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
    return namespace_of(config, settings, layouts, object(), is_durable=True, started_s=started_s)


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
        {"mamba_cache_dtype": "float16"},
        {"mamba_ssm_cache_dtype": "float16"},
        {"cp_kv_cache_interleave_size": 4},
        {"model_impl": "transformers"},
        {"a_new_option": 1},
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


@pytest.mark.parametrize("changed", [{"num_gpu_blocks": 200}, {"_private": True}])
def test_how_many_blocks_there_are_decides_no_byte(changed: dict[str, Any], model: Path) -> None:
    """It may be another number at each start."""
    assert named(config_for(model)) == named(config_for(model, **changed))


def blocks(*shape: int, dtype: torch.dtype = torch.bfloat16, count: int = 10) -> torch.Tensor:
    """Blocks of that shape."""
    return torch.zeros(count, *shape, dtype=dtype)


@pytest.mark.parametrize(
    "others",
    [
        [blocks(4, 8), blocks(4, 8, dtype=torch.float16)],
        [blocks(4, 8, dtype=torch.float16), blocks(4, 8)],
        [blocks(4, 8), blocks(8, 4)],
        [blocks(4, 8), (blocks(4, 8), blocks(3, dtype=torch.float32))],
        [blocks(4, 8), [blocks(4, 8), blocks(3, dtype=torch.int32)]],
        [blocks(4, 8)],
    ],
)
def test_other_dtypes_or_shapes_of_a_layers_tensors_make_another_namespace(
    others: list[object], model: Path
) -> None:
    """Whatever option changed them: two bytes of a dtype aren't two of another."""

    def of(*caches: object) -> Namespace:
        layers = {
            f"layer {number}": SimpleNamespace(kv_cache=cache)
            for number, cache in enumerate(caches)
        }
        return named(config_for(model, static_forward_context=layers))

    usual = of(blocks(4, 8), blocks(4, 8))
    assert usual == of(blocks(4, 8, count=20), blocks(4, 8, count=20))
    assert usual != of(*others)


def test_each_layer_has_its_own_dtype(model: Path) -> None:
    """An option may give one layer what another had."""
    caches = [blocks(4, 8), blocks(4, 8, dtype=torch.float16)]
    found = [
        named(
            config_for(
                model,
                static_forward_context={
                    name: SimpleNamespace(kv_cache=cache)
                    for name, cache in zip(names, caches, strict=True)
                },
            )
        )
        for names in (("layer 0", "layer 1"), ("layer 1", "layer 0"))
    ]
    assert found[0] != found[1]


class Attention:
    """A layer."""

    backend = "Flash"

    def get_attn_backend(self) -> type:
        """Its backend."""
        return type(self.backend, (), {})


class OtherAttention(Attention): ...


class AttentionOfOtherKernels(Attention):
    backend = "Triton"


AttentionOfOtherKernels.__name__ = "Attention"


@pytest.mark.parametrize("other", [OtherAttention, AttentionOfOtherKernels])
def test_another_kind_of_layer_or_other_kernels_make_another_namespace(
    other: type[Attention], model: Path
) -> None:
    """Each orders a block's bytes as it likes."""
    usual, changed = (
        named(config_for(model, static_forward_context={"layer": kind()}))
        for kind in (Attention, other)
    )
    assert usual != changed


@pytest.mark.parametrize("name", ["vllm", "torch", "transformers"])
def test_another_version_makes_another_namespace(
    name: str, model: Path, versions: dict[str, str]
) -> None:
    """Its code computes KV; transformers' does where vLLM has none for a model."""
    before = named(config_for(model))
    versions[name] += ".1"

    assert before != named(config_for(model))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (platform, "machine"),
        (torch.backends.cpu, "get_cpu_capability"),
        (torch.cpu, "_is_amx_tile_supported"),
    ],
)
def test_another_processor_makes_another_namespace(
    module: ModuleType, name: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's kernels for CPUs order a block's bytes by what the processor can do."""
    found = set()
    for answer in ("", "another"):
        monkeypatch.setattr(module, name, lambda answer=answer: answer)
        found.add(named(config_for(model)).engine)
    assert 2 == len(found)


def test_layers_with_room_for_adapters_make_another_namespace(model: Path) -> None:
    """They have kernels of their own."""
    assert named(config_for(model)) != named(config_for(model, lora_config=object()))


@pytest.mark.parametrize("seed", [0, 1])
def test_random_weights_count_by_their_seed(seed: int, model: Path) -> None:
    """No file has them."""
    random = named(config_for(model, load_format="dummy", seed=seed))

    assert f"dummy {seed}" == random.weights


def test_what_the_caller_knows_beside_decides_too_and_texts_dont_run_into_each_other(
    model: Path,
) -> None:
    """The names of each group's layers, of which the layouts say nothing."""

    def of(layouts: Sequence[str], beside: Sequence[str]) -> Namespace:
        return namespace_of(
            config_for(model), OffloadSettings(), layouts, object(), is_durable=False, beside=beside
        )

    found = [
        of(["a", "bc"], []),
        of(["ab", "c"], []),
        of(["abc"], []),
        of(["a", "bc"], ["a", "bc"]),
        of(["a", "bc"], ["ab", "c"]),
    ]
    assert len(found) == len({*found})


@pytest.mark.parametrize(
    ("algorithm", "seed", "warned"), [("xxhash", "", 1), ("xxhash_cbor", "7", 0), ("sha256", "", 0)]
)
def test_keys_that_change_with_each_process_are_told(
    algorithm: str, seed: str, warned: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk would fill, and nothing on it would ever be found."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    said: list[str] = []
    monkeypatch.setattr(identity.logger, "warning", lambda text, *_: said.append(text))
    named(config_for(model, prefix_caching_hash_algo=algorithm))

    assert warned == len(said)


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
    with pytest.raises(
        UsageError, match="was changed after this server was started; start vLLM again"
    ):
        named(config_for(model), started_s=time.time() - 60)


def test_the_same_weights_elsewhere_are_the_same(model: Path, tmp_path: Path) -> None:
    """A path decides nothing."""
    before = named(config_for(model))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").write_bytes(b"weights")
    (elsewhere / "notes.txt").write_text("no weights")

    assert before == named(config_for(elsewhere))


@pytest.mark.parametrize(
    "name", ["modeling_own.py", "parts/norm.py", "config.json", "hf_quant_config.json"]
)
def test_new_code_or_another_file_of_json_beside_old_weights_makes_other_kv(
    name: str, model: Path
) -> None:
    """vLLM reads such files itself, and a model's own code computes its KV."""
    path = model / name
    path.parent.mkdir(exist_ok=True)
    found = []
    for text in ("bits = 8", "bits = 4"):
        path.write_text(text)
        found.append(named(config_for(model)).weights)
    path.unlink()

    assert 3 == len({*found, named(config_for(model)).weights})


def test_a_folder_with_code_and_no_weights_is_refused(tmp_path: Path) -> None:
    """Code alone makes no KV."""
    (tmp_path / "modeling_own.py").write_text("")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="no files of weights"):
        named(config_for(tmp_path))


@pytest.mark.parametrize(
    ("changed", "count"),
    [
        ({"auto_map": {"AutoModel": "org/code--modeling.Model"}}, 2),
        ({"auto_map": {"AutoModel": ["org/code--modeling.Model", None]}}, 2),
        ({"auto_map": {"AutoModel": "org/absent--modeling.Model"}}, 1),
        ({"auto_map": {"AutoModel": "modeling.Model"}}, 1),
        ({"auto_map": {"AutoModel": "org/code--modeling.Model"}, "code_revision": "b" * 40}, 1),
        ({"auto_map": {"AutoModel": "org/code--modeling.Model"}, "trust_remote_code": False}, 1),
        ({"model": "org/code"}, 2),
        ({"model": "org/code", "revision": "a" * 40}, 1),
    ],
)
def test_code_from_elsewhere_counts_where_it_is_run(
    changed: dict[str, Any], count: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the hub's cache, also where vLLM has put the weights into another folder."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(model / "hub"))
    code = model / "hub" / "models--org--code"
    for number in "ab":
        (code / "snapshots" / (number * 40)).mkdir(parents=True)
        (code / "snapshots" / (number * 40) / "modeling.py").write_text(number)
    weights = model / "models--org--code" / "snapshots"
    for number in "ab":
        (weights / (number * 40)).mkdir(parents=True)
        (weights / (number * 40) / "model.safetensors").write_bytes(b"weights")
    (weights.parent / "refs").mkdir()
    (weights.parent / "refs" / "main").write_text("a" * 40)
    more = {"trust_remote_code": True, "download_dir": str(model), **changed}
    config = config_for(Path(more.pop("model", model)), **more)
    (code / "refs").mkdir()
    found = set()
    for number in "ab":
        (code / "refs" / "main").write_text(number * 40)
        found.add(named(config).weights)

    assert count == len(found)


def test_a_model_of_the_hub_is_known_by_the_files_of_its_revision(tmp_path: Path) -> None:
    """vLLM has its name alone, and has put its files into a cache while it started."""
    cache = tmp_path / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    for revision in ("a" * 40, "b" * 40):
        blob = cache / "blobs" / hashlib.sha256(revision.encode()).hexdigest()
        blob.write_bytes(revision.encode())
        (cache / "snapshots" / revision).mkdir(parents=True)
        (cache / "snapshots" / revision / "model.safetensors").symlink_to(blob)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    hub = config_for(Path("org/name"), download_dir=str(tmp_path))
    pinned = config_for(Path("org/name"), download_dir=str(tmp_path), revision="b" * 40)
    offline = config_for(cache / "snapshots" / ("b" * 40))

    found, other, again = (named(config, started_s=0).weights for config in (hub, pinned, offline))
    assert found != other == again


def test_a_platform_of_another_package_counts_with_its_version(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a package has kernels of its own, in which a block's bytes may have another order."""

    def engine(module: str, version: str = "") -> str:
        platform = type("Platform", (), {"__module__": module})()
        with monkeypatch.context() as patches:
            loaded = ModuleType(module.partition(".")[0])
            patches.setattr(loaded, "__version__", version, raising=False)
            patches.setitem(sys.modules, loaded.__name__, loaded)
            return namespace_of(
                config_for(model), OffloadSettings(), [], platform, is_durable=False
            ).engine

    vendor = [("vendor_of_npus.platform", number) for number in ("1.0", "1.1")]
    engines = [engine(*each) for each in (*vendor, ("vllm.platforms.cpu", "1"))]
    assert 3 == len({*engines})
    assert engines[0] == engine(*vendor[0])


def test_a_model_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    """Another loader of vLLM's may have it from elsewhere."""
    with pytest.raises(UsageError, match=r"org/name isn't a folder.*name their revision"):
        named(config_for(Path("org/name"), download_dir=str(tmp_path)))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """Unless the operator names them, or nothing outlives the process."""
    with pytest.raises(UsageError, match="no files of weights"):
        named(config_for(tmp_path))
    assert "named r1" == named(config_for(tmp_path), OffloadSettings(weights="r1")).weights
    found = namespace_of(config_for(tmp_path), OffloadSettings(), [], object(), is_durable=False)
    assert "" == found.weights


def test_a_tenants_salt_changes_every_key(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who doesn't have it finds nothing."""
    before = named(config_for(model)).key_of("a")
    monkeypatch.setenv(SALT, "secret")

    assert before != named(config_for(model)).key_of("a")
