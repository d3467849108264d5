"""Loads a model from its files, completely or not at all.

Each tensor and each key of the files must be used or known to have no effect. Otherwise the files
are refused, and the error names the tensor or the key. transformers would ignore it, or fill the
gap with random numbers.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import decoders, normalizers, pre_tokenizers

from kvtide.errors import UsageError
from kvtide.serve.adapter import PreTrainedModel, PreTrainedTokenizerBase
from kvtide.serve.adapter_files import (
    QUANTIZATIONS,
    Loading,
    gguf_alone,
    gguf_places,
    load_config,
    load_tokenizer,
    load_weights,
    read_gguf_head,
    read_gguf_tensor,
    skeleton_of,
)
from kvtide.serve.folder import Shape, Stored, check_magic, read_folder
from kvtide.serve.gguf_keys import (
    ROPE_FACTORS,
    check_keys,
    complete,
    ends_of,
    has_digits_apart,
    has_no_space_before,
)
from kvtide.serve.reasons import one_line

# SentencePiece writes a space as this character.
_SPACE = "▁"
# The most weights in one stored number. Usual formats pack eight into 32 bits.
_PACKED_WEIGHTS = 16
# How many numbers even a small model may compute at its start: masks and tables of positions.
_TABLE_NUMBERS = 1 << 26
_FREQUENCIES = "rotary_emb.inv_freq"
_QUANTIZED_ENDS = ("scale", "scale_inv", "scales", "zeros", "qweight", "qzeros", "g_idx", "absmax")


def load_folder(
    folder: Path, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a folder of safetensors. Raises UsageError, in one line, if it isn't complete."""
    what = f"the model in {folder}"
    with one_line(what):
        found = read_folder(folder, QUANTIZATIONS)
        shapes = [stored.shape for stored in found.tensors.values()]
        config = load_config(folder)
        skeleton = skeleton_of(config)
        _check_size(what, skeleton, shapes, is_quantized=found.is_quantized)
        tensors = _by_place(what, skeleton, found.tensors)
        _check_tied(what, skeleton, tensors)
        model, loading = load_weights(folder, dtype, config)
        _check_loading(what, loading)
        _check_frequencies(what, model, found.tensors)
        _check_finite(what, model)
    with one_line(f"the tokenizer in {folder}"):
        return model, load_tokenizer(folder)


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a GGUF file. Raises UsageError, in one line, if it isn't complete."""
    what = f"the GGUF file {path}"
    with one_line(what), gguf_alone(path) as link:
        keys, shapes = _read_head(path, link)
        config = _gguf_config(path, link, keys, shapes)
        with _named(what):
            digits_apart = has_digits_apart(keys)
        skeleton = skeleton_of(config)
        known = {ROPE_FACTORS, *gguf_places(skeleton, str(keys["general.architecture"]))}
        _refuse_unexpected(what, sorted(shapes.keys() - known))
        _check_size(what, skeleton, shapes.values(), is_quantized=False)
        model, loading = load_weights(link, dtype, config)
        _check_loading(what, loading)
        _check_finite(what, model)
        with one_line(f"the tokenizer in {path}"):
            tokenizer = load_tokenizer(link)
        if digits_apart:
            _split_digits(tokenizer)
        if has_no_space_before(keys):
            _keep_beginnings(tokenizer)
        model.generation_config.eos_token_id = ends_of(keys) or None
        return model, tokenizer


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The configuration that `load_gguf` makes from a GGUF file's keys. Reads no weights.

    Raises UsageError, in one line, if `load_gguf` would refuse the file's keys or its size.
    """
    with one_line(f"the GGUF file {path}"), gguf_alone(path) as link:
        fields: dict[str, Any] = _gguf_config(path, link, *_read_head(path, link)).to_dict()
        return fields


def _read_head(path: Path, link: Path) -> tuple[dict[str, Any], dict[str, Shape]]:
    """The keys and the tensors' shapes of a complete GGUF file."""
    check_magic(path)
    try:
        keys, shapes, whole_bytes = read_gguf_head(link)
    except struct.error as error:  # the file ends before the next number
        raise UsageError(f"{path} is cut off in its head: get it again") from error
    _check_whole(path, whole_bytes)
    return keys, shapes


def _gguf_config(path: Path, link: Path, keys: dict[str, Any], shapes: dict[str, Shape]) -> Any:
    with _named(f"the GGUF file {path}"):
        _check_claims(path, keys, shapes)
        config = load_config(link)
        factors = read_gguf_tensor(link, ROPE_FACTORS) if ROPE_FACTORS in shapes else None
        complete(config, keys, factors)
        check_keys(keys, config)
    return config


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Adds the name of the file to a refusal."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{what} isn't served: {error}") from error


