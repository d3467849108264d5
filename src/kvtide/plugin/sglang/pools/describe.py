"""describe: from a pool of SGLang's to its parts.

A pool is known by its exact class, which is its module and its name. A class that derives from a
known class may hold state that the known class doesn't, so it is refused by name until it is
described itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvtide.plugin.description import Description
from kvtide.plugin.sglang.pools import (
    ascend,
    deepseek_v4,
    keys_values,
    latent,
    recurrent_state,
    sliding_window,
    unified_memory,
)
from kvtide.plugin.sglang.pools.compressed_keys import with_compressed_keys
from kvtide.plugin.sglang.pools.recurrent_state import with_state_of_requests
from kvtide.plugin.sglang.pools.subject import Describer, Subject

DESCRIBERS: Mapping[str, Describer] = {
    **keys_values.DESCRIBERS,
    **latent.DESCRIBERS,
    **sliding_window.DESCRIBERS,
    **recurrent_state.DESCRIBERS,
    **unified_memory.DESCRIBERS,
    **ascend.DESCRIBERS,
    **deepseek_v4.DESCRIBERS,
}
"""The describer of each known class, by its name in SGLang."""


def describe(subject: Subject) -> Description:
    """What the pool consists of, and what the request pool keeps of a request beside it, if any.

    Raises Refused, with the reason, for what kvtide won't move.
    """
    subject = with_describers(subject)
    description = with_state_of_requests(subject, subject.described())
    return with_compressed_keys(subject.request_pool, description)


def with_describers(subject: Subject) -> Subject:
    """The subject, which knows how to describe the pools within its own."""
    return replace(subject, describers=DESCRIBERS)
