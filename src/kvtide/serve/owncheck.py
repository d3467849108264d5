"""Compares a model's answers over kvtide's pool with its answers without kvtide.

`PagedModel` relies on three properties of a model: its attention is causal, it uses the given
positions, and tokens see each other through the cache only. Without one of them a model would run
without an error and answer wrongly. So each model is checked before it is served. Two requests run
over a small pool: one prompt in two chunks, one in a single chunk, then single tokens. The logits
of each row are compared with the logits of the model's plain forward over the same tokens.

The comparison is made in float32. There the logits of a correct model agree to a few millionths,
and a mistake is thousands of times larger. In bfloat16 the rounding in a deep model would be as
large as some mistakes, and would sometimes change the choice of experts. Weights of another dtype
are widened while their layer runs, so only one layer, and the weights outside the layers, are held
twice. Then the model is checked in its dtype, too: there half of the rows must be close enough.
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
from kvtide.serve.query_blocks import WHOLE_BLOCKS
from kvtide.serve.supported import geometry_of

_STEPS = (((0, 9),), ((0, 6), (1, 15)), ((0, 1), (1, 1)), ((1, 1), (0, 1)))
"""For each step pairs of a request and its number of tokens. Both requests get as many in all."""
_PAGE_SIZE = 16
_SEEDS = (20240611, 20240612, 20240613)
# Passes are padded to these counts. No step above has more rows.
_RULES = ExactRules(RowCounts((8, 32)), RowCounts((8, 32)), query_rows=WHOLE_BLOCKS)

# Logits are clamped to this: models give tokens that don't exist a huge negative logit. It is a
# power of two, so that sums are exact.
_LARGEST = 2.0**20
# The largest distance in float32, see `_distances`. Correct models reach 3e-5, the smallest mistake
# 4e-3.
_TOLERANCE = 2e-4
# The largest distance of the median row in another dtype. In bfloat16 SmolLM2 reaches 0.02, small
# models with random weights 0.15; unrelated logits are 1.4 away.
_ROUGH_TOLERANCE = 0.5


@dataclass(frozen=True)
class OwnCheck:
    """What `check_own_answers` measured."""

    deviation: float
    """The largest distance of a row in float32, see `_distances`."""
    seconds: float


@torch.inference_mode()
def check_own_answers(model: PreTrainedModel, device: Device, *, exact: bool) -> OwnCheck:
    """Compares kvtide's passes with the model's plain forward. The model isn't changed.

    The model is on `device`; `exact` says in which mode it will be served. Raises UsageError, with
    the reason if it is known, for a model that isn't served or answers differently.
    """
    start = time.perf_counter()
    with _in_float32(model):
        tries = [_try(model, device, _requests(model, _SEEDS[0]), exact=exact)]
        if _deviates(tries[0]):
            # Rounding may swap two experts that are nearly equal for a token. A wrong model also
            # fails for other tokens.
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
    """The distance of kvtide's logits from the model's plain ones, [request, token]."""
    found = _paged(model, device, tokens, exact=exact)
    plain = _plain(model, tokens)
    if plain.isnan().any() or plain.isposinf().any():
        raise UsageError(
            f"{type(model).__name__} isn't served: even without kvtide it gives NaN or infinity; "
            "are its weights whole?"
        )
    return _distances(found, plain)


def _requests(model: PreTrainedModel, seed: int) -> Tensor:
    """The tokens of two requests, int64 [request, token] on the host.

    All tokens differ, and none is a special token such as padding.
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
    """The logits [request, token, vocab] over a pool, float32 on the host.

    The slots are chosen at random, and slots that nobody has written hold NaN.
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
    """For each step its requests and the range of tokens of each, up to `length`."""
    done = [0, 0]
    for step in _STEPS:
        parts = [(who, range(done[who], min(done[who] + count, length))) for who, count in step]
        for who, tokens in parts:
            done[who] = tokens.stop
        if any(tokens for _, tokens in parts):
            yield [(who, tokens) for who, tokens in parts if tokens]


def _pack(requests: Tensor, slots: Tensor, parts: list[tuple[int, range]]) -> PackedBatch:
    """A step that asks for the logits of all rows."""
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


def _plain(model: PreTrainedModel, tokens: Tensor, **arguments: Any) -> Tensor:
    """The logits [request, token, vocab] of the model's plain forward, float32 on the host."""
    experts = model.config._experts_implementation
    # transformers' default implementation can't run experts of some widths.
    model.set_experts_implementation("eager")
    try:
        output = model(input_ids=tokens.to(model.device), use_cache=False, **arguments)
    finally:
        model.set_experts_implementation(experts)
    logits: Tensor = output.logits
    return logits.float().cpu()


