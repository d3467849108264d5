"""Subject: a pool of SGLang to describe, with all that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

from kvtide.plugin.description import Description
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.package import name_of

Describer = Callable[["Subject"], Description]
"""A function that describes pools of a class. It may raise Refused."""


@final
@dataclass(frozen=True, slots=True)
class Subject:
    """A pool with its allocator and its request pool, which are None in tests of single pools."""

    pool: Any
    allocator: Any = None
    request_pool: Any = None
    """SGLang's req_to_token_pool. For some models it has the recurrent state."""
    window_tokens: int | None = None
    """SGLang's sliding_window_size: how far back attention with a window looks, or None."""
    describers: Mapping[str, Describer] = field(default_factory=dict)
    """The describer of each known class, by the class's name. `describe` fills it in."""

    @classmethod
    def in_scheduler(
        cls, allocator: Any, request_pool: Any, window_tokens: int | None = None
    ) -> Subject:
        """The pool of this allocator, in a scheduler with this request pool."""
        return cls(allocator.get_kvcache(), allocator, request_pool, window_tokens)

    def part(self, pool: Any) -> Description:
        """Describes a pool inside this pool. Raises Refused."""
        return replace(self, pool=pool).described()

    def described(self) -> Description:
        """Describes this pool by its exact class. Raises Refused."""
        name = name_of(self.pool)
        describer = self.describers.get(name)
        if describer is None:
            raise Refused(f"pool class {name} isn't known to kvtide; SGLang's own copy is used")
        return describer(self)


@final
@dataclass(frozen=True, slots=True)
class NeverMoved:
    """The describer of a class that kvtide never moves, with the reason."""

    reason: str

    def __call__(self, subject: Subject) -> Description:
        """Raises Refused."""
        raise Refused(f"{type(subject.pool).__name__}: {self.reason}")
