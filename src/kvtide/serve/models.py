"""Opens a model by its name: weights and tokenizer, or an error of one line.

Weights are read only from safetensors and GGUF files. Nothing is unpickled, and no code that comes
with a model is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import torch
from huggingface_hub.errors import HFValidationError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvtide.errors import UsageError, shortened
from kvtide.models.names import BUILT_IN, HUB_ID, TINY_RANDOM
from kvtide.serve.adapter import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    random_llama,
    wrap_tokenizer,
)
from kvtide.serve.adapter_files import eos_ids_of, quiet, save
from kvtide.serve.checkpoint import load_folder, load_gguf, one_line, short_reason
from kvtide.serve.fetch import SMOLLM2, Progress, kept_model

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""The dtypes that weights and KV can have, by name."""

_ACCEPTED = (
    f"{SMOLLM2.name}, {TINY_RANDOM}, a Hugging Face folder, a .gguf file, "
    "or a hub id such as org/name"
)
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True)
class OpenModel:
    """A causal language model in evaluation mode, with its tokenizer.

    `name` is the name that was given to `open_model`. Each of `eos_ids` ends an answer.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    eos_ids: frozenset[int]


def open_model(
    name: str, *, dtype: str = "bfloat16", progress: Progress | None = None
) -> OpenModel:
    """Loads a model onto the CPU, with weights of `dtype`, which is one of `DTYPES`.

    `name` is `smollm2` (the first call fetches and converts it, which takes a minute),
    `tiny-random`, a Hugging Face folder, a `.gguf` file, or a hub id. `progress` is called during
    long work. Raises UsageError, in one line, if there is no such model or it isn't complete.
    """
    if dtype not in DTYPES:
        raise UsageError(f"there is no dtype {dtype!r} for a model: choose {' or '.join(DTYPES)}")
    report = progress or _say_nothing
    if name == TINY_RANDOM:
        model, tokenizer = _tiny_random(DTYPES[dtype])
    elif name == SMOLLM2.name:
        folder = kept_model(SMOLLM2, _convert_gguf, report)
        model, tokenizer = load_folder(folder, DTYPES[dtype])
    else:
        model, tokenizer = _load_named(name, DTYPES[dtype], report)
    model.requires_grad_(False)
    model.eval()
    return OpenModel(model, tokenizer, name, eos_ids_of(model, tokenizer))


def _load_named(
    name: str, dtype: torch.dtype, report: Progress
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        path = Path(name).expanduser()
        is_folder, is_file = bool(name) and path.is_dir(), path.is_file()
    # RuntimeError: `~user` names an unknown user.
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or short_reason(error)
        raise UsageError(
            f"there is no model {shortened(name, 80)!r} ({reason}): name {_ACCEPTED}"
        ) from error
    if is_folder:
        return load_folder(path, dtype)
    if is_file:
        report(f"reading {name}", 0, None)
        return load_gguf(path, dtype)
    # A name with two slashes, or one that ends in .gguf, is the path of a missing file.
    if HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return load_folder(_fetch_from_hub(name, report), dtype)
    raise UsageError(f"there is no model {name!r}: name {_ACCEPTED}")


def _convert_gguf(path: Path, folder: Path) -> None:
    """Writes a GGUF file as a Hugging Face folder of bfloat16 safetensors."""
    model, tokenizer = load_gguf(path, torch.bfloat16)
    with one_line(f"the converted model in {folder}"):
        save(model, tokenizer, folder)


def _fetch_from_hub(name: str, report: Progress) -> Path:
    report(f"fetching {name} from the hub", 0, None)
    try:
        with quiet():
            # Only files at the top: folders hold the same weights in other formats.
            folder = huggingface_hub.snapshot_download(
                name, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]
            )
    except HFValidationError as error:  # a name that no model of the hub can have
        raise UsageError(f"there is no model {shortened(name, 80)!r}: name {_ACCEPTED}") from error
    # The hub raises its HTTP client's errors, and changes the client between releases.
    except Exception as error:
        raise UsageError(
            f"the model {name} can't be fetched: there is no such folder here, and the hub "
            f"fails: {short_reason(error)}; name {_ACCEPTED}"
        ) from error
    return Path(folder)


def _tiny_random(dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Llama of 4 layers with fixed random weights; needs no network."""
    tokenizer = _byte_tokenizer()
    sizes = {name: size for name, size in BUILT_IN[TINY_RANDOM].items() if name != "model_type"}
    model = random_llama(
        tokenizer, dtype, intermediate_size=128, max_position_embeddings=8192, **sizes
    )
    # Fixed numbers, drawn in the order of the weights' names: transformers may change its own.
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for key, weight in sorted(model.named_parameters()):
            if not key.endswith("norm.weight"):
                # Large enough that bfloat16 logits differ and attention isn't uniform.
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model, tokenizer


_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _byte_tokenizer() -> PreTrainedTokenizerBase:
    """Four special tokens and one token for each byte: 260 in all."""
    special = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap_tokenizer(
        tokenizer,
        bos="<|endoftext|>",
        eos="<|im_end|>",
        pad="<|pad|>",
        chat_template=_CHAT_TEMPLATE,
    )


def _say_nothing(what: str, done: int, total: int | None) -> None:
    pass
