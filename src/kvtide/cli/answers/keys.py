"""The key of an answer: a hash of all that decides it. A line with the same key is kept.

What has no influence on an answer isn't in its key: the size of the pool, for example, or the seed
of a request that always takes the likeliest token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvtide.layout.canonical import canonical_json, fingerprint_of

if TYPE_CHECKING:
    from kvtide.serve.request import Request, SamplingParams

_OF_CHANCE = ("seed", "top_k", "top_p")


@dataclass(frozen=True)
class Conditions:
    """What decides all answers of a run: the model's hash, and the settings by their names."""

    model: str
    """The model's name, which is said and decides nothing."""
    model_hash: str
    settings: dict[str, Any]
    sampling: SamplingParams
    """What holds for a prompt that says nothing else."""

    def header(self) -> dict[str, Any]:
        """The run in words, to name what differs from another run."""
        decisive = {"model_hash": self.model_hash, **self.settings}
        return {"model": self.model, "settings": decisive | asdict(self.sampling)}

    def key(self, requests: Sequence[Request], form: str) -> str:
        """32 hex digits (BLAKE2b) for the answer to a prompt, whose samples the requests are.

        `form` is the form of the answer's line.
        """
        decisive = {
            "form": form,
            "model": self.model_hash,
            "settings": self.settings,
            "prompt": list(requests[0].prompt_ids),
            "samples": [_decisive(request.params) for request in requests],
        }
        return fingerprint_of(canonical_json(decisive)).hex()


def _decisive(params: SamplingParams) -> dict[str, Any]:
    values = asdict(params)
    if params.temperature == 0:
        values = {name: value for name, value in values.items() if name not in _OF_CHANCE}
    return values
