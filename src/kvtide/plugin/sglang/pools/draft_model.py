"""A draft model's KV, which speculative decoding keeps in the same slots as the target's.

SGLang copies only the target's KV. Answers stay right without the draft model's KV, since the
target checks each token. But after its return a request guesses badly until its context is written
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kvtide.plugin.description import Description, Part
from kvtide.plugin.refusals import Refused
from kvtide.plugin.sglang.package import name_of
from kvtide.plugin.sglang.pools.describe import describe, with_describers
from kvtide.plugin.sglang.pools.recurrent_state import STATE_POOLS, with_state
from kvtide.plugin.sglang.pools.subject import Subject


def describe_with_draft(subject: Subject, draft_pools: Sequence[Any]) -> Description:
    """Describes the target and each draft pool (`draft.k`, `draft1.k`) together.

    They move together or not at all. A draft pool has KV, or state in the same rows as the target's
    state. Tensors that it shares with the target move once. Raises Refused if a pool is refused, or
    if a draft pool has fewer slots than the target.
    """
    subject = with_describers(subject)
    target = describe(subject)
    parts, maps = list(target.parts), dict(target.maps)
    shares_memory = target.shares_memory
    for number, pool in enumerate(draft_pools):
        prefix = f"draft{number or ''}"
        draft = _describe_draft(subject, pool, target)
        seen = {_place(tensor) for part in parts for tensor in part.tensors}
        parts += [
            _apart(part, prefix)
            for part in draft.renamed(prefix)
            if not all(_place(tensor) in seen for tensor in part.tensors)
        ]
        maps |= {f"{prefix}.{name}": held for name, held in draft.maps.items()}
        shares_memory = shares_memory or draft.shares_memory
    return replace(target, parts=tuple(parts), maps=maps, shares_memory=shares_memory)


def _describe_draft(subject: Subject, pool: Any, target: Description) -> Description:
    name = name_of(pool)
    if name in STATE_POOLS:
        return with_state(replace(target, name=name, parts=(), maps={}), pool, subject)
    draft = subject.part(pool)
    if draft.slot_count < target.slot_count:
        raise Refused(
            f"{name}: the draft model's pool has {draft.slot_count} slots, the target's "
            f"{target.name} {target.slot_count}: a token's slot isn't the same in both"
        )
    return draft


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Identifies a tensor's bytes: equal for two views of the same bytes."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _apart(part: Part, prefix: str) -> Part:
    """The part with its maps under prefixed names, since two pools may have maps of one name."""
    return replace(part, rules=tuple(rule.with_map_under(prefix) for rule in part.rules))
