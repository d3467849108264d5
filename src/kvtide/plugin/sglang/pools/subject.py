"""Subject: a pool of SGLang's to be described, with all that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

from kvtide.plugin.description import Description
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.homes import name_of

Describer = Callable[["Subject"], Description]
"""Makes a description of a pool of its class. Raises Refused."""


@final
@dataclass(frozen=True, slots=True)
class Subject:
    """A pool, and where SGLang keeps what belongs to it: None in tests of pools alone."""

    pool: Any
    allocator: Any = None
    request_pool: Any = None
    """SGLang's req_to_token_pool, which has the recurrent state of some models."""
    window_tokens: int | None = None
    """How far sliding-window attention looks back, where the model has any: SGLang's
    sliding_window_size."""
    describers: Mapping[str, Describer] = field(default_factory=dict)
    """The describer of each known class, by its name in SGLang; `describe` fills it in."""

    @classmethod
    def in_scheduler(
        cls, allocator: Any, request_pool: Any, window_tokens: int | None = None
    ) -> Subject:
        """The pool that the allocator hands out slots of, in a scheduler with this request pool."""
        return cls(allocator.get_kvcache(), allocator, request_pool, window_tokens)

    def part(self, pool: Any) -> Description:
        """The description of a pool within this one. Raises Refused."""
        return replace(self, pool=pool).described()

    def described(self) -> Description:
        """The description of the pool alone, by the exact class. Raises Refused."""
        name = name_of(self.pool)
        describer = self.describers.get(name)
        if describer is None:
            raise Refused(f"pool class {name} isn't known to kvtide; SGLang's own copy is used")
        return describer(self)


@final
@dataclass(frozen=True, slots=True)
class NeverMoved:
    """A describer of a class that kvtide won't move, and why."""

    reason: str

    def __call__(self, subject: Subject) -> Description:
        """Raises Refused."""
        raise Refused(f"{type(subject.pool).__name__}: {self.reason}")
