"""Progress: what an engine knows of a request beside its KV, as a text that outlives the process.

The text is the key of the request's snapshot, so it is on the disk with the KV that it belongs to.
Its first line is the name under which another run looks for it.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from kvtide.errors import SnapshotMiss
from kvtide.integers import integer_of
from kvtide.serve.request import Request
from kvtide.serve.sampling import Sampler

_PREFIX = "request/"
_NAMELESS = "alone/"


def name_of(text: str) -> str | None:
    """The name of the snapshot with this key in the tiers; None for a key without a name."""
    return text.partition("\n")[0] if text.startswith(_PREFIX) else None


def name_for(request: Request) -> str | None:
    """The name of a request's snapshot; None if another run can't go on with it.

    Log-probabilities aren't in the text, so such a request starts anew.
    """
    if not request.key or request.params.logprobs is not None:
        return None
    return f"{_PREFIX}{request.key}/{request.id.encode('utf-8', 'surrogatepass').hex()}"


def to_text(request: Request, sampler: Sampler) -> str:
    """The key of a snapshot that is made of the request now."""
    name = name_for(request)
    if name is None:
        return _NAMELESS + request.id
    state = sampler.state
    form = {
        "output_ids": request.output_ids,
        "digests": [f"{digest:032x}" for digest in request.logit_digests],
        "random": None if state is None else base64.b64encode(state).decode(),
        "retractions": request.retractions,
        "exact": request.exact,
    }
    return f"{name}\n{json.dumps(form)}"


def take_over(
    text: str,
    token_count: int,
    request: Request,
    sampler: Sampler,
    *,
    vocab_size: int,
    needs_digests: bool,
) -> None:
    """Sets a request to what the key of its snapshot of `token_count` tokens says.

    Raises SnapshotMiss, and changes nothing, for a text that isn't of this request: it comes from a
    file and is untrusted. Progress without the digests of logits is no use either if they are
    needed.
    """
    name, _, rest = text.partition("\n")
    if name != name_for(request):
        raise SnapshotMiss(f"request {request.id!r}: the snapshot is of another request")
    try:
        form = json.loads(rest)
        output_ids = [_natural(token) for token in form["output_ids"]]
        digests = [int(_text(digest), 16) for digest in form["digests"]]
        retractions, exact = _natural(form["retractions"]), bool(form["exact"])
        state = None if form["random"] is None else base64.b64decode(form["random"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise SnapshotMiss(f"request {request.id!r}: its progress can't be read") from error
    if len(digests) not in (0, len(output_ids)) or max(output_ids, default=0) >= vocab_size:
        raise SnapshotMiss(f"request {request.id!r}: its progress contradicts itself")
    if needs_digests and len(digests) < len(output_ids):
        raise SnapshotMiss(f"request {request.id!r}: its progress has no digests of logits")
    known = len(request.prompt_ids) + len(output_ids)
    has_begun = bool(output_ids) == (token_count >= len(request.prompt_ids))
    if not 0 < token_count < known or not has_begun or len(output_ids) >= request.most_new_tokens:
        raise SnapshotMiss(f"request {request.id!r}: its progress contradicts itself")
    if state is not None or sampler.state is not None:
        sampler.set_state(state)
    request.output_ids, request.logit_digests = output_ids, digests if needs_digests else []
    request.retractions, request.exact = retractions, exact


def _natural(value: Any) -> int:
    number = integer_of(value)
    if number is None or number < 0:
        raise ValueError("not a natural number")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value
