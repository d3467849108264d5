"""Request: one prompt, its answer so far, and the place of its KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, final

from kvtide.errors import UsageError

if TYPE_CHECKING:
    from kvtide.snapshot import Snapshot  # which imports torch; commands make these without it


@final
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when the answer ends.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 exclude no tokens. `seed` seeds the random
    generator of this request. An answer ends before the first of the `stop` strings, at an
    end-of-text token, or after `max_new_tokens` tokens. With `logprobs` the log-probability of each
    token is kept, and of that many of the likeliest tokens beside it; None keeps none.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for an invalid value."""
        for name, value, holds, range_text in (
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, 0 <= self.temperature < inf, "0 or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", self.seed, 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
            ("logprobs", self.logprobs, (self.logprobs or 0) >= 0, "None, or 0 or more"),
        ):
            if not holds:
                raise UsageError(f"{name} is {value}; it must be {range_text}")


@final
@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its text, and the natural logarithm of its probability."""

    token_id: int
    text: str
    logprob: float


@final
@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """The log-probabilities of one step: of the chosen token, and of the likeliest ones."""

    chosen: TokenLogprob
    likeliest: tuple[TokenLogprob, ...]
    """From the likeliest on; of equal ones the token with the smaller id comes first."""


@final
@dataclass(eq=False, slots=True)
class PrefixBlock:
    """The KV of tokens that requests share: in `pages`, or in `snapshot` while it has none.

    `kvtide.serve.prefix` says which tokens, and who may read them.
    """

    key: str
    parent: str
    """The key of what is before its tokens."""
    tokens: tuple[int, ...]
    pages: list[int]
    snapshot: Snapshot | None = None
    readers: int = 0
    """How many running requests read it. It leaves the device only if there are none."""
    waiters: int = 0
    """How many retracted requests need it to come back."""


@final
@dataclass(eq=False)
class Request:
    """One prompt and its answer. The engine fills in all fields but the first five."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams = SamplingParams()

    key: str = ""
    """A hash of all that decides its answer, so that another run can go on with it; or empty."""
    salt: bytes = field(default=b"", repr=False)
    """The secret of its tenant: requests with another one share no KV with it."""
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    """`stop`, `length`, `error` or `abort`; None until the answer ends."""
    error: str | None = None
    retractions: int = 0
    exact: bool = True
    """False once KV was computed again in different steps than before; `--fast` allows that."""
    logit_digests: list[int] = field(default_factory=list)
    """The XXH3 128 hash of the logits of each output token, if the engine keeps them."""
    logprobs: list[StepLogprobs] = field(default_factory=list)
    """An entry for each output token, if `params` ask for them."""

    context_limit: int | None = None
    """How many positions the model has; an answer ends where they end. None if it has no limit."""
    arrival: int = 0
    """The request's number in the order of arrival. The newest is retracted first."""
    pages: list[int] = field(default_factory=list)
    """The pages that the request holds, in the order of its tokens."""
    stored: int = 0
    """How many of its first tokens have KV, in its pages or, while it is retracted, in the blocks
    that it awaits and in its snapshot."""
    snapshot: Snapshot | None = None
    snapshot_key: str = ""
    """The key that its snapshot must have."""
    blocks: list[PrefixBlock] = field(default_factory=list)
    """Blocks of a PrefixCache that it reads; their pages come first in `pages`."""
    tail: PrefixBlock | None = None
    """The end of its prompt behind these, for others to copy; it lies in the request's pages."""
    awaited: list[PrefixBlock] = field(default_factory=list)
    """The blocks that it read when it was retracted, and reads again when it comes back."""
    block_keys: list[str] = field(default_factory=list)
    """The key of what is before its blocks, and those of its blocks, as far as they were needed."""
    cached_tokens: int = 0
    """How many tokens of its prompt weren't computed, since another request had their KV."""
    lost: int = 0
    """How many of its first tokens had KV that was lost, so that it is computed again."""

    @property
    def token_count(self) -> int:
        """The number of tokens of prompt and answer. The last token has no KV yet."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def most_new_tokens(self) -> int:
        """The length of the longest answer: `max_new_tokens`, or what the context leaves of it."""
        wanted = self.params.max_new_tokens
        if self.context_limit is None:
            return wanted
        # The last token needs no position, because it never has KV.
        return max(1, min(wanted, self.context_limit - len(self.prompt_ids) + 1))

    @property
    def longest(self) -> int:
        """The most tokens that will ever have KV. The last token never needs it."""
        return len(self.prompt_ids) + self.most_new_tokens - 1

    def tokens(self, first: int, count: int) -> list[int]:
        """The ids of `count` tokens, from number `first` on."""
        found = self.prompt_ids[first : first + count]
        if len(found) < count:  # the prompt ends before
            first = max(0, first - len(self.prompt_ids))
            found = [*found, *self.output_ids[first : first + count - len(found)]]
        return found

    def is_ready_after(self, count: int) -> bool:
        """Whether all its tokens have KV after `count` more, so that its next token is chosen."""
        return self.stored + count == self.token_count

    def next_count(self, chunk_tokens: int, *, replay: bool) -> int:
        """How many tokens of the request its next step computes.

        With `replay` the count depends on the request alone. Prompt chunks end at multiples of
        `chunk_tokens`, and a step computes one answer token, even if the answer is known because
        its KV was lost. So a computation that is repeated gives the same numbers.
        """
        end = len(self.prompt_ids) if replay else self.token_count
        if self.stored >= end:
            return 1
        return min(end - self.stored, chunk_tokens - self.stored % chunk_tokens)
