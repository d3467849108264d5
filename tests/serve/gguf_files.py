"""Small GGUF files, written with the format's own library, as llama.cpp's converters do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy

from kvtide.serve.models import OpenModel

Array = numpy.ndarray[Any, Any]
Write = Callable[[Any], None]


def write_gguf(
    opened: OpenModel,
    path: Path,
    more: Write = lambda writer: None,
    *,
    tensors: Mapping[str, Array] | None = None,
    without: tuple[str, ...] = (),
    split: str = "default",
    is_sentencepiece: bool = False,
) -> Path:
    """Writes a model in float32 with its tokenizer; Llama's rows are in llama.cpp's order.

    `more` writes further keys, and `tensors` are added by their names. Keys and tensors whose names
    end with an element of `without` are left out. `split` names how the tokenizer cuts texts into
    words; SentencePiece has its own rule for that.
    """
    arch = arch_of(opened)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys_of(opened).items():
        name = f"{arch}.{key}"
        if not name.endswith(without or ("\n",)):
            writer.add_float32(name, value) if isinstance(value, float) else writer.add_uint32(
                name, value
            )
    if is_sentencepiece:
        write_pieces(writer, opened.model.config.vocab_size)
    else:
        write_tokenizer(opened, writer, split)
    more(writer)
    for name, array in {**tensors_of(opened), **(tensors or {})}.items():
        if not name.endswith(without or ("\n",)):
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def arch_of(opened: OpenModel) -> str:
    """Returns llama.cpp's name of the kind of model."""
    return str(opened.model.config.model_type).replace("_moe", "moe")


def keys_of(opened: OpenModel) -> dict[str, int | float]:
    """Returns the model's keys and values, without the kind's name that begins each key."""
    config = opened.model.config
    experts = {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    }
    return {
        **{key: getattr(config, name) for key, name in experts.items() if hasattr(config, name)},
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": head_dim_of(opened),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
    }


def head_dim_of(opened: OpenModel) -> int:
    """Returns the width of an attention head."""
    config = opened.model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(width)


def write_tokenizer(opened: OpenModel, writer: Any, split: str) -> None:
    """Writes the tokenizer's texts and ids."""
    tokenizer = opened.tokenizer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_token_list(tokens)
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds[token.startswith("<|")] for token in tokens])
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)


def write_pieces(writer: Any, count: int) -> None:
    """Writes a SentencePiece tokenizer that knows letters, bytes and `▁ab`."""
    special = ["<unk>", "<s>", "</s>"]
    letters = ["▁", "a", "b", "▁a", "ab", "▁ab"]
    tokens = special + letters + [f"<0x{byte:02X}>" for byte in range(count - 9)]
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(count)])
    writer.add_token_types(
        [kinds.UNKNOWN, *[kinds.CONTROL] * 2, *[kinds.NORMAL] * 6, *[kinds.BYTE] * (count - 9)]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def tensors_of(opened: OpenModel) -> dict[str, Array]:
    """Returns the weights by llama.cpp's names."""
    config = opened.model.config
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch_of(opened))
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for key, weight in opened.model.state_dict().items():
        stem, suffix = key.rsplit(".", 1)
        array = weight.float().numpy()
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        if stem.endswith(".experts"):
            parts = array.reshape(len(array), 2, -1, array.shape[-1]).swapaxes(0, 1)
            named = zip(("gate", "up"), parts, strict=True)
            for part, rows in named if suffix == "gate_up_proj" else [("down", array)]:
                name = f"blk.{stem.split('.')[2]}.ffn_{part}_exps.weight"
                found[name] = numpy.ascontiguousarray(rows)
            continue
        if stem.endswith("shared_expert_gate"):
            array = array[0]
        head_count = heads.get(stem.rsplit(".", 1)[-1])
        if head_count and config.model_type == "llama":
            array = interleave_halves(array, head_count)
        found[f"{names.get_name(stem)}.{suffix}"] = array
    return found


def interleave_halves(array: Array, head_count: int) -> Array:
    """llama.cpp pairs the rows that rotate together; transformers keeps them in two halves."""
    split = array.reshape(head_count, 2, -1, array.shape[-1])
    return numpy.ascontiguousarray(split.swapaxes(1, 2).reshape(array.shape))