def _distances(found: Tensor, plain: Tensor) -> Tensor:
    """The distance of each row of `found` from the same row of `plain`, [request, token].

    It is relative: 1 is the root mean square distance of the plain rows from their mean. NaN where
    `found` has NaN.
    """
    found, plain = found.clamp(-_LARGEST, _LARGEST), plain.clamp(-_LARGEST, _LARGEST)
    spread = (plain - plain.mean((0, 1))).norm(dim=-1).square().mean().sqrt()
    distances = (found - plain).norm(dim=-1)
    return torch.where(distances == 0, distances, distances / spread)


def _deviates(distances: Tensor) -> bool:
    return not float(distances.max()) <= _TOLERANCE


def _reasons(model: PreTrainedModel, tokens: Tensor) -> list[str]:
    """The reasons why the model answers differently, found with its plain forward."""
    reasons = []
    plain = _plain(model, tokens)
    length = tokens.shape[1]
    if length > 1 and _deviates(_distances(_plain(model, tokens[:, :-1]), plain[:, :-1])):
        reasons.append("its attention isn't causal (a later token changes an earlier one's logits)")
    places = torch.arange(length, device=model.device).expand(tokens.shape)
    try:
        counted = _plain(model, tokens, position_ids=places)
        stretched = _plain(model, tokens, position_ids=places * 3 // 2)
    # Architectures raise all kinds of errors for an unknown argument.
    except Exception:
        return [*reasons, "it takes no positions"]
    if _deviates(_distances(counted, plain)):
        reasons.append("it doesn't count positions from 0")
    elif not _deviates(_distances(stretched, plain)):
        reasons.append("it takes positions from its cache's length, not the given positions")
    return reasons


def _refusal(model: PreTrainedModel, reasons: list[str], distances: Tensor) -> UsageError:
    places = (~(distances <= _TOLERANCE)).any(0).nonzero()
    reason = " and ".join(reasons) or "the reason is unknown"
    return UsageError(
        f"model type {model.config.model_type!r} isn't served: over kvtide's pool its answers "
        f"differ from its plain answers, from position {int(places[0])} on: {reason}; choose a "
        "decoder such as Llama or Qwen"
    )


def _holders(module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """The module's floating point weights and buffers, each with the dict and key that hold it."""
    for part in module.modules():
        held: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for holder in held:
            for name, tensor in holder.items():
                if tensor is not None and tensor.is_floating_point():
                    yield holder, name, tensor


@contextlib.contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Widens all weights to float32: a layer's only while the layer runs, to save memory."""
    stacks: list[torch.nn.ModuleList] = []
    inner: set[int] = set()
    for module in model.modules():  # outer modules come first
        if isinstance(module, torch.nn.ModuleList) and id(module) not in inner:
            stacks.append(module)
            inner.update(map(id, module.modules()))
    layers = [layer for stack in stacks for layer in stack]
    within = {id(holder) for layer in layers for holder, _, _ in _holders(layer)}
    with contextlib.ExitStack() as stack:
        outside = (held for held in _holders(model) if id(held[0]) not in within)
        stack.enter_context(_widened(outside))
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
    """Puts a float32 copy in place of each tensor, and the tensor back at the end.

    A tensor that is held in two places gets one copy.
    """
    narrow = [entry for entry in held if entry[2].dtype != torch.float32]
    wide: dict[int, Tensor] = {}
    try:
        for holder, name, tensor in narrow:
            if id(tensor) not in wide:
                is_weight = isinstance(tensor, torch.nn.Parameter)
                copy = tensor.float()
                wide[id(tensor)] = torch.nn.Parameter(copy, False) if is_weight else copy
            holder[name] = wide[id(tensor)]
        yield
    finally:
        for holder, name, tensor in narrow:
            holder[name] = tensor
