"""Small Hugging Face folders, and functions that change their content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtide.errors import UsageError
from kvtide.serve.models import open_model

Tensors = dict[str, torch.Tensor]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def make_folder(path: Path) -> Path:
    """Saves the tiny model in float32."""
    tiny = open_model("tiny-random", dtype="float32")
    tiny.model.save_pretrained(path)
    tiny.tokenizer.save_pretrained(path)
    return path


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Loads the weights, changes them by `change`, and saves them."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    """Sets keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def split_up(folder: Path) -> dict[str, str]:
    """Splits the weights into two files with an index, and returns the index's map."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = {name: f"model-{1 + ('layers.3' in name)}.safetensors" for name in tensors}
    for file in set(files.values()):
        part = {name: tensors[name] for name in tensors if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    write_index(folder, files)
    return files


def write_index(folder: Path, files: dict[str, str]) -> None:
    """Writes an index that says which file has each tensor."""
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def refusal(folder: Path, dtype: str = "float32") -> str:
    """Returns the one line of the error with which a folder is refused. It names the folder."""
    with pytest.raises(UsageError) as caught:
        open_model(str(folder), dtype=dtype)
    line = str(caught.value)
    assert "\n" not in line
    assert str(folder) in line
    return line