def _split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes each digit a word, so that the spaces before a number stay together."""
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def _keep_beginnings(tokenizer: PreTrainedTokenizerBase) -> None:
    """Adds no space before a text, and removes none from the beginning of an answer."""
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.pre_tokenizer = None
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )


def _check_whole(path: Path, whole_bytes: int) -> None:
    size_bytes = path.stat().st_size
    if size_bytes < whole_bytes:
        raise UsageError(
            f"{path} is cut off: it has {size_bytes} bytes, and its tensors take {whole_bytes}; "
            "get it again"
        )


def _check_claims(path: Path, keys: dict[str, Any], shapes: dict[str, Shape]) -> None:
    """Raises UsageError if the file claims more layers or numbers than its size allows."""
    count = keys.get(f"{keys['general.architecture']}.block_count")
    if not isinstance(count, int) or count > len(shapes):
        raise UsageError(f"it says that it has {count} layers, with {len(shapes)} tensors")
    numbers, size_bytes = sum(math.prod(shape) for shape in shapes.values()), path.stat().st_size
    # A number takes at least a bit.
    if numbers > 8 * size_bytes:
        raise UsageError(
            f"it says that it has {numbers} numbers, in {size_bytes} bytes: get it again"
        )


def _check_size(
    what: str, skeleton: PreTrainedModel, shapes: Collection[Shape], *, is_quantized: bool
) -> None:
    """Raises UsageError for a configuration that asks for more numbers than the files have.

    transformers would allocate memory for all of them.
    """
    computed = sum(table.numel() for table in skeleton.buffers())
    wanted = sum(weight.numel() for weight in skeleton.parameters())
    wanted += max(0, computed - _TABLE_NUMBERS)
    held = sum(math.prod(shape) for shape in shapes)
    if wanted > held * (_PACKED_WEIGHTS if is_quantized else 2):
        raise UsageError(
            f"{what} is incomplete: its configuration asks for {wanted} numbers, and its files "
            f"have {held}; get it again"
        )


def _check_loading(what: str, loading: Loading) -> None:
    if loading.missing:
        raise UsageError(
            f"{what} is incomplete: {len(loading.missing)} of its weights are missing, "
            f"{loading.missing[0]} first; get it again"
        )
    if loading.mismatched:
        name, held, wanted = loading.mismatched[0]
        raise UsageError(
            f"{what} doesn't fit its configuration: {name} is {list(held)}, but the configuration "
            f"makes it {list(wanted)}; get both again from one source"
        )
    _refuse_unexpected(what, loading.unexpected)


def _refuse_unexpected(what: str, names: list[str]) -> None:
    if not names:
        return
    remedy = "correct its configuration so that it asks for them, or take another model"
    if any(name.endswith(_QUANTIZED_ENDS) for name in names):
        remedy = "its weights are quantized, so take the model before quantization"
    elif any("lora_" in name for name in names):
        remedy = "it has an adapter, so merge that into the model"
    raise UsageError(
        f"{what} would lose {len(names)} of its tensors, {names[0]} first, for which the model has "
        f"no place: {remedy}"
    )


def _by_place(
    what: str, skeleton: PreTrainedModel, tensors: dict[str, Stored]
) -> dict[str, Stored]:
    """The tensors, by the names of the model's weights.

    transformers accepts a weight's name with and without the prefix of the inner model. Raises
    UsageError if a weight is stored under both names: one of the two would be lost.
    """
    places, prefix = skeleton.state_dict().keys(), f"{skeleton.base_model_prefix}."
    names: dict[str, str] = {}
    for name in tensors:
        inner = name
        while inner.startswith(prefix):
            inner = inner.removeprefix(prefix)
        place = next((path for path in (name, prefix + inner, inner) if path in places), inner)
        if place in names:
            raise UsageError(
                f"{what} has {names[place]} and {name}, which are one weight of the model: remove "
                "one of them"
            )
        names[place] = name
    return {place: tensors[name] for place, name in names.items()}


def _check_tied(what: str, skeleton: PreTrainedModel, tensors: dict[str, Stored]) -> None:
    """Raises UsageError for tied weights that are stored twice with different bytes."""
    for copy, source in skeleton.all_tied_weights_keys.items():
        both = copy in tensors and source in tensors
        if both and not _same_bytes(_read(tensors[copy]), _read(tensors[source])):
            raise UsageError(
                f"{what} has {copy} and {source} of different numbers, and its configuration "
                "ties them: set tie_word_embeddings to false if they are meant to differ"
            )


def _check_frequencies(what: str, model: PreTrainedModel, tensors: dict[str, Stored]) -> None:
    """Raises UsageError if stored frequencies differ from the computed ones.

    Old versions of transformers stored them; the current version ignores them.
    """
    computed = [table for name, table in model.named_buffers() if name.endswith(_FREQUENCIES)]
    for name, stored in tensors.items():
        if name.endswith(_FREQUENCIES) and computed:
            held, meant = _read(stored).float(), computed[0].float()
            if held.shape != meant.shape or not torch.allclose(held, meant, rtol=1e-2):
                raise UsageError(
                    f"{what} has {name} with other frequencies than its configuration gives; they "
                    "would be ignored: state them in rope_parameters of config.json"
                )


def _read(stored: Stored) -> torch.Tensor:
    with safe_open(stored.file, framework="pt") as file:
        found: torch.Tensor = file.get_tensor(stored.name)
    return found


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _check_finite(what: str, model: PreTrainedModel) -> None:
    """Raises UsageError for NaN or infinity, and names the tensor; no answer could be computed."""
    for name, weight in model.state_dict().items():
        if weight.is_floating_point() and weight.numel():
            numbers = weight if weight.element_size() > 1 else weight.float()
            low, high = torch.aminmax(numbers)
            if not (math.isfinite(low.item()) and math.isfinite(high.item())):
                raise UsageError(
                    f"{what} has numbers in {name} that are NaN or infinite: get it again"
                )
