"""Which graphs the other end still has, so that a known one costs a few bytes.

Each policy mirrors what the peer does with the same commands in the same order: the extension's
LRU, and what ggml-rpc 7 and 8 keep.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from caravan.wire.extension import GRAPH_LRU


class GraphMemory(Protocol):
    """The graphs of one device at the peer, by the engine's uid (never 0)."""

    def known(self, uid: int) -> bool:
        """Whether the peer has it; asking counts as using it."""

    def add(self, uid: int, handles: frozenset[int]) -> None:
        """It was sent, and uses the buffers `handles`."""

    def freed(self, handle: int) -> None:
        """A buffer of the device was freed."""


class LruGraphs:
    """The extension: the GRAPH_LRU most recently used; a freed buffer takes its graphs along."""

    def __init__(self, capacity: int = GRAPH_LRU) -> None:
        self._capacity = capacity
        self._graphs: OrderedDict[int, frozenset[int]] = OrderedDict()

    def known(self, uid: int) -> bool:
        if uid not in self._graphs:
            return False
        self._graphs.move_to_end(uid)
        return True

    def add(self, uid: int, handles: frozenset[int]) -> None:
        self._graphs[uid] = handles
        self._graphs.move_to_end(uid)
        if len(self._graphs) > self._capacity:
            self._graphs.popitem(last=False)

    def freed(self, handle: int) -> None:
        for uid in [uid for uid, handles in self._graphs.items() if handle in handles]:
            del self._graphs[uid]


class LastGraph:
    """ggml-rpc 7: one graph a device; FREE_BUFFER drops those of the whole connection."""

    def __init__(self) -> None:
        self._uid = 0

    def known(self, uid: int) -> bool:
        return uid == self._uid

    def add(self, uid: int, handles: frozenset[int]) -> None:
        self._uid = uid

    def freed(self, handle: int) -> None:
        self._uid = 0


class ManyGraphs:
    """ggml-rpc 8: up to 1,024 a device, all forgotten when one more arrives.

    A freed buffer empties the peer's entries but leaves them counted, and so are they here.
    """

    CAPACITY = 1024

    def __init__(self) -> None:
        self._alive: dict[int, bool] = {}

    def known(self, uid: int) -> bool:
        return self._alive.get(uid, False)

    def add(self, uid: int, handles: frozenset[int]) -> None:
        if len(self._alive) >= self.CAPACITY:
            self._alive.clear()
        self._alive[uid] = True

    def freed(self, handle: int) -> None:
        self._alive = dict.fromkeys(self._alive, False)
