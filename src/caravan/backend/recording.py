"""`RecordingDevice`: a device that computes nothing and takes down what it is given.

Made for rehearsals: the engine loads a model onto such devices and decodes, and every graph that
would travel is there to be looked at. No sockets, no threads, no memory: reads give zeros. What is
written is counted, once in full and once as `ExtLink` would send it (see `stream.mirror`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from caravan.backend import callbacks
from caravan.backend import plugin as plugins
from caravan.backend.device import RemoteDevice
from caravan.backend.plugin import Plugin
from caravan.errors import WorkerLost
from caravan.stream.dispatcher import Stream
from caravan.stream.link import GraphRef, RemoteAllocation, TensorRef, get_rows, set_rows
from caravan.stream.message import Part, length
from caravan.stream.mirror import Mirror
from caravan.stream.ticket import Ticket
from caravan.wire.extension import (
    ADDRESS_SHIFT,
    GRAPH_LRU,
    MAX_BUFFER_SIZE,
    SIMULATED,
    DeviceInfo,
)
from caravan.wire.records import EXT_TENSOR
from caravan.wire.versions import SPOKEN

_CPU = 0
_ALIGNMENT = 32  # of the CPU's buffers


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """A graph as it would travel.

    Attributes:
        rows: EXT_TENSOR, nodes first; `data` are addresses in the recording device's buffers.
        n_nodes: how many rows are nodes.
    """

    rows: NDArray[Any]
    n_nodes: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a device was given since it was last asked.

    Attributes:
        graph: all graphs as one, in their order; empty where there was none.
        reused: whether there were graphs, and each of them had been given before.
        written: bytes from the head.
        sent: how many of these would have travelled.
        crossed: bytes that came from other devices.
    """

    graph: RecordedGraph
    reused: bool
    written: int
    sent: int
    crossed: int


class RecordingDevice(RemoteDevice):
    """See the module; made by `recording_devices`. To the engine, and to whoever loads models
    without weights, it is a simulated device."""

    def __init__(self, plugin: Plugin, link: RecordingLink, number: int) -> None:
        super().__init__(plugin, link, f"RPC{number}", link.stream.endpoint)
        self._recording = link

    def begin(self, link: RecordingLink) -> None:
        """Be there again, with nothing on it."""
        self._recording = link
        self.renew(link)

    def end(self) -> bool:
        """Forget everything; whether nothing that the engine still holds leads here."""
        self._recording.end()
        self._routes.clear()
        self.plugin.forget(self)
        return self.handle not in callbacks.owners

    def take(self) -> Recorded:
        """What it was given since the call before. Raises WorkerLost for an error in between."""
        self.check()
        return self._recording.take()


class RecordingLink:
    """See `stream.link.DeviceLink`; what is written goes nowhere."""

    extension = False

    def __init__(self, number: int, memory: tuple[int, int]) -> None:
        self.index = number
        self.version = SPOKEN[-1]
        self.sources: frozenset[str] = frozenset()
        free, total = memory
        self.info = DeviceInfo(
            *(SIMULATED, "recording", _CPU, 0, free, total, _ALIGNMENT, MAX_BUFFER_SIZE, False)
        )
        self._quiet = _QuietStream(number)
        self.stream = cast(Stream, self._quiet)
        self._mirror = Mirror()
        self._handles = 0
        self._known: dict[int, RecordedGraph] = {}
        self._graphs: list[RecordedGraph] = []
        self._reused = self._written = self._sent = self._crossed = 0

    def take(self) -> Recorded:
        """See `RecordingDevice.take`."""
        graphs, self._graphs = self._graphs, []
        reused = 0 < len(graphs) == self._reused
        result = Recorded(joined(graphs), reused, self._written, self._sent, self._crossed)
        self._reused = self._written = self._sent = self._crossed = 0
        return result

    def end(self) -> None:
        """From here on nothing is taken down."""
        self._quiet.ended = True
        self._known.clear()
        self._graphs.clear()
        self._mirror = Mirror()

    def alloc(self, size: int) -> RemoteAllocation:
        self._handles += 1
        return RemoteAllocation(self._handles, self._handles << ADDRESS_SHIFT, size)

    def free(self, handle: int) -> None:
        self._mirror.freed(handle)

    def clear(self, handle: int, value: int) -> None:
        self._mirror.forget_buffer(handle << ADDRESS_SHIFT)

    def init_tensor(self, tensor: TensorRef) -> None:
        self._mirror.forget_buffer(tensor.address())

    def alloc_size(self, tensor: TensorRef, sources: list[TensorRef]) -> int:
        return 0  # no more than its own

    def set_tensor(
        self,
        tensor: TensorRef,
        offset: int,
        data: Part,
        *,
        wait_sent: bool = False,
        again: bool = False,
    ) -> None:
        address, size = tensor.address() + offset, length(data)
        if isinstance(data, Ticket):
            self._mirror.forget(address, size)
            self._crossed += size
            return
        self._written += size
        if again and isinstance(data, bytes):
            spans = self._mirror.write(address, size, data)
            self._sent += sum(end - start for start, end in spans)
        else:
            self._mirror.forget(address, size)
            self._sent += size

    def bring(self, tensor: TensorRef, offset: int, data: Part) -> Ticket:
        self.set_tensor(tensor, offset, data)
        return self.fence()

    def fence(self) -> Ticket:
        return _answer("FENCE", 0, None)

    def load(self, wanted: Sequence[tuple[int, int, bytes, str]]) -> Ticket:
        raise NotImplementedError  # there are no sources

    def keep(self, tensor: TensorRef, size: int, digest: bytes) -> None:
        pass

    def get_tensor(
        self, tensor: TensorRef, offset: int, size: int, target: memoryview | None
    ) -> Ticket:
        return _answer("GET", size, target)

    def set_tensor_2d(
        self, tensor: TensorRef, offset: int, size: int, stride: int, rows: list[bytes]
    ) -> None:
        set_rows(self, tensor, offset, stride, rows)

    def get_tensor_2d(
        self, tensor: TensorRef, offset: int, size: int, stride: int, target: memoryview
    ) -> list[Ticket]:
        return get_rows(self, tensor, offset, size, stride, target)

    def memset_tensor(self, tensor: TensorRef, offset: int, size: int, value: int) -> None:
        self._mirror.forget(tensor.address() + offset, size)

    def copy_tensor(self, src: TensorRef, dst: TensorRef, size: int) -> None:
        self._mirror.forget(dst.address(), size)

    def graph_compute(self, graph: GraphRef) -> None:
        known = self._known.get(graph.uid)
        if known is not None:
            self._mirror.computes(graph.uid)
            self._reused += 1
        else:
            found = graph.ext_payload()
            self._mirror.computes(graph.uid, found.written)
            rows = [np.frombuffer(piece, EXT_TENSOR) for piece in found.rows]
            known = RecordedGraph(np.concatenate(rows) if len(rows) > 1 else rows[0], found.n_nodes)
            if graph.uid:
                self._known[graph.uid] = known
                if len(self._known) > GRAPH_LRU:
                    del self._known[next(iter(self._known))]
        self._graphs.append(known)

    def memory(self) -> tuple[int, int]:
        return self.info.memory_free, self.info.memory_total

    def bye(self) -> None:
        pass


