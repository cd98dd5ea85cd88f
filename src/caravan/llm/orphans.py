"""C objects whose Python owner went away without `close`, freed at the next safe moment.

A finalizer may run inside a callback of the engine, where freeing (which calls the engine, and
devices) could deadlock; so it only leaves the object here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_left: deque[tuple[Callable[[int], None], int]] = deque()


def leave(free: Callable[[int], None], handle: int) -> None:
    """Have `free(handle)` called later; for a `__del__`."""
    _left.append((free, handle))


def free_all() -> None:
    """Free what was left, oldest first: contexts went before their models."""
    while _left:
        try:
            free, handle = _left.popleft()
        except IndexError:  # another thread was faster
            return
        free(handle)
