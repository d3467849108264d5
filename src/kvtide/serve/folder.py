"""Checks a model's files before the model is loaded from them. Imports no torch.

The files are untrusted. Claimed sizes are compared with the files before memory is allocated, and
file names must not leave their folder.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from kvtide.errors import UsageError

Shape = tuple[int, ...]

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_READ = ("*.json", "*.safetensors", "*.model", "vocab.txt", "merges.txt", "*.jinja")
_POINTER = b"version https://git-lfs.github.com/spec/"
# Mistral adds the same weights under other names in files of this name.
_OTHER_FORM = "consolidated"
_LARGEST_JSON_BYTES = 64 << 20
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file of safetensors."""

    file: Path
    name: str
    shape: Shape
    dtype: str
    """The dtype as the file names it, such as BF16."""


@dataclass(frozen=True)
class FolderTensors:
    """The tensors by name, of the files that transformers loads."""

    tensors: dict[str, Stored]
    is_quantized: bool


def refuse_pointer(path: Path) -> None:
    """Raises UsageError for an empty file or a Git LFS pointer."""
    with path.open("rb") as file:
        head = file.read(len(_POINTER))
    if not head:
        raise UsageError(f"{path} is empty: get it again")
    if head == _POINTER:
        raise UsageError(
            f"{path} is a Git LFS pointer, not the file itself: run git lfs pull in {path.parent}"
        )


def check_magic(path: Path) -> None:
    """Raises UsageError for a file that doesn't begin as a GGUF file does."""
    refuse_pointer(path)
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise UsageError(f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")


def read_folder(folder: Path, quantizations: Collection[str] | None = None) -> FolderTensors:
    """Lists a folder's tensors. Raises UsageError for files that are false or would be ignored.

    `quantizations` are the methods that can be loaded; None doesn't check the folder's method.
    """
    _refuse_other_kinds(folder)
    for mask in _READ:
        for path in sorted(folder.glob(mask)):
            if not path.name.startswith(_OTHER_FORM):
                refuse_pointer(path)
    config = _read_object(folder / _CONFIG)
    is_quantized = _refuse_unknown_quantization(folder, config, quantizations)
    files = _weight_files(folder)
    tensors = dict(_stored_in(files))
    _refuse_more_layers(folder, config, len(tensors))
    _refuse_left_out(folder, files, tensors)
    if is_quantized:
        _refuse_without_scale(tensors)
    else:
        _refuse_integers(tensors)
    return FolderTensors(tensors, is_quantized)


def _refuse_other_kinds(folder: Path) -> None:
    if (folder / _ADAPTER).is_file():
        raise UsageError(
            f"{folder} has an adapter ({_ADAPTER}), which would be ignored: merge it into its "
            "model and save that"
        )
    if not (folder / _CONFIG).is_file():
        raise UsageError(f"{folder} is not a model's folder: it has no {_CONFIG}")
    if not any(folder.glob("*.safetensors")):
        pickled = next((path.name for mask in _PICKLED for path in folder.glob(mask)), None)
        raise UsageError(
            f"the weights in {folder} are pickled ({pickled}), and unpickling can run any code: "
            "convert them to safetensors"
            if pickled
            else f"{folder} has no weights: there is no .safetensors file in it"
        )


def _read_object(path: Path) -> dict[str, Any]:
    size_bytes = path.stat().st_size
    if size_bytes > _LARGEST_JSON_BYTES:
        raise UsageError(f"{path} has {size_bytes} bytes, too many for a {path.name}: get it again")
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is not JSON ({error}): get it again") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds a {type(found).__name__}, not an object: get it again")
    return found


def _parts_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The configuration itself, and the configurations of a composite model's parts."""
    return [config, *(part for part in config.values() if isinstance(part, dict))]


