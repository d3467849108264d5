"""Which of kvtide's classes does a request's KV meet on its way to host memory and back?

A blocking `Tide.offload` and a `Tide.restore` on the CPU device are traced, also in the lanes'
threads. A class is met when one of its methods runs. Errors and row rules don't count: there are
as many as there are things that can go wrong, and layouts.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any, get_origin

import torch

import kvtide
from kvtide import GQA, HostArena, PageAllocator, Pool, Tide, open_device

_TOKEN_COUNT = 60
_SELF = ("self", "cls", "_cls")


@dataclass
class MetClasses:
    """The classes that a request's KV meets.

    `run` maps a class to its methods that ran. `protocols` maps a protocol to the names of those of
    these classes that have its methods. `passed` has classes of arguments and results whose methods
    did not run.
    """

    run: dict[type, set[str]] = field(default_factory=dict)
    passed: set[type] = field(default_factory=set)
    protocols: dict[type, set[str]] = field(default_factory=dict)


class _Trace:
    """A profile function: records the classes of each call's object, arguments and result."""

    def __init__(self) -> None:
        self.is_on = False
        self.run: dict[type, set[str]] = {}
        self.passed: set[type] = set()

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        if not self.is_on or event not in ("call", "return"):
            return
        if event == "return":
            self.passed.add(type(result))
            return
        code, values = frame.f_code, frame.f_locals
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self.passed.update(type(values.get(name)) for name in names)
        if names[:1] and names[0] in _SELF and (owner := values.get(names[0])) is not None:
            for kind in (owner if isinstance(owner, type) else type(owner)).__mro__:
                self.run.setdefault(kind, set()).add(code.co_name)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Traces this thread, and threads that start meanwhile."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def met_classes() -> MetClasses:
    """Returns the classes that an offload and a restore of several chunks meet."""
    trace = _Trace()
    thread_count = torch.get_num_threads()
    torch.set_num_threads(2)  # with one thread there are no lanes
    try:
        with trace.installed(), closing(open_device("cpu")) as device:
            _go(device, trace)
    finally:
        torch.set_num_threads(thread_count)
    run = {kind: names for kind, names in trace.run.items() if _counts(kind)}
    passed = {kind for kind in trace.passed if _counts(kind)} - run.keys()
    return MetClasses(run, passed, _protocols(run))


def _go(device: kvtide.Device, trace: _Trace) -> None:
    geometry = GQA.bind(dtype="bfloat16", layer=2, token=4, head=2, head_dim=8, v_head_dim=8)
    pool = Pool.create(geometry, device, page_count=_TOKEN_COUNT)
    block_bytes = _TOKEN_COUNT // 6 * geometry.token_bytes
    arena = HostArena(device, limit_bytes=16 * block_bytes, block_bytes=block_bytes)
    pages = PageAllocator(pool.page_count)
    tide = Tide(pool, arena, pages)
    slots = tide.pool.slots_of(pages.acquire(pool.page_count // 2) or [])[:_TOKEN_COUNT]
    trace.is_on = True
    snapshot = tide.offload(slots, key="request")
    tide.restore(snapshot, slots[::-1].copy(), key="request")
    trace.is_on = False
    tide.discard(snapshot)


def _counts(kind: type) -> bool:
    """Returns whether it is a class of kvtide, and neither an error nor a row rule."""
    is_rule = hasattr(kind, "apply")
    return kind.__module__.startswith("kvtide.") and not (issubclass(kind, Exception) or is_rule)


def _protocols(run: dict[type, set[str]]) -> dict[type, set[str]]:
    """Returns kvtide's protocols whose methods all are in one of these classes."""
    found: dict[type, set[str]] = {}
    modules = [module for name, module in sys.modules.items() if name.startswith("kvtide.")]
    kinds = {kind for module in modules for kind in vars(module).values() if _is_protocol(kind)}
    for protocol in filter(_counts, kinds):
        # Attributes don't count: a class may have them only in its instances.
        methods = [
            name for name, value in vars(protocol).items() if isinstance(value, FunctionType)
        ]
        methods = [name for name in methods if not name.startswith("_")]
        users = {kind for kind in run if all(hasattr(kind, name) for name in methods)} - {protocol}
        if methods and users:
            found[protocol] = {kind.__name__ for kind in users}
    return found


def _is_protocol(kind: object) -> bool:
    is_class = isinstance(kind, type) and get_origin(kind) is None
    return is_class and bool(getattr(kind, "_is_protocol", False))
