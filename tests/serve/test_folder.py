"""Hugging Face folders are checked before anything is loaded: all that is in them must count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtide.serve.models import open_model
from serve.folders import (
    INDEX,
    WEIGHTS,
    change_config,
    change_tensors,
    make_folder,
    refusal,
    split_up,
    write_index,
)

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Saves the tiny model as a Hugging Face folder in float32."""
    return make_folder(tmp_path / "tiny")


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
def test_a_git_lfs_pointer_is_named(folder: Path, name: str) -> None:
    """A clone without Git LFS has pointers in the place of large files."""
    (folder / name).write_text(POINTER)
    line = refusal(folder)
    assert f"{folder / name} is a Git LFS pointer" in line
    assert f"git lfs pull in {folder}" in line


def test_a_git_lfs_pointer_to_a_gguf_file_is_named(tmp_path: Path) -> None:
    """A clone without Git LFS has a pointer in the place of a GGUF file, too."""
    path = tmp_path / "model.gguf"
    path.write_text(POINTER)
    assert f"{path} is a Git LFS pointer" in refusal(path)


def test_files_that_are_not_read_may_hold_anything(folder: Path) -> None:
    """Many folders hold Mistral's own form of the weights, or notes; transformers reads neither."""
    (folder / "consolidated.safetensors").write_text(POINTER)
    (folder / "notes.txt").write_text("")
    open_model(str(folder), dtype="float32")
    (folder / "merges.txt").write_text("")
    assert "merges.txt is empty" in refusal(folder)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
def test_an_empty_file_is_named(folder: Path, name: str) -> None:
    """A download that never began leaves an empty file."""
    (folder / name).write_bytes(b"")
    assert f"{folder / name} is empty: get it again" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("[1, 2]", "holds a list"), ("{", "is not JSON"), ("\udcff", "is not JSON"), ("null", "None")],
)
def test_a_config_json_without_an_object_is_named(folder: Path, text: str, reason: str) -> None:
    """The file holds another value than an object, half an object, or bytes that aren't text."""
    path = folder / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    line = refusal(folder)
    assert str(path) in line
    assert reason in line


@pytest.mark.parametrize("size", [-100, 100, 7, 2])
def test_weights_that_are_cut_off_are_named(folder: Path, size: int) -> None:
    """The file ends in its numbers or in the header before them."""
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:size])
    line = refusal(folder)
    assert f"{path} is not a complete file of safetensors" in line


def test_a_header_longer_than_the_file_costs_no_memory(folder: Path) -> None:
    """The file begins with the length of its header, which may be a lie."""
    path = folder / WEIGHTS
    path.write_bytes((1 << 60).to_bytes(8, "little") + path.read_bytes()[8:])
    assert f"{path} is not a complete file of safetensors" in refusal(folder)


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer"])
def test_layers_without_weights_cost_no_memory(folder: Path, key: str) -> None:
    """transformers would make every layer before it looks for the first weight."""
    change_config(folder, **{key: 1 << 30})
    line = refusal(folder)
    assert f"says {key} = {1 << 30}, but there are only 39 tensors" in line


@pytest.mark.parametrize(
    "told",
    [
        {"quant_method": "homemade", "bits": 8},
        {"bits": 4, "group_size": 64},
        "fp8",
        {"quant_method": None},
        {"quant_method": ["fp8"]},
    ],
)
def test_an_unknown_quantization_is_refused(folder: Path, told: Any) -> None:
    """transformers ignores an unknown method, and takes the packed weights for numbers."""
    change_config(folder, quantization_config=told)
    assert "are quantized by an unknown method" in refusal(folder)
    change_config(folder, quantization_config=None, text_config={"quantization_config": told})
    assert "are quantized by an unknown method" in refusal(folder)


def test_weights_for_mlx_are_refused(folder: Path) -> None:
    """MLX writes its quantization under a key of its own."""
    change_config(folder, quantization={"group_size": 64, "bits": 4})
    assert "quantized for MLX (quantization in config.json)" in refusal(folder)


def test_a_known_quantization_is_left_to_transformers(folder: Path) -> None:
    """transformers says itself what is missing here."""
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "unknown method" not in refusal(folder)


