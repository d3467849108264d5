"""Finds out what decides the bytes of KV beside its tokens, as a Namespace.

Weights count by what is in their files. A path would be the same for other weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvtide.errors import UsageError
from kvtide.plugin.reader import Reader, Table
from kvtide.plugin.versions import installed_version, package_of
from kvtide.plugin.vllm import STARTED_S
from kvtide.plugin.vllm.options import (
    CACHE_WITHOUT_EFFECT,
    MODEL_WITHOUT_EFFECT,
    MULTIMODAL_WITHOUT_EFFECT,
    deciding,
)
from kvtide.plugin.vllm.package import VLLM
from kvtide.plugin.vllm.settings import OffloadSettings
from kvtide.plugin.weights import WeightsUnknown, changed_ns, digest_of, folder_of
from kvtide.tier import Namespace
from kvtide.tier.namespace import salt_of

logger = logging.getLogger(__name__)

READS: Table = {
    "VllmConfig": (
        *("model_config", "cache_config", "parallel_config", "load_config"),
        *("compilation_config", "lora_config?"),
    ),
    "ModelConfig": (
        *("model", "hf_config", "seed?", "revision?", "code_revision?"),
        *("trust_remote_code", "multimodal_config?"),
    ),
    "CacheConfig": ("prefix_caching_hash_algo",),
    "ParallelConfig": (
        *("rank", "world_size", "tensor_parallel_size", "pipeline_parallel_size"),
        *("prefill_context_parallel_size", "decode_context_parallel_size"),
        *("cp_kv_cache_interleave_size", "data_parallel_index"),
    ),
    "LoadConfig": ("load_format", "model_loader_extra_config", "download_dir?"),
    "CompilationConfig": ("static_forward_context",),
}
"""What is read of vLLM's configuration."""

_CODE_SUFFIXES = {".py"}
_JSON_WITHOUT_EFFECT = {
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "added_tokens.json"),
    *("special_tokens_map.json", "chat_template.json", "generation_config.json"),
    *("trainer_state.json", "training_args.json"),
}
"""Files beside the weights that say how text becomes tokens, how the next one is chosen, or how the
weights were made. Any other file of JSON may say how weights or images are read."""
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_SEED = "PYTHONHASHSEED"
# Where the model lies, and who wrote its configuration, decide nothing.
_WITHOUT_EFFECT = ("_name_or_path", "transformers_version")


def namespace_of(
    vllm_config: Any,
    settings: OffloadSettings,
    layouts: Iterable[str],
    vllm_platform: object,
    *,
    is_durable: bool,
    beside: Sequence[str] = (),
    started_s: float = STARTED_S,
) -> Namespace:
    """The namespace of a rank's blocks. Reads the weights' files if blocks outlive the process.

    `layouts` say what is in a block: the geometries of a rank's groups. `vllm_platform` is vLLM's
    current one. `beside` has what else decides a byte. Raises UsageError if there are no weights
    to hash, or if they changed after `started_s`, when vLLM may have read them already.
    """
    reads = Reader(vllm_config, READS)
    model, parallel = Reader(reads["model_config"], READS), Reader(reads["parallel_config"], READS)
    if is_durable:
        _warn_of_passing_keys(Reader(reads["cache_config"], READS)["prefix_caching_hash_algo"])
    sizes = [parallel[name] for name in READS["ParallelConfig"][1:-2]]
    return Namespace(
        model=_hash_of([_config_of(model["hf_config"])]),
        weights=_weights_of(vllm_config, settings, started_s) if is_durable else "",
        layout=_hash_of(layouts),
        engine=_engine_of(vllm_config, vllm_platform, beside),
        salt=salt_of(os.environ),
        rank=f"{parallel['rank']}/{'/'.join(map(str, sizes))}",
    )


def _warn_of_passing_keys(algorithm: str) -> None:
    """Says that no other process will find the blocks, if vLLM makes other keys in each."""
    if "xxhash" in algorithm and _SEED not in os.environ:
        logger.warning(
            "kvtide: with --prefix-caching-hash-algo %s vLLM makes other keys in each process, and "
            "so nothing is found after a restart; use sha256, or set %s to a secret number",
            algorithm,
            _SEED,
        )


def _engine_of(vllm_config: Any, vllm_platform: object, beside: Sequence[str]) -> str:
    """The versions and whatever else decides in which order bytes lie within a block."""
    reads = Reader(vllm_config, READS)
    model, load = Reader(reads["model_config"], READS), Reader(reads["load_config"], READS)
    parallel, images = Reader(reads["parallel_config"], READS), model["multimodal_config"]
    layers = Reader(reads["compilation_config"], READS)["static_forward_context"]
    kinds = sorted({f"{type(layer).__name__} {_backend_of(layer)}" for layer in layers.values()})
    decides = [
        *("vLLM", VLLM.version, "torch", installed_version("torch")),
        # Models that vLLM has no code for are computed by that of transformers.
        *("transformers", installed_version("transformers")),
        # Kernels, and the order of a block's bytes, may be another package's.
        *(package_of(vllm_platform), installed_version(package_of(vllm_platform))),
        # Some models turn all keys otherwise if a prompt may be long, as with LongRoPE.
        deciding(reads["model_config"], MODEL_WITHOUT_EFFECT),
        # A key has an image, and not the options by which it was processed.
        "" if images is None else deciding(images, MULTIMODAL_WITHOUT_EFFECT),
        # These choose between the files of a folder that has several.
        *(str(load["load_format"]), str(load["model_loader_extra_config"])),
        # Which tokens of a context that several ranks share are this rank's.
        str(parallel["cp_kv_cache_interleave_size"]),
        deciding(reads["cache_config"], CACHE_WITHOUT_EFFECT),
        # The CPU's attention kernels order a block's bytes by what the CPU can do.
        *(platform.machine(), torch.backends.cpu.get_cpu_capability(), _has_tiles()),
        # Layers with room for adapters have kernels of their own.
        "adapters" if reads["lora_config"] is not None else "",
        *kinds,
        # Whatever option changed a tensor: two bytes of a dtype aren't two of another.
        _hash_of(_form_of(layers[name]) for name in sorted(layers)),
        *beside,
    ]
    return json.dumps(decides)


