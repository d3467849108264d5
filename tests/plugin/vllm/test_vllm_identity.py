"""What decides the bytes of KV under vLLM: other weights at the same path have another name."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
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
from kvtide.plugin.vllm.options import deciding
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
        {"quantization_config": {"bits": 4}},
        {"a_new_model_option": "set"},
        {"multimodal_config": SimpleNamespace(mm_processor_kwargs=None)},
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


@pytest.mark.parametrize(
    "changed", [{"num_gpu_blocks": 200}, {"_private": True}, {"hf_token": "a secret"}]
)
def test_how_many_blocks_there_are_decides_no_byte(changed: dict[str, Any], model: Path) -> None:
    """It may be another number at each start. Who may fetch the model decides none, either."""
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


def test_how_images_are_processed_makes_other_kv(model: Path) -> None:
    """A block's key has the image alone. Where processed images are kept decides nothing."""

    def engine(**options: Any) -> str:
        images = SimpleNamespace(**{"mm_processor_kwargs": None, **options})
        return named(config_for(model, multimodal_config=images)).engine

    assert engine() == engine(mm_processor_cache_gb=8)
    assert engine() != engine(mm_processor_kwargs={"max_pixels": 1024})
    assert engine(mm_processor_kwargs={"a": 1, "b": 2}) == engine(
        mm_processor_kwargs={"b": 2, "a": 1}
    )


class Mode(Enum):
    """An option with names."""

    ONE = "one"


@dataclass(frozen=True)
class Options:
    """Options of each kind that vLLM has."""

    names: frozenset[str] = frozenset("abcdefgh")
    sizes: tuple[int, ...] = (1, 2)
    mode: Mode = Mode.ONE
    kind: type = Path
    dtype: torch.dtype = torch.bfloat16
    named: Any = field(default_factory=lambda: {"b": None, "a": 1.5})


def test_equal_options_have_the_same_text_in_another_process() -> None:
    """Python orders a set anew in each process, and an object may be anywhere in memory."""
    program = (
        "from plugin.vllm.test_vllm_identity import Options; "
        "from kvtide.plugin.vllm.options import deciding; "
        "from types import SimpleNamespace; "
        "print(deciding(SimpleNamespace(options=Options()), ()))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    (text,) = texts
    assert {each.name for each in fields(Options)} == {*json.loads(text)["options"]}
    changed = [Options(sizes=(2, 1)), Options(names=frozenset("ab")), Options(named={"b": 0})]
    assert 4 == len({deciding(SimpleNamespace(options=each), ()) for each in (Options(), *changed)})


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "generation_config.json", "checkpoint-5/config.json"]
)
def test_files_of_json_that_decide_no_byte_of_kv_may_change(name: str, model: Path) -> None:
    """Tokens are in a block's key. A training may go on in a folder of the folder."""
    before = named(config_for(model))
    path = model / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    later = time.time() + 60
    os.utime(path, (later, later))

    assert before == named(config_for(model), started_s=time.time() + 30)


@pytest.mark.parametrize("name", ["modeling_own.py", "config.json", "model.safetensors"])
@pytest.mark.parametrize("has_other_code", [False, True])
def test_files_that_came_while_vllm_started_are_refused(
    name: str, has_other_code: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM may have read what was there before, also where code comes from elsewhere, too."""
    if has_other_code:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(model / "hub"))
        code = model / "hub" / "models--org--code"
        (code / "snapshots" / ("a" * 40)).mkdir(parents=True)
        (code / "refs").mkdir()
        (code / "refs" / "main").write_text("a" * 40)
    auto_map = {"AutoModel": "org/code--modeling.Model"}
    config = config_for(model, trust_remote_code=has_other_code, auto_map=auto_map)
    (model / name).write_text("{}")
    began = time.time() + 30
    assert named(config, started_s=began)
    os.utime(model / name, (began + 30, began + 30))
    with pytest.raises(UsageError, match=f"{name} was changed after this server was started"):
        named(config, started_s=began)


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


def test_code_that_moved_on_while_vllm_started_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM may run the code of before. Where the model lies beside the code decides nothing."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    code = tmp_path / "hub" / "models--org--code"
    for number in "ab":
        (code / "snapshots" / (number * 40)).mkdir(parents=True)
        (code / "snapshots" / (number * 40) / "modeling.py").write_text(number)
    (code / "refs").mkdir()
    (code / "refs" / "main").write_text("a" * 40)
    configs = []
    for name in ("a", "z"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
        (tmp_path / name / "modeling.py").write_text("import theirs")
        auto_map = {"AutoModel": "org/code--modeling.Model"}
        configs.append(config_for(tmp_path / name, trust_remote_code=True, auto_map=auto_map))
    assert named(configs[0]).weights == named(configs[1]).weights
    began = time.time()
    time.sleep(0.02)
    (code / "refs" / "main").write_text("b" * 40)
    with pytest.raises(UsageError, match="got another revision of org/code"):
        named(configs[0], started_s=began)


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

    def weights(started_s: float = 0, **options: Any) -> str:
        config = config_for(Path("org/name"), download_dir=str(tmp_path), **options)
        return named(config, started_s=started_s).weights

    offline = named(config_for(cache / "snapshots" / ("b" * 40)), started_s=0).weights
    assert offline == weights(revision="b" * 40)
    assert offline != weights(revision="a" * 40) == weights(started_s=inf)


@pytest.mark.parametrize("revision", [None, "dev"])
def test_a_branch_that_moved_on_while_vllm_started_is_refused(
    revision: str | None, tmp_path: Path
) -> None:
    """vLLM's weights may be those before. It may also have filled an empty cache itself."""
    cache = tmp_path / "models--org--name"
    snapshots = [cache / "snapshots" / (name * 40) for name in "ab"]
    for snapshot in snapshots:
        snapshot.mkdir(parents=True)
        blob = cache / "blobs" / hashlib.sha256(snapshot.name.encode()).hexdigest()
        blob.parent.mkdir(exist_ok=True)
        blob.write_text(snapshot.name)
        (snapshot / "model.safetensors").symlink_to(blob)
    (cache / "refs").mkdir()
    (cache / "refs" / (revision or "main")).write_text("b" * 40)
    config = config_for(Path("org/name"), download_dir=str(tmp_path), revision=revision)
    found, began = named(config), time.time() - 60
    with pytest.raises(UsageError, match=r"got another revision of org/name.*start vLLM again"):
        named(config, started_s=began)

    (snapshots[0] / "model.safetensors").unlink()
    snapshots[0].rmdir()
    assert found == named(config, started_s=began)


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