def test_a_missing_scale_is_refused(folder: Path) -> None:
    """With the scale transformers restores the numbers; without it the 8-bit ones would be used."""
    name = "model.layers.1.mlp.up_proj.weight"
    expected: dict[str, torch.Tensor] = {}

    def quantize(held: dict[str, torch.Tensor]) -> None:
        for key in [key for key in held if "proj" in key]:
            scale = held[key].abs().max() / 448
            held[key] = (held[key] / scale).to(torch.float8_e4m3fn)
            held[f"{key}_scale_inv"] = scale.reshape(1, 1)
            expected[key] = held[key].float() * scale

    change_tensors(folder, quantize)
    told = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    change_config(folder, quantization_config=told)
    found = open_model(str(folder), dtype="float32").model.state_dict()
    assert all(torch.equal(weight, found[key]) for key, weight in expected.items())
    change_tensors(folder, lambda held: held.pop(f"{name}_scale_inv"))
    assert f"{name} in {folder / WEIGHTS} is quantized" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_integer_weights_are_refused(folder: Path, dtype: torch.dtype) -> None:
    """Such weights are quantized, and their scales are elsewhere or missing."""
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(folder, lambda held: held.update({name: (held[name] * 50).to(dtype)}))
    line = refusal(folder)
    assert f"{name} in {folder / WEIGHTS} holds integers" in line


@pytest.mark.parametrize("has_model", [True, False])
def test_an_adapter_is_refused(folder: Path, has_model: bool) -> None:
    """It is refused beside its base model, where it would be left out, and alone."""
    (folder / "adapter_config.json").write_text("{}")
    if not has_model:
        (folder / "config.json").unlink()
    assert "has an adapter (adapter_config.json)" in refusal(folder)


def test_a_configuration_that_names_its_own_weights_is_refused(folder: Path) -> None:
    """kvtide would check other weights than transformers loads."""
    change_config(folder, transformers_weights="../other.safetensors")
    assert "transformers_weights" in refusal(folder)


def test_weights_in_several_files_are_joined(folder: Path) -> None:
    """Two files with an index give the same weights as one file."""
    expected = load_file(folder / WEIGHTS)
    split_up(folder)
    found = open_model(str(folder), dtype="float32").model.state_dict()
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())


def test_an_index_and_its_files_must_agree(folder: Path) -> None:
    """A tensor isn't in the file that the index names, or the file doesn't exist."""
    files = split_up(folder)
    name = "model.norm.weight"
    write_index(folder, {**files, "model.more.weight": "model-1.safetensors"})
    assert "model.more.weight is in model-1.safetensors, but it isn't" in refusal(folder)
    write_index(folder, {**files, name: "model-2.safetensors"})
    assert f"{name} is in model-2.safetensors, but it isn't" in refusal(folder)
    write_index(folder, {**files, name: "model-3.safetensors"})
    assert "names the file 'model-3.safetensors', which isn't in" in refusal(folder)


@pytest.mark.parametrize("name", ["../tiny/model-1.safetensors", "/etc/passwd", ""])
def test_an_index_names_files_of_its_folder_alone(folder: Path, name: str) -> None:
    """The paths in an index come from a stranger, and must not lead out of the folder."""
    files = split_up(folder)
    write_index(folder, {**files, "model.norm.weight": name})
    assert f"names the file {name!r}" in refusal(folder)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {"x": 1}}])
def test_an_index_without_a_map_is_named(folder: Path, index: Any) -> None:
    """An index that holds anything else is refused."""
    split_up(folder)
    (folder / INDEX).write_text(json.dumps(index))
    assert INDEX in refusal(folder)


def test_a_tensor_in_two_files_is_named(folder: Path) -> None:
    """Nothing says which of the two tensors counts."""
    files = split_up(folder)
    second = folder / "model-2.safetensors"
    name = "model.norm.weight"
    save_file({**load_file(second), name: torch.ones(64)}, second, metadata={"format": "pt"})
    assert f"{name} is in model-1.safetensors and in {second}" in refusal(folder)
    assert files[name] == "model-1.safetensors"


def test_an_ignored_file_is_named_if_it_has_weights_of_its_own(folder: Path) -> None:
    """A file with the same weights again may be ignored, and so may Mistral's own form of them."""
    held = load_file(folder / WEIGHTS)
    halves = {name: weight.half() for name, weight in held.items()}
    save_file(halves, folder / "model.fp16.safetensors")
    save_file({"tok_embeddings.weight": torch.ones(4)}, folder / "consolidated.safetensors")
    open_model(str(folder), dtype="float32")
    more = folder / "model-2.safetensors"
    save_file({"model.layers.4.mlp.up_proj.weight": torch.ones(4)}, more)
    line = refusal(folder)
    assert f"{more} would be ignored, but only it has model.layers.4.mlp.up_proj.weight" in line
