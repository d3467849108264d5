"""Reads and writes models' files with transformers. `adapter` runs the models.

Nothing is unpickled, no code from a model's folder is run, nothing is fetched. The files are
untrusted: `checkpoint` checks them before these functions read them, and checks the model after.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.gguf import reader as gguf_reader
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import logging

from kvtide.serve.folder import Shape

QUANTIZATIONS = frozenset(AUTO_QUANTIZATION_CONFIG_MAPPING)
"""The quantization methods that transformers knows, by their names in a configuration."""

TEXT_SPLITS = frozenset(GGUF_PRE_TOKENIZER_SPLITS)
"""The rules for splitting text into words that transformers knows, by llama.cpp's names."""


@contextlib.contextmanager
def quiet(*, is_gguf: bool = False) -> Iterator[None]:
    """Keeps transformers and the hub from printing; restores their settings afterwards."""
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # The reader of GGUF files draws a progress bar that has no switch.
    hidden = contextlib.redirect_stderr(io.StringIO()) if is_gguf else contextlib.nullcontext()
    try:
        with hidden:
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def gguf_alone(path: Path) -> Iterator[Path]:
    """Gives a link to a GGUF file, in a folder that holds nothing else.

    transformers reads a folder and would also read other files there, such as an adapter. It also
    parses the file's head, with the texts of all tokens, many times; within this block, once.
    """
    reader = gguf.GGUFReader
    with tempfile.TemporaryDirectory(prefix="kvtide-") as folder:
        link = Path(folder) / "model.gguf"
        link.symlink_to(path.resolve())
        gguf.GGUFReader = functools.lru_cache(maxsize=1)(reader)
        try:
            yield link
        finally:
            gguf.GGUFReader = reader


def read_gguf_head(path: Path) -> tuple[dict[str, Any], dict[str, Shape], int]:
    """Reads a GGUF file's keys, its tensors' shapes, and the size in bytes that it must have.

    An array of texts is given by its length. A false length in the file costs no memory. May raise
    any error, since the reader does.
    """
    blob = gguf_reader._mapped(str(path))
    keys, count, position = gguf_reader._read_metadata(blob, str(path))
    key_count = int.from_bytes(bytes(blob[16:24]), "little")
    if key_count != len(keys):  # of two equal keys, some readers take the first, some the last
        raise ValueError(f"it has {key_count} keys, and some of them twice")
    entries, position = gguf_reader._read_tensor_table(blob, count, position)
    alignment = keys.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    first = whole_bytes = -(-position // alignment) * alignment
    for name, shape, kind, offset in entries:
        if kind not in gguf.GGML_QUANT_SIZES:
            raise ValueError(f"{name} is of type {kind}, which is unknown")
        block_numbers, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        size_bytes = math.prod(shape) // block_numbers * block_bytes
        whole_bytes = max(whole_bytes, first + offset + size_bytes)
    return keys, {name: shape for name, shape, *_ in entries}, whole_bytes


def read_gguf_tensor(path: Path, name: str) -> list[float]:
    """The numbers of a small tensor, which must exist."""
    tensors = gguf.GGUFReader(str(path)).tensors
    found = next(tensor for tensor in tensors if tensor.name == name)
    numbers: list[float] = gguf.dequantize(found.data, found.tensor_type).reshape(-1).tolist()
    return numbers


def load_config(path: Path) -> Any:
    """The configuration in a model's folder or GGUF file. See `load_weights` for safety."""
    with quiet(is_gguf=path.is_file()):
        return AutoConfig.from_pretrained(
            _folder_of(path),
            trust_remote_code=False,
            local_files_only=True,
            **_gguf_options(path),
        )


def skeleton_of(config: Any) -> PreTrainedModel:
    """The model of a configuration, without its numbers, so it takes hardly any memory."""
    with quiet(), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model


def gguf_places(skeleton: PreTrainedModel, arch: str) -> frozenset[str]:
    """The names of the GGUF tensors that transformers loads into this model."""
    processor = TENSOR_PROCESSORS.get(arch, TensorProcessor)(config={})
    places = get_gguf_hf_weights_map(skeleton, processor)
    # transformers looks up experts' tensors without the `.weight` at their names' end.
    return frozenset(places) | {f"{name}.weight" for name in places if name.endswith("_exps")}


@dataclass(frozen=True)
class Loading:
    """The differences between a model and its files; all empty if there are none."""

    missing: list[str]
    """Weights of the model that no file has. They are filled with random numbers."""
    unexpected: list[str]
    """Tensors in the files for which the model has no place. They are dropped."""
    mismatched: list[tuple[str, Shape, Shape]]
    """Weights whose shapes in the files and in the model differ. They are random, too."""


def load_weights(path: Path, dtype: torch.dtype, config: Any) -> tuple[PreTrainedModel, Loading]:
    """The model in a folder of safetensors or a GGUF file, and how its files differ from it.

    Nothing is unpickled, no code from the folder is run, nothing is fetched. transformers ignores
    differences, so look at `Loading` before you use the model. May raise any error, since the
    readers of the files do.
    """
    is_gguf = path.is_file()
    options: dict[str, Any] = (
        {"quantization_config": GgufConfig(dequantize=True)}
        if is_gguf
        else {"use_safetensors": True}
    )
    with quiet(is_gguf=is_gguf):
        model, info = AutoModelForCausalLM.from_pretrained(
            _folder_of(path),
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # without it, the error doesn't name the weight
            **options,
            **_gguf_options(path),
        )
    return model, Loading(
        sorted(info["missing_keys"]),
        sorted(info["unexpected_keys"]),
        sorted((key, tuple(held), tuple(made)) for key, held, made in info["mismatched_keys"]),
    )


def _folder_of(path: Path) -> Path:
    return path.parent if path.is_file() else path


def _gguf_options(path: Path) -> dict[str, Any]:
    return {"gguf_file": path.name} if path.is_file() else {}


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder or GGUF file. See `load_weights` for safety."""
    with quiet(is_gguf=path.is_file()):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            _folder_of(path),
            trust_remote_code=False,
            local_files_only=True,
            **_gguf_options(path),
        )
    return tokenizer


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a folder that `load_weights` and `load_tokenizer` can read."""
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def eos_ids_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All ids that end an answer by any of the model's three files; chat models need the union."""
    ids: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        ids.update([found] if isinstance(found, int) else found or [])
    return frozenset(ids)
