"""Atomic steps: an interrupt comes before or after each of these, never in its middle.

A signal's handler (Ctrl-C) may raise between any two instructions of Python, even in `finally` and
at the end of a `with`. It can't raise inside a C function that calls only other C functions, and
each step here is such a call. The code that hands out pages and blocks keeps four rules:

- At any moment each page, and each block, is in exactly one container.
- Only a step of this module moves it to another container.
- The code that must give it back knows the container before anything is in it.
- Giving back is repeatable.

So an interrupt loses nothing and duplicates nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, TypeVar

T = TypeVar("T")


def call_each(function: Callable[..., Any], *arguments: Iterable[Any]) -> None:
    """Calls `function` with the first item of each of `arguments`, then the second, and so on.

    To be atomic, `function` must be a C function, and the arguments lists or itertools' iterators.
    """
    deque(map(function, *arguments), maxlen=0)


def move_last(source: list[T], target: list[T], count: int) -> None:
    """Moves the last `count` items, the last one first, to the end of `target`."""
    target.extend(map(source.pop, repeat(-1, count)))


def take_out(items: list[T] | deque[T], item: T) -> None:
    """Removes an item, which equals no other item, if it is there. Repeatable."""
    try:
        items.remove(item)
    except ValueError:
        return
