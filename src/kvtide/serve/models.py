"""Opens a model by its name: weights and tokenizer, or an error of one line.

Weights are read only from safetensors and GGUF files. Nothing is unpickled, and no code that comes
with a model is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvtide.errors import UsageError
from kvtide.models.names import BUILT_IN, TINY_RANDOM
from kvtide.serve.adapter import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    random_llama,
    wrap_tokenizer,
)
from kvtide.serve.adapter_files import eos_ids_of
from kvtide.serve.checkpoint import load_folder, load_gguf
from kvtide.serve.fetch import Progress
from kvtide.serve.find import FoundModel, find_model
from kvtide.serve.identity import hash_of

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""The dtypes that weights and KV can have, by name."""


@dataclass(frozen=True)
class OpenModel:
    """A causal language model in evaluation mode, with its tokenizer.

    `name` is the name that was given to `open_model`. Each of `eos_ids` ends an answer.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    eos_ids: frozenset[int]

    @property
    def context_limit(self) -> int | None:
        """How many positions the model has, or None if its configuration doesn't say."""
        text_config = self.model.config.get_text_config(decoder=True)
        return getattr(text_config, "max_position_embeddings", None)

    @cached_property
    def identity(self) -> str:
        """The model's hash (see `hash_of`), computed once: nobody changes the model meanwhile."""
        return hash_of(self.model, self.tokenizer, self.eos_ids)


def open_model(
    name: str | FoundModel, *, dtype: str = "bfloat16", progress: Progress | None = None
) -> OpenModel:
    """Loads a model onto the CPU, with weights of `dtype`, which is one of `DTYPES`.

    `name` is one that `find_model` takes, or what that has found. `progress` is called during long
    work. Raises UsageError, in one line, if there is no such model or it isn't complete.
    """
    if dtype not in DTYPES:
        raise UsageError(f"there is no dtype {dtype!r} for a model: choose {' or '.join(DTYPES)}")
    report = progress or _say_nothing
    found = find_model(name, progress=report) if isinstance(name, str) else name
    if found.path is None:
        model, tokenizer = _tiny_random(DTYPES[dtype])
    elif found.path.is_dir():
        model, tokenizer = load_folder(found.path, DTYPES[dtype])
    else:
        report(f"reading {found.name}", 0, None)
        model, tokenizer = load_gguf(found.path, DTYPES[dtype])
    model.requires_grad_(False)
    model.eval()
    return OpenModel(model, tokenizer, found.name, eos_ids_of(model, tokenizer))


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
