"""`Scratch`: memory on a device, for graphs whose time is taken and whose results nobody wants.

Nothing is sent but the graphs: the memory is cleared there. Everything is freed at the end. For
`probe` and `links`; knows no model.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caravan import interrupt
from caravan.backend import RemoteDevice
from caravan.backend.written import written
from caravan.engine.layouts import TYPE_NUMBERS
from caravan.errors import CaravanError, LocalProtocolError, RemoteError
from caravan.stream.link import ExtGraph, RemoteAllocation
from caravan.stream.telemetry import DeviceStats, Question, ask_stats
from caravan.stream.ticket import Ticket
from caravan.transport.base import Buffer
from caravan.wire.commands import Ext
from caravan.wire.records import EXT_TENSOR, RPC_TENSOR

Rows = NDArray[Any]

# The engine counts its graphs from 1.
_uids = itertools.count(1 << 62)
_SAME = ("type", "ne", "nb", "op", "op_params", "flags", "view_offs", "data", "name", "use_count")
# An id must not be 0, and is no address of anything.
_FIRST_ID = 1 << 32
_SETTLED = 0.2  # seconds that are not measured twice
_DISTINCT = 0.005  # seconds of a graph beside which the way there and back is little
_CHECKS = 7
_BURSTS, _BURST = 5, 8
_REST = 0.005
_TURNS = 0.5  # seconds for a device's turns
_ROUNDS = 3
_FEWEST, _MOST = 2, 40


class Span:
    """See `stream.link.TensorRef`: some bytes of a buffer, as f32.

    Args:
        memory: the buffer.
        offset, size: bytes, a multiple of 4.
    """

    __slots__ = ("_memory", "_offset", "_size")

    def __init__(self, memory: RemoteAllocation, offset: int, size: int) -> None:
        self._memory = memory
        self._offset = offset
        self._size = size

    def address(self) -> int:
        return self._memory.base + self._offset

    def base_record(self) -> bytes:
        row = np.zeros(1, RPC_TENSOR)
        self._describe(row)
        row["id"] = _FIRST_ID
        row["buffer"] = self._memory.handle
        return row.tobytes()

    def ext_record(self) -> bytes:
        row = np.zeros(1, EXT_TENSOR)
        self._describe(row)
        row["src"] = row["view_src"] = -1
        return row.tobytes()

    def _describe(self, row: Rows) -> None:
        row["type"] = TYPE_NUMBERS["f32"]
        row["ne"] = (self._size // 4, 1, 1, 1)
        row["nb"] = (4, self._size, self._size, self._size)
        row["data"] = self.address()


class ScratchGraph:
    """See `stream.link.GraphRef`: rows of EXT_TENSOR that all lie in one buffer.

    Args:
        handle: the buffer's.
        pads: whether tensors may take more bytes on the device than their own.
    """

    def __init__(self, rows: Rows, n_nodes: int, handle: int, pads: bool) -> None:
        self.uid = next(_uids)
        self._rows = rows
        self._n_nodes = n_nodes
        self._handle = handle
        self._pads = pads

    def ext_payload(self) -> ExtGraph:
        rows, n = self._rows, self._n_nodes
        pieces: list[Buffer] = [rows.tobytes()]
        spans = written(rows[:n], self._pads)
        return ExtGraph(n, len(rows), pieces, frozenset((self._handle,)), spans)

    def base_payload(self) -> tuple[int, list[Buffer]]:
        """Raises LocalProtocolError for a tensor that the base protocol cannot describe."""
        rows, n = self._rows, self._n_nodes
        if int(rows["ne"].max()) >> 32 or int(rows["nb"].max()) >> 32:
            raise LocalProtocolError("a tensor of 4 GiB or more has no room in llama.cpp's RPC")
        records = np.zeros(len(rows), RPC_TENSOR)
        for field in _SAME:
            records[field] = rows[field]
        ids = np.arange(_FIRST_ID, _FIRST_ID + len(rows) + 1, dtype=np.uint64)
        # the index -1
        ids[-1] = 0
        records["id"] = ids[:-1]
        records["src"] = ids[rows["src"]]
        records["view_src"] = ids[rows["view_src"]]
        records["buffer"] = np.where(rows["data"] != 0, self._handle, 0)
        return n, [ids[:n].tobytes(), len(rows).to_bytes(4, "little"), records.tobytes()]


class Scratch:
    """Memory on a device, freed when the context is left, and a stop-watch.

    After Ctrl-C where that is held back nobody waits any longer, and CaravanError is raised.

    What the device takes is told by its worker where that counts it, so that slow links and their
    moods stay out; else it is the head's time for several graphs less that for one. All methods
    wait, and raise WorkerLost.

    Attributes:
        round_trip: seconds to the device and back while it is idle.
    """

    def __init__(self, device: RemoteDevice) -> None:
        self.device = device
        self._link = device.link
        self._held: list[int] = []
        self._counts = self._link.extension
        self.round_trip = 0.0

    def __enter__(self) -> Scratch:
        self.round_trip = round_trip(self.device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Free what was taken so far."""
        held, self._held = self._held, []
        for handle in held:
            self._link.free(handle)
        self.device.memory_changed()

    def take(self, size: int) -> RemoteAllocation:
        """Memory of zeros. Raises AllocationError where there is no room."""
        memory = self._link.alloc(size)
        self._held.append(memory.handle)
        self._link.clear(memory.handle, 0)
        return memory

    def give_back(self, memory: RemoteAllocation) -> None:
        """Free it before the end; the device forgets the graphs that use it."""
        if memory.handle in self._held:
            self._held.remove(memory.handle)
            self._link.free(memory.handle)

    def graph(self, rows: Rows, n_nodes: int, memory: RemoteAllocation) -> ScratchGraph:
        """Rows of EXT_TENSOR, `data` addresses within the memory, as something to be computed."""
        return ScratchGraph(rows, n_nodes, memory.handle, self._link.info.pads)

    def fence(self) -> None:
        """Wait until everything before has been done."""
        _wait(self._link.fence())

    def computing(self, graph: ScratchGraph, seconds: float = 0.05) -> float:
        """Seconds of one computation of the graph; what each graph costs is in it.

        About `seconds` are spent on that, more only if the graph itself takes longer. The quickest
        of some rounds counts: whatever else a machine does can only make it slower.

        Raises KeyboardInterrupt after Ctrl-C where that is held back.
        """
        if interrupt.pending():
            raise KeyboardInterrupt
        about = self._timed(graph, 1)
        if not self._counts:
            # the first time it has to be sent and built
            about = self._timed(graph, 1)
        if about > _SETTLED:
            return about
        if about > seconds / _ROUNDS:
            return min(about, self._timed(graph, 1))
        count = min(max(int(seconds / _ROUNDS / max(about, 1e-6)), _FEWEST), _MOST)
        if self._counts or about > max(_DISTINCT, 20 * self.round_trip):
            return min(self._timed(graph, count) for _ in range(_ROUNDS))
        return self._slope(graph, count)

    def following(self, graph: ScratchGraph, seconds: float = 0.05) -> float:
        """Seconds from one computation of the graph to the next, when they wait in line."""
        about = max(self._elapsed(graph, 1), 1e-6)
        count = min(max(int(seconds / _ROUNDS / about), 10), _MOST)
        return self._slope(graph, count)

    def turn(self, graph: ScratchGraph, place: Span, size: int, rounds: int = 20) -> float:
        """Seconds of the head from a small write, the graph and a small read on the idle device to
        the result, without the way there and back: that is asked for each time, as it may vary."""
        link, data = self._link, bytes(size)
        times: list[float] = []
        end = time.perf_counter() + _TURNS
        while len(times) < rounds and (len(times) < 5 or time.perf_counter() < end):
            start = time.perf_counter()
            _ask(self.device)
            there = time.perf_counter()
            link.set_tensor(place, 0, data)
            link.graph_compute(graph)
            _wait(link.get_tensor(place, 0, size, None))
            times.append(time.perf_counter() - there - (there - start))
        return max(statistics.median(times), 0.0)

    def checking(self, rows: Rows, n_nodes: int, memory: RemoteAllocation) -> float:
        """Seconds from the arrival of a graph that is new to the idle device until it can be
        computed: without its way there, which is that of a write of its size.

        Args:
            rows: as for `graph`.
        """
        data = bytes(min(rows.nbytes, memory.size) & ~3)
        place = Span(memory, 0, len(data))
        rounds = []
        for _ in range(_CHECKS):
            graph = self.graph(rows, n_nodes, memory)
            new = self._rested(lambda graph=graph: self._link.graph_compute(graph))  # type: ignore[misc]
            known = self._rested(lambda graph=graph: self._link.graph_compute(graph))  # type: ignore[misc]
            write = self._rested(lambda: self._link.set_tensor(place, 0, data))
            nothing = self._rested(lambda: None)
            rounds.append((new, known, write, nothing))
        new, known, write, nothing = (_quick(times) for times in zip(*rounds, strict=True))
        return max(new - known - (write - nothing), 0.0)

    def _rested(self, do: Callable[[], None]) -> float:
        """Seconds of something that finds the worker as the first micro-batch of a prompt does."""
        time.sleep(_REST)
        start = time.perf_counter()
        do()
        self.fence()
        return time.perf_counter() - start

    def _timed(self, graph: ScratchGraph, count: int) -> float:
        """Of one, from so many in a row."""
        if not self._counts:
            return max(self._elapsed(graph, count) - self.round_trip, 0.0) / count
        before = self._stats()
        self._elapsed(graph, count)
        after = self._stats()
        if before is None or after is None:
            self._counts = False
            return self._timed(graph, count)
        return (after.computing - before.computing) / 1e9 / count

    def _slope(self, graph: ScratchGraph, count: int) -> float:
        """Of one more in a row of so many; what disturbs can only add to either end of the slope,
        so the quickest of each counts."""
        one = min(self._elapsed(graph, 1) for _ in range(_ROUNDS))
        many = min(self._elapsed(graph, count) for _ in range(_ROUNDS))
        return max(many - one, 0.0) / (count - 1)

    def _elapsed(self, graph: ScratchGraph, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            self._link.graph_compute(graph)
        self.fence()
        return time.perf_counter() - start

    def _stats(self) -> DeviceStats | None:
        try:
            return ask_stats(self._link.stream)
        except RemoteError:
            # a worker of an older version
            return None


def round_trip(device: RemoteDevice, seconds: float = 0.2) -> float:
    """Seconds to an idle device's worker and back, as they are in the quickest of a few bursts of
    questions: what else the machines do comes and goes.

    Fewer are asked where it takes long. Waits; raises WorkerLost.
    """
    bursts: list[float] = []
    end = time.perf_counter() + seconds
    while not bursts or (len(bursts) < _BURSTS and time.perf_counter() < end):
        times: list[float] = []
        while len(times) < 3 or (len(times) < _BURST and time.perf_counter() < end):
            start = time.perf_counter()
            _ask(device)
            times.append(time.perf_counter() - start)
        bursts.append(_quick(times))
        time.sleep(_REST)
    return min(bursts)


def _quick(times: Sequence[float]) -> float:
    """What a quarter of them are quicker than: others may have been disturbed."""
    return sorted(times)[len(times) // 4]


def _ask(device: RemoteDevice) -> None:
    """Something that is answered at once, whatever the device is at where that can be."""
    link = device.link
    ticket: Ticket = Question(link.stream, Ext.CLOCK) if link.extension else link.fence()
    _wait(ticket)


def _wait(ticket: Ticket) -> None:
    """Raises what the ticket does, and KeyboardInterrupt after Ctrl-C."""
    try:
        ticket.wait(stop=interrupt.pending)
    except CaravanError:
        if interrupt.pending():
            raise KeyboardInterrupt from None
        raise
