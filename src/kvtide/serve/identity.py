"""The identity of a model: a hash of all of it that decides an answer."""

from __future__ import annotations

import json
from collections.abc import Set

import torch
import xxhash

from kvtide.serve.adapter import PreTrainedModel, PreTrainedTokenizerBase

# Where the model lies, and who wrote its configuration, decide nothing.
_WITHOUT_EFFECT = ("_name_or_path", "transformers_version")


def hash_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos_ids: Set[int]) -> str:
    """32 hex digits (XXH3) for weights, configuration, tokenizer and chat template.

    Reads every weight once, at the speed of memory; waits for those on a device.
    """
    digest = xxhash.xxh3_128()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        flat = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    config = json.loads(model.config.to_json_string(use_diff=False))
    for key in _WITHOUT_EFFECT:
        config.pop(key, None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rest = [
        config,
        "" if backend is None else backend.to_str(),
        tokenizer.chat_template,
        sorted(eos_ids),
    ]
    digest.update(json.dumps(rest, sort_keys=True).encode())
    return digest.hexdigest()
