"""describe: from a pool of SGLang's to its parts.

A pool is known by its exact class, which is its module and its name. One that derives from a known
class may hold state that the known one doesn't, so it is refused by name until it is described
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from kvtide.plugin.description import Description, Refused
from kvtide.plugin.sglang.homes import name_of
from kvtide.plugin.sglang.pools.compressed_keys import with_compressed_keys

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

    def part(self, pool: Any) -> Description:
        """The description of a pool within this one."""
        return _describe_pool(replace(self, pool=pool))


@final
@dataclass(frozen=True, slots=True)
class NeverMoved:
    """A describer of a class that kvtide won't move, and why."""

    reason: str

    def __call__(self, subject: Subject) -> Description:
        """Raises Refused."""
        raise Refused(f"{type(subject.pool).__name__}: {self.reason}")


def describers() -> Mapping[str, Describer]:
    """Of each known class, by its name in SGLang."""
    from kvtide.plugin.sglang.pools import (
        ascend,
        deepseek_v4,
        keys_values,
        latent,
        recurrent_state,
        sliding_window,
        unified_memory,
    )

    known: dict[str, Describer] = {}
    for module in (
        keys_values,
        latent,
        sliding_window,
        recurrent_state,
        unified_memory,
        ascend,
        deepseek_v4,
    ):
        known.update(module.DESCRIBERS)
    return known


def describe(subject: Subject) -> Description:
    """What the pool consists of, and what the request pool keeps of a request beside it, if any.

    Raises Refused, with the reason, for what kvtide won't move.
    """
    from kvtide.plugin.sglang.pools.recurrent_state import with_state_of_requests

    description = with_state_of_requests(subject, _describe_pool(subject))
    return with_compressed_keys(subject.request_pool, description)


def _describe_pool(subject: Subject) -> Description:
    name = name_of(subject.pool)
    describer = describers().get(name)
    if describer is None:
        raise Refused(f"pool class {name} isn't known to kvtide; SGLang's own copy is used")
    return describer(subject)
