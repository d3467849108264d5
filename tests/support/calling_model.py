"""A model of random weights that calls a tool, and answers with what the tool gave.

Some of its tokens are followed by a certain token, whatever stands before: so what it says of a
tool is known. Everything else it says is as random as what the small random model says.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvtide.serve.adapter import PreTrainedTokenizerBase, random_llama, wrap_tokenizer

CALLS = ({"a": 1, "b": 2}, {"a": 3, "b": 4})
"""The arguments of the calls of `add` in an answer to whoever sends tools."""
TEXT = "Let me see."
"""What stands before them."""
SUM, ANSWER = "sum=7", "They are 7."
"""A result that the model knows, and its answer to that."""
_ARGUMENTS = '"arguments":'
_FIRST, _SECOND = (
    f'\n{{"name": "add", {_ARGUMENTS} {{"a": {call["a"]}, "b": {call["b"]}}}}}\n' for call in CALLS
)
_SPECIAL = ("<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|calls|>")
_MARKS = ("<tool_call>", "</tool_call>")
_BOTH = f"{_FIRST}</tool_call>\n<tool_call>{_SECOND}"
_FOLLOWERS = {
    "<|calls|>": TEXT,
    TEXT: "<tool_call>",
    "<tool_call>": _BOTH,
    _BOTH: "</tool_call>",
    "</tool_call>": "<|im_end|>",
    _ARGUMENTS: ' {"a": 5,',
    ' {"a": 5,': ' "b": 6}}\n',
    ' "b": 6}}\n': "</tool_call>",
    SUM: ANSWER,
    ANSWER: "<|im_end|>",
}
"""Tokens, and what the model says after each."""
_READ = (_ARGUMENTS, SUM)
"""The tokens among them that are made of text."""
_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nCall as in <tool_call>: {{ tools | tojson }}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% if message.role != 'tool' %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if messages[-1].role != 'tool' %}<|im_start|>assistant\n"
    "{% if tools %}<|calls|>{% endif %}{% endif %}"
)


def write_calling_model(folder: Path) -> Path:
    """Writes the model into a folder of its own there, and returns that."""
    tokenizer = _tokenizer()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = random_llama(
        tokenizer,
        torch.float32,
        hidden_size=64,
        intermediate_size=64,
        max_position_embeddings=4096,
        **sizes,
    )
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for key, weight in sorted(model.named_parameters()):
            if not key.endswith("norm.weight"):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                weight[: len(_FOLLOWERS)] = 0  # layers don't touch these directions
        _teach(model.get_input_embeddings().weight, model.lm_head.weight, tokenizer)
    path = folder / "calling"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _teach(
    embeddings: torch.Tensor, head: torch.Tensor, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Gives each token that is followed by a certain one a direction of its own, which asks for it.

    `embeddings` and `head` are [vocab, hidden].
    """
    ids = tokenizer.convert_tokens_to_ids
    head[[ids(_spelt(word)) for word in {*_FOLLOWERS, *_FOLLOWERS.values()} - {"<|im_end|>"}]] = 0
    for direction, (word, follower) in enumerate(_FOLLOWERS.items()):
        embeddings[:, direction] = 0
        head[:, direction] = 0
        embeddings[ids(_spelt(word))] = 0
        embeddings[ids(_spelt(word)), direction] = 100
        head[ids(_spelt(follower)), direction] = 10


def _spelt(word: str) -> str:
    """Returns the word as a vocabulary has it."""
    if word in (*_SPECIAL, *_MARKS):
        return word
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(part for part, _ in splitter.pre_tokenize_str(word))


def _tokenizer() -> PreTrainedTokenizerBase:
    """Makes one of bytes, with a token for each of the words."""
    words = [*_SPECIAL, *_MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    for word in map(_spelt, _READ):
        for length in range(2, len(word) + 1):
            merges.append((word[: length - 1], word[length - 1]))
            words.append(word[:length])
    words += [_spelt(word) for word in (*_FOLLOWERS, *_FOLLOWERS.values())]
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _MARKS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap_tokenizer(
        tokenizer, bos="<|endoftext|>", eos="<|im_end|>", pad="<|pad|>", chat_template=_TEMPLATE
    )