def _refuse_unknown_quantization(
    folder: Path, config: dict[str, Any], known: Collection[str] | None
) -> bool:
    """Whether the weights are quantized. UsageError for a method that transformers doesn't know."""
    path = folder / _CONFIG
    if "transformers_weights" in config:
        raise UsageError(f"{path} names other weights (transformers_weights): remove the key")
    if config.get("quantization") is not None:
        raise UsageError(
            f"the weights in {folder} are quantized for MLX (quantization in {_CONFIG}), which "
            "isn't served: take the model before quantization"
        )
    told = [part.get("quantization_config") for part in _parts_of(config)]
    told = [entry for entry in told if entry is not None]
    for entry in told:
        method = entry.get("quant_method") if isinstance(entry, dict) else None
        names = {f"{method}{bits}" for bits in ("", "_4bit", "_8bit")}
        if known is not None and not names & set(known):
            raise UsageError(
                f"the weights in {folder} are quantized by an unknown method (quant_method "
                f"{method!r} in {_CONFIG}): take the model before quantization"
            )
    return bool(told)


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads: a single file, or the files in the index."""
    if (folder / _WEIGHTS).is_file() or not (folder / _INDEX).is_file():
        return [folder / _WEIGHTS]
    path = folder / _INDEX
    names = _read_object(path).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UsageError(f"{path} has no weight_map from tensors to files: get it again")
    for name in sorted(set(names.values())):
        if Path(name).name != name or not (folder / name).is_file():
            raise UsageError(
                f"{path} names the file {name!r}, which isn't in {folder}: get it again"
            )
    held = {name: folder / file for name, file in names.items()}
    files = sorted(set(held.values()))
    stored = dict(_stored_in(files))
    for name, file in held.items():
        if name not in stored or stored[name].file != file:
            raise UsageError(
                f"{path} says that {name} is in {file.name}, but it isn't: get it again"
            )
    return files


def _stored_in(files: list[Path]) -> Iterator[tuple[str, Stored]]:
    """All tensors of these files, read from their heads. UsageError for a tensor in two files."""
    seen: dict[str, Path] = {}
    for path in files:
        for name, stored in _head_of(path):
            if name in seen:
                raise UsageError(
                    f"{name} is in {seen[name].name} and in {path}: remove one of them"
                )
            seen[name] = path
            yield name, stored


def _head_of(path: Path) -> Iterator[tuple[str, Stored]]:
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 # it isn't a mapping
                part = file.get_slice(name)
                yield name, Stored(path, name, tuple(part.get_shape()), part.get_dtype())
    except OSError:
        raise
    except Exception as error:  # the error of safetensors has no public class
        raise UsageError(
            f"{path} is not a complete file of safetensors ({error}): get it again"
        ) from error


def _refuse_more_layers(folder: Path, config: dict[str, Any], tensor_count: int) -> None:
    """Raises UsageError for more layers than tensors; a billion layers would exhaust the memory."""
    for part in _parts_of(config):
        for name in _LAYER_COUNTS:
            count = part.get(name)
            if isinstance(count, int) and count > max(tensor_count, 1):
                raise UsageError(
                    f"{folder / _CONFIG} says {name} = {count}, but there are only {tensor_count} "
                    "tensors: get the model again"
                )


def _refuse_left_out(folder: Path, files: list[Path], tensors: dict[str, Stored]) -> None:
    """Raises UsageError for a file that isn't loaded and has a tensor that no loaded file has."""
    for path in sorted(set(folder.glob("*.safetensors")) - set(files)):
        if path.name.startswith(_OTHER_FORM):
            continue
        for name, _ in _head_of(path):
            if name not in tensors:
                raise UsageError(
                    f"{path} would be ignored, but only it has {name}: remove the file, or name "
                    f"it in {_INDEX}"
                )


def _refuse_integers(tensors: dict[str, Stored]) -> None:
    for name, stored in tensors.items():
        if name.endswith(".weight") and stored.dtype in _INTEGERS:
            raise UsageError(
                f"{name} in {stored.file} holds integers ({stored.dtype}), so it is quantized, "
                f"and {_CONFIG} doesn't say how: take the model before quantization"
            )


def _refuse_without_scale(tensors: dict[str, Stored]) -> None:
    """Raises UsageError for 8-bit weights without their scale; transformers wouldn't notice."""
    for name, stored in tensors.items():
        has_scale = any(f"{name}_{end}" in tensors for end in ("scale", "scale_inv"))
        if name.endswith(".weight") and stored.dtype.startswith("F8_") and not has_scale:
            raise UsageError(
                f"{name} in {stored.file} is quantized ({stored.dtype}), and its scale isn't in "
                "the folder: get it again"
            )
