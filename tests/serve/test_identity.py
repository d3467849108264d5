"""The hash of a model, by which an answer of an earlier run is known to be this model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtide.serve import identity
from kvtide.serve.models import OpenModel, open_model
from serve.folders import change_config, change_tensors, make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder."""
    return make_folder(tmp_path_factory.mktemp("models") / "tiny")


def hash_of(source: OpenModel) -> str:
    """The hash of a model as it is now."""
    return identity.hash_of(source.model, source.tokenizer, source.eos_ids)


def _opened(folder: Path, dtype: str = "float32") -> OpenModel:
    return open_model(str(folder), dtype=dtype)


def test_an_open_model_knows_its_hash(folder: Path) -> None:
    """It reads the weights once, since they may be many."""
    model = _opened(folder)
    assert hash_of(model) == model.identity
    assert model.identity is model.identity


def test_a_model_has_the_same_hash_wherever_it_lies(folder: Path, tmp_path: Path) -> None:
    """The release of transformers that wrote it does not matter either."""
    copy = make_folder(tmp_path / "copy")
    change_config(copy, transformers_version="0.0.1")
    expected = hash_of(_opened(folder))
    assert 32 == len(expected)
    assert expected == hash_of(_opened(copy))


def _flip_a_bit(tensors: dict[str, torch.Tensor]) -> None:
    name = sorted(tensors)[-1]
    flat = tensors[name].view(torch.int32).view(-1)
    flat[-1] ^= 1


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: change_tensors(folder, _flip_a_bit),
        lambda folder: change_config(folder, rms_norm_eps=2e-5),
        lambda folder: change_config(folder, max_position_embeddings=4096),
    ],
    ids=["weight", "configuration", "context"],
)
def test_a_changed_file_changes_the_hash(
    folder: Path, tmp_path: Path, change: Callable[[Path], Any]
) -> None:
    """One bit is enough."""
    changed = make_folder(tmp_path / "changed")
    change(changed)
    assert hash_of(_opened(folder)) != hash_of(_opened(changed))


def test_whatever_else_decides_an_answer_changes_the_hash(folder: Path) -> None:
    """The dtype of the weights, the tokenizer, its chat template, and the tokens that end."""
    model = _opened(folder)
    hashes = [hash_of(model), hash_of(_opened(folder, "bfloat16"))]
    hashes.append(hash_of(replace(model, eos_ids=model.eos_ids | {7})))
    model.tokenizer.chat_template += " "
    hashes.append(hash_of(model))
    model.tokenizer.add_tokens(["a new token"])
    hashes.append(hash_of(model))
    assert 5 == len({*hashes})
