"""Does the model answer through kvtide's cache and attention as it answers by itself?

`PagedModel` gives a model positions and takes its keys and values, and relies on it for the rest:
that its attention is causal, that it uses these positions, that no token reaches another but
through the cache. A model that does otherwise would be served without an error and answer wrongly.
So when a model is loaded for serving, two requests go through a small pool (a prompt in two chunks
beside one in a single chunk, then single tokens), and the logits of every row are compared with
those of the model's own forward over the same tokens.

That is done in float32, whatever the model's dtype: there right ones agree to a few millionths and
wrong ones are thousands of times farther off, while rounding to bfloat16 moves the logits of a deep
model as far as some mistakes do, and flips a choice of experts now and then. Weights of another
dtype are widened layer by layer, while a layer runs, so that no more than one layer and what lies
outside the layers is held twice. Then the same is done in the model's own dtype, where half of the
rows must come near enough.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtide.device import Device
from kvtide.errors import UsageError
from kvtide.pool import Pool
from kvtide.serve.adapter import PreTrainedModel
from kvtide.serve.batch import ExactRules, PackedBatch, RowCounts, Segment
from kvtide.serve.paged import PagedModel
from kvtide.serve.supported import geometry_of

_STEPS = (((0, 9),), ((0, 6), (1, 15)), ((0, 1), (1, 1)), ((1, 1), (0, 1)))
"""What each step runs: so many more tokens of which request; as many of both in the end."""
_PAGE_SIZE = 16
_SEEDS = (20240611, 20240612, 20240613)
# Passes are padded to these, and none of the steps above has more rows.
_RULES = ExactRules(RowCounts((8, 32)), RowCounts((8, 32)))

# No logit: how models rule out tokens that don't exist. A power of two, so that sums are exact.
_LARGEST = 2.0**20
# Of what tokens change in the logits. Right models come to 3e-5, the mildest mistake to 4e-3.
_TOLERANCE = 2e-4
# Of the middle row in another dtype. In bfloat16 SmolLM2 comes to 0.02, small models with random
# weights to 0.15; what has nothing to do with the own answer is 1.4 away.
_ROUGH_TOLERANCE = 0.5


@dataclass(frozen=True)
class OwnCheck:
    """What `check_own_answers` measured."""

    deviation: float
    """The farthest row's distance in float32, as a share of what tokens change in the logits."""
    seconds: float


@torch.inference_mode()
def check_own_answers(model: PreTrainedModel, device: Device, *, exact: bool) -> OwnCheck:
    """Compares kvtide's passes with the model's own forward; leaves the model as it was.

    The model is on ``device`` already; ``exact`` is how it will be served. Raises UsageError, with
    the reason as far as it can be told, for a model that isn't served or answers otherwise.
    """
    start = time.perf_counter()
    with _in_float32(model):
        tries = [_try(model, device, _requests(model, _SEEDS[0]), exact=exact)]
        if _deviates(tries[0]):
            # Two experts that all but tie for a token may change places by a rounding; a model
            # that is served wrongly is so for other tokens, too.
            more = [_requests(model, seed) for seed in _SEEDS[1:]]
            tries += [_try(model, device, tokens, exact=exact) for tokens in more]
            if any(map(_deviates, tries[1:])):
                raise _refusal(model, _reasons(model, _requests(model, _SEEDS[0])), tries[0])
    if any(tensor.dtype != torch.float32 for _, _, tensor in _holders(model)):
        rough = _try(model, device, _requests(model, _SEEDS[0]), exact=exact)
        if not float(rough.median()) <= _ROUGH_TOLERANCE:
            raise _refusal(model, [f"in {model.dtype}, though not in float32"], rough)
    return OwnCheck(float(tries[-1].max()), time.perf_counter() - start)


def _try(model: PreTrainedModel, device: Device, tokens: Tensor, *, exact: bool) -> Tensor:
    """How far kvtide's logits are from the model's own, for each token of each request."""
    found = _paged(model, device, tokens, exact=exact)
    own = _own(model, tokens)
    if own.isnan().any() or own.isposinf().any():
        raise UsageError(
            f"{type(model).__name__} isn't served: its own forward gives NaN or infinity; are its "
            "weights whole?"
        )
    return _distances(found, own)


