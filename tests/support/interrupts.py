"""Ctrl-C at every instruction: a signal's handler may raise before any of them."""

from __future__ import annotations

import dis
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import kvtide

T = TypeVar("T")
Place = tuple[CodeType, int]

ROOT = str(Path(kvtide.__file__).parent)
# Files that take, pass on or give back something; the other files only compute.
OWNERS = ("tide.py", "snapshot.py", "atomic.py", "arena/", "pool/slots.py", "device/")

# Python looks for signals at calls and at jumps back, so never between the instruction that loads
# a result and the one that returns it; no `try` holds the second one.
RETURN = dis.opmap["RETURN_VALUE"]


def places_of(action: Callable[[], Any]) -> list[tuple[Place, int]]:
    """Runs the action, and lists kvtide's instructions that this thread reached, with the count.

    Of each instruction it lists the first time and the last. In files that hold nothing it lists
    one instruction of each line.
    """
    seen: Counter[Place] = Counter()
    lines: dict[tuple[CodeType, int | None], int] = {}

    def note(frame: FrameType, event: str, _: object) -> Any:
        code, offset = frame.f_code, frame.f_lasti
        if event == "opcode" and code.co_code[offset] != RETURN:
            is_owner = code.co_filename[len(ROOT) + 1 :].startswith(OWNERS)
            if is_owner or lines.setdefault((code, frame.f_lineno), offset) == offset:
                seen[code, offset] += 1
        return note

    _traced(action, note, lambda code: code.co_filename.startswith(ROOT))
    return [(place, time) for place, count in seen.items() for time in sorted({1, count})]


def interrupted(action: Callable[[], Any], place: Place, time: int) -> bool:
    """Runs the action with a KeyboardInterrupt at one place, and returns whether it was raised.

    It isn't raised if other threads were faster this time and the place isn't reached, nor if
    Python swallows it in `__del__`.
    """
    left = time

    def interrupt(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if event == "opcode" and frame.f_lasti == place[1]:
            left -= 1
            if not left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return interrupt

    hook = sys.unraisablehook
    sys.unraisablehook = lambda lost: None if lost.exc_type is KeyboardInterrupt else hook(lost)
    try:
        _traced(action, interrupt, lambda code: code is place[0])
    except KeyboardInterrupt:
        return True
    finally:
        sys.unraisablehook = hook
    return False


def _traced(action: Callable[[], Any], each: Any, is_of_ours: Callable[[CodeType], bool]) -> None:
    def enter(frame: FrameType, event: str, _: object) -> Any:
        if not is_of_ours(frame.f_code):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return each

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        action()
    finally:
        sys.settrace(before)


def name_of(place: Place) -> str:
    """Names a place for a message."""
    code, offset = place
    line = next((n for first, stop, n in code.co_lines() if first <= offset < stop), None)
    return f"{Path(code.co_filename).stem}.{code.co_name}:{line}+{offset}"


def every_interrupt(
    make: Callable[[], tuple[T, Callable[[], Any]]],
) -> Iterator[tuple[str, T, bool]]:
    """Yields a case without an interrupt, then a new case for each place where one can come.

    Each has the place's name, the case, and whether the interrupt was raised.
    """
    case, action = make()
    places = places_of(action)
    yield "nowhere", case, False
    for place, time in places:
        case, action = make()
        raised = interrupted(action, place, time)
        yield f"{name_of(place)} ({time})", case, raised
