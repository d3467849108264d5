"""Models' files as transformers reads and writes them; the other half of `adapter`.

Nothing is unpickled, no code is run that lies beside the weights, nothing is fetched. Whatever
these functions read was written by somebody else: `models` checks it first, and what came of it.
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

QUANTIZATIONS = frozenset(AUTO_QUANTIZATION_CONFIG_MAPPING)
"""The methods of quantization that transformers knows, by their names in a configuration."""

TEXT_SPLITS = frozenset(GGUF_PRE_TOKENIZER_SPLITS)
"""Ways to cut a text into words that transformers takes from a GGUF file, by llama.cpp's names."""

Shape = tuple[int, ...]


@contextlib.contextmanager
def quiet(*, is_gguf: bool = False) -> Iterator[None]:
    """Keeps transformers and the hub from printing; what was set before is set again afterwards."""
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
    """A name for a GGUF file under which transformers sees nothing but it, and reads it fast.

    Transformers takes a folder and looks there for further files, an adapter's for example. It
    also has the gguf library parse the whole head, all tokens' texts in it, each time it looks for
    something: within this block that is done once.
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
    """A GGUF file's keys with their values, an array of texts by its length; its tensors; and how
    many bytes it must have for them.

    Reads no more than there is: whatever lengths a file claims, they cost no memory. Raises what
    the reader raises, which can be anything.
    """
    blob = gguf_reader._mapped(str(path))
    keys, count, position = gguf_reader._read_metadata(blob, str(path))
    key_count = int.from_bytes(bytes(blob[16:24]), "little")
    if key_count != len(keys):  # readers differ in which of the two they take
        raise ValueError(f"it has {key_count} keys, and some of them twice")
    entries, position = gguf_reader._read_tensor_table(blob, count, position)
    alignment = keys.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    first = whole_bytes = -(-position // alignment) * alignment
    for name, shape, kind, offset in entries:
        if kind not in gguf.GGML_QUANT_SIZES:
            raise ValueError(f"{name} is of type {kind}, which isn't known")
        block_numbers, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        size_bytes = math.prod(shape) // block_numbers * block_bytes
        whole_bytes = max(whole_bytes, first + offset + size_bytes)
    return keys, {name: shape for name, shape, *_ in entries}, whole_bytes


def read_gguf_tensor(path: Path, name: str) -> list[float]:
    """The numbers of a small tensor, which must be there."""
    found = next(one for one in gguf.GGUFReader(str(path)).tensors if one.name == name)
    numbers: list[float] = gguf.dequantize(found.data, found.tensor_type).reshape(-1).tolist()
    return numbers


def load_config(path: Path) -> Any:
    """The configuration in a model's folder or GGUF file, under the rules of `load_weights`."""
    with quiet(is_gguf=path.is_file()):
        return AutoConfig.from_pretrained(
            _folder_of(path),
            trust_remote_code=False,
            local_files_only=True,
            **_gguf_options(path),
        )


def skeleton_of(config: Any) -> PreTrainedModel:
    """The model of a configuration, without any numbers: it takes hardly any memory."""
    with quiet(), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model


def gguf_places(skeleton: PreTrainedModel, arch: str) -> frozenset[str]:
    """The names of those tensors of a GGUF file that transformers puts into this model."""
    processor = TENSOR_PROCESSORS.get(arch, TensorProcessor)(config={})
    places = get_gguf_hf_weights_map(skeleton, processor)
    # Experts are looked up without the end of their tensors' names.
    return frozenset(places) | {f"{name}.weight" for name in places if name.endswith("_exps")}


@dataclass(frozen=True)
class Loading:
    """What didn't fit between a model and its files; all empty where all is well."""

    missing: list[str]
    """Weights of the model that no file has: filled with random numbers."""
    unexpected: list[str]
    """Tensors in the files that the model has no place for: dropped."""
    mismatched: list[tuple[str, Shape, Shape]]
    """Weights with the shape in the files and that in the model: filled with random numbers."""


def load_weights(path: Path, dtype: torch.dtype, config: Any) -> tuple[PreTrainedModel, Loading]:
    """The model in a folder of safetensors or a GGUF file, and what didn't fit.

    Nothing is unpickled, no code is run that lies in the folder, nothing is fetched. Transformers
    goes on over whatever doesn't fit, so look at that before you use the model.
    Raises what the readers of the files raise, which can be anything.
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
            ignore_mismatched_sizes=True,  # it is an error otherwise that names no weight
            **options,
            **_gguf_options(path),
        )
    return model, Loading(
        sorted(info["missing_keys"]),
        sorted(info["unexpected_keys"]),
        sorted((key, tuple(one), tuple(other)) for key, one, other in info["mismatched_keys"]),
    )


def _folder_of(path: Path) -> Path:
    return path.parent if path.is_file() else path


def _gguf_options(path: Path) -> dict[str, Any]:
    return {"gguf_file": path.name} if path.is_file() else {}


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder or GGUF file, under the rules of `load_weights`."""
    with quiet(is_gguf=path.is_file()):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            _folder_of(path),
            trust_remote_code=False,
            local_files_only=True,
            **_gguf_options(path),
        )
    return tokenizer


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes both to a folder, as `load_weights` and `load_tokenizer` read it."""
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def eos_ids_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All ids that any of the model's three files calls an end; chat models need the union."""
    ids: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        ids.update([found] if isinstance(found, int) else found or [])
    return frozenset(ids)
