"""Live: a request that has not ended, and what belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import final

import torch
import xxhash
from tokenizers import Tokenizer

from kvtide.serve.logprobs import step_logprobs
from kvtide.serve.request import Request
from kvtide.serve.sampling import Sampler
from kvtide.serve.text import TextStream
from kvtide.tide import Tide


@final
@dataclass(frozen=True, slots=True)
class Answering:
    """What the answers of an engine have in common.

    Each of `eos_ids` ends an answer. `token_text` gives the text of a token. `keep_logits` keeps a
    hash of the logits of each token.
    """

    tokenizer: Tokenizer
    token_text: Callable[[int], str]
    eos_ids: Set[int]
    keep_logits: bool


@final
class Live:
    """A request that has not ended, with its sampler, its text and its slots."""

    def __init__(self, request: Request, answering: Answering) -> None:
        self.request = request
        self.sampler = Sampler(request.params)
        self._answering = answering
        self._text = TextStream(answering.tokenizer, request.params.stop)
        self._pages: list[int] = []
        self._slots = torch.empty(0, dtype=torch.int64)

    def slots(self, tide: Tide) -> torch.Tensor:
        """The slots of the request's pages, int64; computed again only when its pages change."""
        if self._pages != self.request.pages:
            self._pages = list(self.request.pages)
            self._slots = torch.from_numpy(tide.pool.slots_of(self._pages))
        return self._slots

    def recall(self) -> None:
        """Makes the text of the tokens that the request has from an earlier engine."""
        for token in self.request.output_ids:
            self._text.push(token)
        self.request.text = self._text.text

    def advance(self, logits: torch.Tensor) -> bool:
        """Takes one token from `logits` [vocab]; True if it ends the request."""
        request, answering = self.request, self._answering
        try:
            token = self.sampler.choose(logits)
            if (count := request.params.logprobs) is not None:
                request.logprobs.append(step_logprobs(logits, token, count, answering.token_text))
        except ArithmeticError as error:
            request.finish_reason, request.error = "error", str(error)
            return True
        request.output_ids.append(token)
        if answering.keep_logits:
            data = logits.contiguous().view(torch.uint8).cpu().numpy().data
            request.logit_digests.append(xxhash.xxh3_128_intdigest(data))
        stopped = self._text.push(token)
        if token in answering.eos_ids or stopped:
            request.finish_reason = "stop"
        elif len(request.output_ids) >= request.most_new_tokens:
            request.finish_reason = "length"
        if request.finish_reason is not None and not stopped:
            self._text.finish()
        request.text = self._text.text
        return request.finish_reason is not None
