"""Steps that nothing comes into: each is one call of C that calls C's functions alone.

What a signal's handler raises, such as Ctrl-C, comes between two instructions of Python, any two:
in `finally`, and at the end of a `with`. So whatever somebody holds, be it a page or a block, is in
exactly one container at any moment; the step that moves it is one of these; whoever has to give it
back knows the container before anything is in it; and giving back is repeatable. Then nothing is
lost wherever an interrupt comes, and nothing is there twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, TypeVar

T = TypeVar("T")


def call_each(function: Callable[..., Any], *arguments: Iterable[Any]) -> None:
    """Calls `function`, one of C, with the first of all `arguments`, then the second, and so on.

    The arguments must be made by C as well: lists, and iterators of itertools over such.
    """
    deque(map(function, *arguments), maxlen=0)


def move_last(source: list[T], target: list[T], count: int) -> None:
    """Moves the last `count` items, the last one first, to the end of `target`."""
    target.extend(map(source.pop, repeat(-1, count)))


def take_out(items: list[T] | deque[T], item: T) -> None:
    """Removes an item, one that is equal to no other, if it is there: repeatable."""
    try:
        items.remove(item)
    except ValueError:
        return
