"""ServedModel: what decides the bytes of KV in the server that this process is a rank of."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from kvtide.layout import canonical_json
from kvtide.plugin.ranks import Ranks
from kvtide.plugin.reader import Reader, Table
from kvtide.plugin.sglang.attachment import rank_count
from kvtide.plugin.sglang.hicache.updates import UPDATES, Updates
from kvtide.plugin.sglang.package import SGLANG
from kvtide.plugin.weights import WeightsUnknown, digest_of, folder_of

logger = logging.getLogger(__name__)

_BEFORE_LOADING_S = 2.0
"""For so long a process of SGLang reads no weights. A process's beginning is known to a second."""
_CONFIGURATION = (
    *("load_format", "dtype", "quantization", "quantization_param_path", "kv_cache_dtype"),
    *("json_model_override_args", "model_impl", "model_loader_extra_config"),
    *("speculative_draft_load_format", "speculative_draft_model_quantization"),
)
READS: Table = {
    "ServerArgs": (
        *("model_path", "revision?", "download_dir?", "lora_paths?"),
        *("speculative_draft_model_path?", "speculative_draft_model_revision?"),
        *(f"{name}?" for name in _CONFIGURATION),
    ),
    "LoRARef": ("lora_path?",),
}


@final
@dataclass(frozen=True)
class ServedModel:
    """A running server, as its KV depends on it."""

    engine: str
    """SGLang's version, and the options that change how weights are read and KV is written."""
    start: str
    """A text that no other start of a server has, and that is the same on all of its ranks."""
    weights: str
    """The weights that were loaded: the operator's name for them, or a digest of their files."""
    rank_count: int = 1
    """How many ranks of the server are on this host."""
    updates: Updates = UPDATES

    @property
    def revision(self) -> str:
        """The weights that the server has now."""
        count = self.updates.count
        return f"{self.start}/{count}" if count else self.weights

    @classmethod
    def running(cls, weights: str) -> ServedModel:
        """The server of this process; all of its ranks must call this. `weights`: see settings."""
        import psutil
        from sglang.srt.runtime_context import get_parallel, get_server_args

        parallel, reads = get_parallel(), Reader(get_server_args(), READS)
        random = secrets.randbits(62)
        start = f"start {Ranks([], parallel.tp_group.cpu_group).gather([random])[0][0]:016x}"
        if UPDATES.count:
            weights = start
        if not weights:
            try:
                begun = psutil.Process().create_time() + _BEFORE_LOADING_S
                weights = digest_of(_checkpoints(reads), begun, by_samples=True)
            except WeightsUnknown as error:
                weights = start
                logger.warning(
                    "kvtide can't tell the model's weights (%s), so pages won't outlive this "
                    "server; name the weights with 'weights' in the storage's settings",
                    error,
                )
        return cls(_engine(reads), start, weights, rank_count(parallel))


def _engine(reads: Reader) -> str:
    options = {name: str(reads[name]) for name in _CONFIGURATION}
    return f"sglang {SGLANG.version} {canonical_json(options)}"


def _checkpoints(reads: Reader) -> Iterator[Path]:
    """Where the weights are: the model's, the draft model's, and those of LoRA adapters.

    SGLang names the KV of an adapter that was given at the start by the adapter's name and path.
    """
    yield folder_of(reads["model_path"], reads["revision"], reads["download_dir"])
    draft = reads["speculative_draft_model_path"]
    if draft:
        yield folder_of(draft, reads["speculative_draft_model_revision"], reads["download_dir"])
    for adapter in reads["lora_paths"] or ():
        path = Reader(adapter, READS)["lora_path"]
        if path:
            yield folder_of(path, None, None)
