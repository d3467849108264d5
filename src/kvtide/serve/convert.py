"""Converts a GGUF file to a Hugging Face folder, which loads in a fraction of the time."""

from __future__ import annotations

from pathlib import Path

import torch

from kvtide.serve.adapter_files import save
from kvtide.serve.checkpoint import load_gguf
from kvtide.serve.reasons import one_line


def convert_gguf(path: Path, folder: Path) -> None:
    """Writes the folder, of bfloat16 safetensors. Raises UsageError if the file isn't complete."""
    model, tokenizer = load_gguf(path, torch.bfloat16)
    with one_line(f"the converted model in {folder}"):
        save(model, tokenizer, folder)