def _backend_of(layer: Any) -> str:
    """The name of a layer's attention backend, if it has any."""
    get = getattr(layer, "get_attn_backend", None)
    return "" if get is None else str(get().__name__)


def _form_of(layer: Any) -> str:
    """The dtypes of a layer's tensors, and their shapes but for the number of blocks.

    A layer with recurrent state has several. In a process without the model's layers none is known.
    """
    caches = getattr(layer, "kv_cache", None)
    if isinstance(caches, torch.Tensor):
        caches = [caches]
    return json.dumps([[str(cache.dtype), *cache.shape[1:]] for cache in caches or ()])


def _has_tiles() -> str:
    """Whether the CPU multiplies matrices in tiles, and torch can tell."""
    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return str(has_tiles is not None and has_tiles())


def _weights_of(vllm_config: Any, settings: OffloadSettings, started_s: float) -> str:
    """The name of the weights, or a digest of them, and of the code and the settings beside them.

    Raises UsageError if nobody can tell them.
    """
    reads = Reader(vllm_config, READS)
    model = Reader(reads["model_config"], READS)
    if settings.weights:
        return f"named {settings.weights}"
    load = Reader(reads["load_config"], READS)
    if str(load["load_format"]).endswith("dummy"):
        return f"dummy {model['seed']}"
    try:
        names = model["model"], model["revision"], load["download_dir"]
        folder = _folder_at_start(*names, started_s)
        weights = digest_of([folder], started_s, suffixes=_WEIGHT_SUFFIXES)
        places = [*dict.fromkeys((folder, *_code_folders(model, started_s)))]
        code = digest_of(places, started_s, suffixes=_CODE_SUFFIXES, may_be_none=True)
        return f"files {weights} {code} {digest_of(_json_files(places), started_s)}"
    except WeightsUnknown as error:
        raise UsageError(
            f"{error}; start vLLM again if they have changed, name their revision with the setting "
            "weights, or leave out disk_dir"
        ) from error


def _folder_at_start(model: str, revision: str | None, cache: str | None, started_s: float) -> Path:
    """The files that a model had when vLLM read them.

    A branch in the hub's cache may have moved on to other files meanwhile, which nothing in vLLM
    tells. Raises WeightsUnknown then, unless the cache has no files but these.
    """
    folder = folder_of(model, revision, cache)
    if Path(model).exists():
        return folder
    branch = folder.parent.parent / "refs" / (revision or "main")
    has_moved = branch.is_file() and changed_ns(branch.stat()) > started_s * 1e9
    if has_moved and len([*folder.parent.iterdir()]) > 1:
        raise WeightsUnknown(
            f"the hub's cache got another revision of {model} after this server was started"
        )
    return folder


def _json_files(places: Iterable[Path]) -> Iterator[Path]:
    """The files of JSON in these folders, not in folders of theirs, but for some without effect."""
    for place in places:
        found = sorted(place.glob("*.json"))
        yield from (path for path in found if path.name not in _JSON_WITHOUT_EFFECT)


def _code_folders(model: Reader, started_s: float) -> Iterator[Path]:
    """Where code is that the model's author wrote, if vLLM may run it.

    The hub's client puts it into its own cache, wherever vLLM puts weights. The configuration names
    code in another repository as `repository--module.class`.
    """
    if not model["trust_remote_code"]:
        return
    revision = model["code_revision"]
    repositories = {model["model"]: revision or model["revision"]}
    for named in (getattr(model["hf_config"], "auto_map", None) or {}).values():
        for name in [named] if isinstance(named, str) else named:
            repository, separator, _ = str(name).partition("--")
            if separator:
                repositories.setdefault(repository, revision)
    for repository, revision in repositories.items():
        try:
            folder_of(repository, revision, None)
        except WeightsUnknown:  # what isn't here wasn't run
            continue
        yield _folder_at_start(repository, revision, None, started_s)


def _config_of(hf_config: Any) -> str:
    config = json.loads(hf_config.to_json_string(use_diff=False))
    return json.dumps({name: config[name] for name in sorted({*config} - {*_WITHOUT_EFFECT})})


def _hash_of(texts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for text in texts:
        digest.update(f"{len(text)} ".encode() + text.encode())
    return digest.hexdigest()