class _QuietStream:
    """As much of a `Stream` as the backend asks for, where nothing travels and nobody waits.

    Attributes:
        failure, lost: what went wrong in a callback.
    """

    poll = 0

    def __init__(self, number: int) -> None:
        self.endpoint = f"rehearsal:{number}"
        self.device = f"RPC{number}"
        self.lost: WorkerLost | None = None
        self.ended = False

    @property
    def failure(self) -> WorkerLost | None:
        return self.lost

    def fail(self, cause: Exception, command: str) -> None:
        self.ended = True
        self.lost = self.lost or WorkerLost(self.endpoint, self.device, command, cause)

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost.with_traceback(None)

    def last_ticket(self) -> Ticket | None:
        return None

    def flush(self) -> None:
        pass

    def drain(self) -> None:
        pass

    def hold_until(self, ticket: Ticket) -> None:
        pass


def _answer(name: str, size: int, target: memoryview | None) -> Ticket:
    """A ticket that is done; zeros are in the caller's memory."""
    ticket = Ticket(name, size)
    if target is not None:
        target[:] = bytes(len(target))
    ticket.resolve(b"")
    return ticket


def joined(graphs: Sequence[RecordedGraph]) -> RecordedGraph:
    """Graphs that are computed one after the other, as one: nodes first, rows of leaves as often as
    they come."""
    if len(graphs) == 1:
        return graphs[0]
    total = sum(graph.n_nodes for graph in graphs)
    nodes, leaves = [], []
    node_at, leaf_at = 0, total
    for graph in graphs:
        n, n_rows = graph.n_nodes, len(graph.rows)
        # where each row goes; -1, which is none, stays
        place = np.append(
            np.concatenate((np.arange(n) + node_at, np.arange(n_rows - n) + leaf_at)), -1
        )
        rows = graph.rows.copy()
        for field in ("src", "view_src"):
            rows[field] = place[rows[field]]
        nodes.append(rows[:n])
        leaves.append(rows[n:])
        node_at, leaf_at = node_at + n, leaf_at + n_rows - n
    return RecordedGraph(np.concatenate([np.zeros(0, EXT_TENSOR), *nodes, *leaves]), total)


# by number, those that nobody uses: what the engine keeps of a device, it keeps for ever
_idle: dict[int, list[RecordingDevice]] = {}
_lock = threading.Lock()


@contextmanager
def recording_devices(memory: Sequence[tuple[int, int]]) -> Iterator[list[RecordingDevice]]:
    """Devices that record, one for each (free, total) bytes of memory; RPC0, RPC1, … by name.

    They are in no list of the engine's. What uses them must be freed before the end.
    """
    devices: list[RecordingDevice] = []
    try:
        for number, sizes in enumerate(memory):
            devices.append(_begin(number, sizes))
        yield devices
    finally:
        for number, device in enumerate(devices):
            if device.end():
                with _lock:
                    _idle.setdefault(number, []).append(device)


def _begin(number: int, memory: tuple[int, int]) -> RecordingDevice:
    plugin = plugins.load()
    link = RecordingLink(number, memory)
    with _lock:
        waiting = _idle.get(number)
        device = waiting.pop() if waiting else None
    if device is None:
        device = RecordingDevice(plugin, link, number)
        plugin.forget(device)
    else:
        device.begin(link)
    plugin.adopt(device)
    return device