def _requests(model: PreTrainedModel, seed: int) -> Tensor:
    """The tokens of two requests, int64 [request, token] on the host.

    All are different, and none is one that has a meaning of its own, such as padding.
    """
    text = model.config.get_text_config(decoder=True)
    special = {**model.config.to_dict(), **text.to_dict()}
    named = {value for key, value in special.items() if "_token_i" in key and type(value) is int}
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed)).tolist()
    tokens = itertools.cycle([token for token in order if token not in named] or order)
    limit = getattr(text, "max_position_embeddings", None) or 1 << 30
    length = min(limit, sum(dict(step).get(0, 0) for step in _STEPS))
    return torch.tensor([[next(tokens) for _ in range(length)] for _ in range(2)])


def _paged(model: PreTrainedModel, device: Device, requests: Tensor, *, exact: bool) -> Tensor:
    """The logits [request, token, vocab] through kvtide, float32 on the host.

    Slots lie at random, and those that nobody has written hold NaN.
    """
    geometry = geometry_of(model.config, model.dtype, _PAGE_SIZE)
    pool = Pool.create(geometry, device, page_count=2 * -(-requests.numel() // _PAGE_SIZE))
    for plane in geometry.planes:
        for layer in range(plane.layer_count):
            pool.plane(plane.name, layer).fill_(float("nan"))
    order = torch.randperm(pool.slot_count, generator=torch.Generator().manual_seed(_SEEDS[0]))
    slots = order[: requests.numel()].view_as(requests)
    paged = PagedModel(model, pool, exact=_RULES if exact else None)
    logits: list[list[Tensor]] = [[] for _ in requests]
    try:
        for parts in _parts(requests.shape[1]):
            found = paged.forward(_pack(requests, slots, parts)).float()
            lengths = [len(tokens) for _, tokens in parts]
            for (who, _), rows in zip(parts, torch.split(found, lengths), strict=True):
                logits[who].append(rows)
    finally:
        paged.release()
    return torch.stack([torch.cat(rows) for rows in logits])


def _parts(length: int) -> Iterator[list[tuple[int, range]]]:
    """For each step the requests in it and their tokens; none goes beyond ``length``."""
    done = [0, 0]
    for step in _STEPS:
        parts = [(who, range(done[who], min(done[who] + count, length))) for who, count in step]
        for who, tokens in parts:
            done[who] = tokens.stop
        if any(tokens for _, tokens in parts):
            yield [(who, tokens) for who, tokens in parts if tokens]


def _pack(requests: Tensor, slots: Tensor, parts: list[tuple[int, range]]) -> PackedBatch:
    """One step, which asks for all logits."""
    segments: list[Segment] = []
    first = 0
    for who, tokens in parts:
        segments.append(Segment(first, len(tokens), slots[who][: tokens.stop]))
        first += len(tokens)
    rows = [(who, slice(tokens.start, tokens.stop)) for who, tokens in parts]
    return PackedBatch(
        torch.cat([requests[row] for row in rows]),
        torch.cat([torch.arange(tokens.start, tokens.stop) for _, tokens in parts]),
        torch.cat([slots[row] for row in rows]),
        tuple(segments),
        torch.arange(first),
    )


def _own(model: PreTrainedModel, tokens: Tensor, **arguments: Any) -> Tensor:
    """The logits [request, token, vocab] of the model's own forward, float32 on the host."""
    experts = model.config._experts_implementation
    # The plain form: the one that transformers prefers takes no experts of some widths.
    model.set_experts_implementation("eager")
    try:
        output = model(input_ids=tokens.to(model.device), use_cache=False, **arguments)
    finally:
        model.set_experts_implementation(experts)
    logits: Tensor = output.logits
    return logits.float().cpu()


def _distances(found: Tensor, own: Tensor) -> Tensor:
    """Each row's distance [request, token], as a share of what tokens change in the logits.

    That is the usual distance of a row from the mean row. NaN where ``found`` has NaN.
    """
    found, own = found.clamp(-_LARGEST, _LARGEST), own.clamp(-_LARGEST, _LARGEST)
    spread = (own - own.mean((0, 1))).norm(dim=-1).square().mean().sqrt()
    distances = (found - own).norm(dim=-1)
    return torch.where(distances == 0, distances, distances / spread)


def _deviates(distances: Tensor) -> bool:
    return not float(distances.max()) <= _TOLERANCE


def _reasons(model: PreTrainedModel, tokens: Tensor) -> list[str]:
    """What the model's own forward shows of why it answers otherwise."""
    reasons = []
    own = _own(model, tokens)
    length = tokens.shape[1]
    if length > 1 and _deviates(_distances(_own(model, tokens[:, :-1]), own[:, :-1])):
        reasons.append("its attention isn't causal (a later token changes an earlier one's logits)")
    places = torch.arange(length, device=model.device).expand(tokens.shape)
    try:
        counted = _own(model, tokens, position_ids=places)
        stretched = _own(model, tokens, position_ids=places * 3 // 2)
    # Each architecture fails in its own way over an argument that it doesn't know.
    except Exception:
        return [*reasons, "it takes no positions"]
    if _deviates(_distances(counted, own)):
        reasons.append("it doesn't count positions from 0")
    elif not _deviates(_distances(stretched, own)):
        reasons.append("it takes positions from its cache's length, not those it is given")
    return reasons


def _refusal(model: PreTrainedModel, reasons: list[str], distances: Tensor) -> UsageError:
    places = (~(distances <= _TOLERANCE)).any(0).nonzero()
    reason = " and ".join(reasons) or "why can't be told"
    return UsageError(
        f"model type {model.config.model_type!r} isn't served: through kvtide's cache it answers "
        f"otherwise than by itself, from position {int(places[0])} on: {reason}; choose a decoder "
        "such as Llama or Qwen"
    )


def _holders(module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """The module's weights and buffers of floating point, with where each is held."""
    for part in module.modules():
        held: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for holder in held:
            for name, tensor in holder.items():
                if tensor is not None and tensor.is_floating_point():
                    yield holder, name, tensor


@contextlib.contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Widens the weights that lie outside the layers at once, those of a layer while it runs."""
    stacks: list[torch.nn.ModuleList] = []
    inner: set[int] = set()
    for module in model.modules():  # outer ones come first
        if isinstance(module, torch.nn.ModuleList) and id(module) not in inner:
            stacks.append(module)
            inner.update(map(id, module.modules()))
    layers = [layer for stack in stacks for layer in stack]
    within = {id(holder) for layer in layers for holder, _, _ in _holders(layer)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_widened(one for one in _holders(model) if id(one[0]) not in within))
        for layer in layers:
            stack.enter_context(_widened_while_it_runs(layer))
        yield


@contextlib.contextmanager
def _widened_while_it_runs(layer: torch.nn.Module) -> Iterator[None]:
    running = contextlib.ExitStack()

    def begin(*_: Any) -> None:
        running.enter_context(_widened(_holders(layer)))

    def end(*_: Any) -> None:
        running.close()

    hooks = [layer.register_forward_pre_hook(begin)]
    hooks.append(layer.register_forward_hook(end, always_call=True))
    try:
        yield
    finally:
        running.close()
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _widened(held: Iterable[tuple[dict[str, Any], str, Tensor]]) -> Iterator[None]:
    """Float32 in place of each tensor, which comes back itself; what is held twice stays one."""
    narrow = [(holder, name, one) for holder, name, one in held if one.dtype != torch.float32]
    wide: dict[int, Tensor] = {}
    try:
        for holder, name, tensor in narrow:
            if id(tensor) not in wide:
                is_weight = isinstance(tensor, torch.nn.Parameter)
                own = tensor.float()
                wide[id(tensor)] = torch.nn.Parameter(own, False) if is_weight else own
            holder[name] = wide[id(tensor)]
        yield
    finally:
        for holder, name, tensor in narrow:
            holder[name] = tensor
