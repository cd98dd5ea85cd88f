"""`Lane`: what one session has on one device: the queue, the graphs, the counters, the recorder.

`GraphStore` keeps graphs by uid under the rule of the protocol in use; the head counts alike.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from caravan.errors import RemoteError
from caravan.trace.counters import Counters
from caravan.trace.recorder import Recorder
from caravan.trace.spans import Kind
from caravan.wire.extension import Status
from caravan.worker.buffers import Buffer, BufferTable
from caravan.worker.device import Device
from caravan.worker.executor import Executor
from caravan.worker.graph import Graph, check_status
from caravan.worker.peers import Peers
from caravan.worker.rules.registry import MAX_SCRATCH
from caravan.worker.table import Table

if TYPE_CHECKING:
    from caravan.worker.keeper import Keeper


# Tensors of the graphs that are kept of one device, some 400 bytes each.
MAX_KEPT = 1 << 20


class GraphStore:
    """Graphs by uid.

    Args:
        limit: how many are kept.
        lru: when full, drop the least recently used one (extension); else all (protocol 8).
        most: tensors that they may have together.
        scratch: bytes of memory for their guards, likewise.
    """

    def __init__(
        self, limit: int, lru: bool, most: int = MAX_KEPT, scratch: int = MAX_SCRATCH
    ) -> None:
        self._limit = limit
        self._lru = lru
        self._most = most
        self._most_scratch = scratch
        self._tensors = 0
        self._scratch = 0
        self._graphs: OrderedDict[int, Graph | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def put(self, uid: int, graph: Graph) -> None:
        """Raises RemoteError (OUT_OF_MEMORY): which ones to drop for it the head would not know."""
        self._make_room(uid)
        if self._tensors + graph.n_tensors > self._most:
            raise RemoteError(
                Status.OUT_OF_MEMORY,
                f"no room for a graph of {graph.n_tensors} tensors: {len(self._graphs)} graphs of"
                f" {self._tensors} are kept, and at most {self._most} tensors",
            )
        if self._scratch + graph.scratch > self._most_scratch:
            raise RemoteError(
                Status.OUT_OF_MEMORY,
                f"no room for a graph with {graph.scratch} bytes of scratch memory: {self._scratch}"
                f" are kept, and at most {self._most_scratch}",
            )
        self._tensors += graph.n_tensors
        self._scratch += graph.scratch
        self._graphs[uid] = graph

    def _make_room(self, uid: int) -> None:
        if not self._lru and len(self._graphs) >= self._limit:
            self._graphs.clear()
            self._tensors = self._scratch = 0
        self._count_out(self._graphs.pop(uid, None))
        if self._lru and len(self._graphs) >= self._limit:
            self._count_out(self._graphs.popitem(last=False)[1])

    def _count_out(self, graph: Graph | None) -> None:
        if graph is not None:
            self._tensors -= graph.n_tensors
            self._scratch -= graph.scratch

    def get(self, uid: int) -> Graph:
        """Raises RemoteError (UNKNOWN_GRAPH)."""
        graph = self._graphs.get(uid)
        if graph is None:
            raise RemoteError(Status.UNKNOWN_GRAPH, f"no graph has uid {uid}")
        if self._lru:
            self._graphs.move_to_end(uid)
        return graph

    def drop_users(self, handle: int) -> None:
        """Forget the graphs that use a buffer.

        llama.cpp's server forgets all of them, its client none: it asks for the others again, and
        goes on counting the uids of those that are gone.
        """
        users = [uid for uid, graph in self._graphs.items() if graph and handle in graph.handles]
        for uid in users:
            self._count_out(self._graphs[uid])
            if self._lru:
                del self._graphs[uid]
            else:
                self._graphs[uid] = None


class Lane:
    """One device of a session. Methods run at the device's turn (see `Executor`).

    Args:
        keeper: stores weights for the next time; None where there is no cache for them.
    """

    def __init__(
        self,
        device: Device,
        buffers: BufferTable,
        graphs: GraphStore,
        peers: Peers | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self.device = device
        self.buffers = buffers
        self.graphs = graphs
        self.peers = peers if peers is not None else Peers()
        self.keeper = keeper
        self.executor = Executor(f"{device.name}#{device.index}")
        self.counters = Counters()
        self.spans = Recorder()
        # The first belongs to the device's reader, the second to whoever has the turn.
        self.frees_posted = 0
        self.frees_done = 0

    def own(self, buffer: Buffer) -> Buffer:
        """The buffer, if it is this device's; raises RemoteError."""
        if buffer.device != self.device.index:
            raise RemoteError(
                Status.BAD_REQUEST, f"buffer {buffer.handle} belongs to another device"
            )
        return buffer

    def locate(self, address: int, size: int) -> tuple[Buffer, int]:
        """`BufferTable.locate`, for this device only."""
        buffer, offset = self.buffers.locate(address, size)
        return self.own(buffer), offset

    def free(self, handle: int) -> None:
        """Free a buffer and forget the graphs that use it.

        Not before what uses its memory on other threads has noticed, which is soon; what is still
        to be kept of it is stored first, if that does not take long.
        """
        try:
            buffer = self.own(self.buffers.get(handle))
            self.graphs.drop_users(handle)
            if self.keeper is not None:
                self.keeper.finish(handle)
            self.buffers.remove(handle)
            if buffer.native is not None:
                buffer.native.free()
        finally:
            self.frees_done += 1

    def build_ahead(self, table: Table) -> Graph | None:
        """A graph built on the reader's thread, before its turn; see `current`.

        None when that is not possible: then the turn shows whether there is an error. Not while a
        free is queued: the engine looks into buffers, and one could vanish under it.
        """
        if self.frees_posted != self.frees_done:
            return None
        try:
            return self.build(table)
        except Exception:
            return None

    def build(self, table: Table) -> Graph:
        """Check and build; raises RemoteError."""
        with self.spans.during(Kind.BUILD, detail=table.n_nodes):
            graph = Graph(table, self.buffers.memory(self.device.index), self.device)
        self.counters.graphs_built += 1
        return graph

    def current(self, graph: Graph) -> bool:
        """Whether no buffer has come or gone since the graph was built."""
        return graph.version == self.buffers.version

    def compute(self, graph: Graph, uid: int = 0) -> None:
        """Raises RemoteError when the engine fails. The uid is for the timeline."""
        with self.spans.during(Kind.GRAPH, key=uid, detail=graph.n_nodes):
            status = self.device.compute(graph)
        self.counters.graphs += 1
        check_status(status)
