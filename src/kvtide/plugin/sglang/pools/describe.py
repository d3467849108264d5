"""describe: describes a pool of SGLang by its exact class.

A class is identified by its module and its name. A subclass of a known class may hold more state,
so it is refused by name until it has a describer.
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
    """Describes the pool, and what the request pool holds for each request in addition.

    Raises Refused, with the reason, for a pool that kvtide won't move.
    """
    subject = with_describers(subject)
    description = with_state_of_requests(subject, subject.described())
    return with_compressed_keys(subject.request_pool, description)


def with_describers(subject: Subject) -> Subject:
    """The subject with all describers, for the pools inside its pool."""
    return replace(subject, describers=DESCRIBERS)
