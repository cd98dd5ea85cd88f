"""A device that the engine never hears of: good for what happens before and after its calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from caravan.errors import CaravanError, WorkerLost


class FakeDevice:
    """Lost as soon as `alive` checks have been answered."""

    def __init__(self, name: str = "RPC0", alive: int = 1 << 30, free: int = 1 << 30) -> None:
        self.handle = 0
        self.name = name
        self.description = "fake"
        self.allocation_error: CaravanError | None = None
        self.alive = alive
        self.free = free
        self.simulated = False

    def memory(self) -> tuple[int, int]:
        return self.free, self.free

    def check(self) -> None:
        self.alive -= 1
        if self.alive < 0:
            raise WorkerLost("host:1", self.name, "GRAPH_COMPUTE", OSError("gone"))

    def hold(self) -> FakeDevice:
        return self

    def mark(self) -> None:
        return None

    def watched_sizes(self, watcher: Callable[[bytes, int], None]) -> AbstractContextManager[None]:
        return nullcontext()
