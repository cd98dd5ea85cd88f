"""Clusters in one process: real sessions of both ends, real sockets, devices without an engine.

A fake device computes by counting every byte of its memory up, and takes its time for everything,
differently each time, so that whatever is not ordered comes in another order.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from caravan.errors import CaravanError
from caravan.stream.caller import Identity
from caravan.stream.link import DeviceLink, ExtGraph
from caravan.stream.routes import Route
from caravan.stream.session import Session, open_session
from caravan.stream.ticket import Ticket
from caravan.stream.watchdog import Watchdog
from caravan.transport.endpoint import Endpoint
from caravan.wire.dtypes import WireType
from caravan.wire.extension import DeviceInfo, PeerRequest
from caravan.wire.versions import V8
from caravan.worker import control
from caravan.worker import session as worker_session
from caravan.worker.handshake import Terms, greet
from wired import PATIENCE
from worker.fakes import FakeBuffer, FakeDevice
from worker.raw_client import linear_records, linear_rows, record

OPS = ("NONE", "DUP")
SIZE = 1 << 15
_COUNT = bytes((n + 1) & 0xFF for n in range(256))


@dataclass(frozen=True)
class Kind:
    """A worker: its devices (True: their memory is the host's), and what it speaks."""

    devices: tuple[bool, ...] = (True,)
    extension: bool = True
    direct: bool = True


class SlowBuffer(FakeBuffer):
    """Memory that takes its time."""

    def __init__(self, pointer: int, size: int, host: bool, delay) -> None:
        super().__init__(pointer, size, host)
        self._delay = delay

    def read(self, offset: int, size: int):
        self._delay()
        return super().read(offset, size)

    def write(self, offset: int, data) -> None:
        self._delay()
        super().write(offset, data)


class SlowDevice(FakeDevice):
    """A device whose computations count each byte of its newest buffer up by one."""

    def __init__(self, index: int, host: bool, seed: int) -> None:
        super().__init__(index, host=host)
        self._random = random.Random(seed)

    def delay(self) -> None:
        dice = self._random.random()
        if dice < 0.3:
            time.sleep(dice / 300)

    def info(self) -> DeviceInfo:
        return DeviceInfo(self.name, "fake", 0, 1, 1, 2, 32, self.max_size, False)

    def allocate(self, size: int) -> FakeBuffer:
        made = SlowBuffer(16 * self.index + len(self.buffers) + 1, size, self._host, self.delay)
        self.buffers.append(made)
        return made

    def compute(self, graph: object) -> int:
        self.delay()
        memory = self.buffers[-1]
        memory.data[:] = memory.data.translate(_COUNT)
        return super().compute(graph)


def narrow(sock: socket.socket) -> None:
    """Little fits into this connection (of a listener: into those that it accepts)."""
    for direction in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, direction, 4096)


class InProcessWorker:
    """A supervisor and its session in one: greets whoever comes, and adopts it."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self.devices = [SlowDevice(i, host, seed + i) for i, host in enumerate(kind.devices)]
        self._theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours = ours
        engine = SimpleNamespace(version="fake")
        self.session = worker_session.Session(engine, self.devices, ours)
        self._listener = socket.create_server(("127.0.0.1", 0))
        narrow(self._listener)
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self._counter = 0
        self._thread = threading.Thread(target=self._accept, name="test-worker", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with contextlib.suppress(CaravanError):
                    self._adopt(sock)

    def _adopt(self, sock: socket.socket) -> None:
        with sock:
            greeting = greet(sock, Terms(V8, timeout=PATIENCE))
            request = greeting.request
            self._counter += 1
            adopt = control.Adopt(
                connection=self._counter,
                peer=f"client {self._counter}",
                major=8 if request is None else 0,
                key="the session",
                seq=greeting.seq,
                device=0 if request is None else request.device,
                peer_key="the way in",
                addresses=[str(self.endpoint)],
                route=request.route if isinstance(request, PeerRequest) else 0,
            )
            sock.setblocking(True)
            self.session.adopt(adopt, sock.dup().detach())

    def close(self) -> None:
        """After the head has left."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE)
        peers = self.session._peers
        for outlet in peers._out.values():
            outlet.close()
            outlet._transport.close()
        for incoming in peers._in.values():
            incoming._transport.close()
        for lane in self.session._lanes:
            # one that hangs has failed its test already
            closer = threading.Thread(target=lane.executor.close, daemon=True)
            closer.start()
            closer.join(2.0)
        for sock in (self._theirs, self._ours):
            sock.close()


class Place:
    """A place in a device's memory, as the verbs of a link want it."""

    def __init__(self, handle: int, address: int, size: int) -> None:
        self._handle = handle
        self._address = address
        self._size = size

    def address(self) -> int:
        return self._address

    def base_record(self) -> bytes:
        return record(1, (self._size // 4,), self._handle, self._address).tobytes()

    def ext_record(self) -> bytes:
        raise NotImplementedError


class CountUp:
    """The graph that a fake device computes; both wire formats can carry it."""

    def __init__(self, uid: int, handle: int, base: int) -> None:
        self.uid = uid
        self._handle = handle
        self._base = base

    def base_payload(self):
        nodes, parts = linear_records(self._handle, self._base)
        count = len(parts).to_bytes(4, "little")
        rows = b"".join(part.tobytes() for part in parts.values())
        return len(nodes), [np.array(nodes, "<u8").tobytes(), count, rows]

    def ext_payload(self):
        rows, _ = linear_rows(self._base)
        everywhere = [(self._base, self._base + SIZE)]
        return ExtGraph(2, len(rows), [rows.tobytes()], frozenset([self._handle]), everywhere)


class Device:
    """A device as the head has it, with one buffer of SIZE bytes."""

    def __init__(self, link: DeviceLink) -> None:
        self.link = link
        buffer = link.alloc(SIZE)
        self._handle = buffer.handle
        self._base = buffer.base
        link.clear(self._handle, 0)
        self._uids = 0

    def at(self, offset: int, size: int) -> Place:
        return Place(self._handle, self._base + offset, size)

    def set(self, offset: int, data: bytes, again: bool = False) -> None:
        self.link.set_tensor(self.at(offset, len(data)), 0, data, again=again)

    def fill(self, offset: int, size: int, value: int) -> None:
        self.link.memset_tensor(self.at(offset, size), 0, size, value)

    def get(self, offset: int, size: int) -> Ticket:
        return self.link.get_tensor(self.at(offset, size), 0, size, None)

    def copy(self, source: int, target: int, size: int) -> None:
        self.link.copy_tensor(self.at(source, size), self.at(target, size), size)

    def compute(self, uid: int) -> None:
        self.link.graph_compute(CountUp(uid, self._handle, self._base))


class Cluster:
    """Devices of several workers, and the routes between them."""

    def __init__(self, sessions: list[Session]) -> None:
        self.devices = [Device(link) for session in sessions for link in session.links]
        self._routes: dict[tuple[int, int], Route] = {}
        self._lock = threading.Lock()

    def route(self, source: int, target: int) -> Route:
        with self._lock:
            if (source, target) not in self._routes:
                links = (self.devices[source].link, self.devices[target].link)
                self._routes[source, target] = Route(*links)
            return self._routes[source, target]

    def copy(
        self, source: int, at: int, target: int, to: int, size: int, dtype: WireType = WireType.F32
    ) -> None:
        if source == target:
            self.devices[source].copy(at, to, size)
            return
        one, other = self.devices[source].at(at, size), self.devices[target].at(to, size)
        self.route(source, target).copy(one, other, size, dtype)

    def casts(self, source: int, target: int) -> bool:
        """Whether what is copied may change its type on the way."""
        one, other = self.devices[source].link, self.devices[target].link
        apart = one.stream.endpoint != other.stream.endpoint
        return apart and one.extension and other.extension


@contextlib.contextmanager
def running(kinds: Sequence[Kind], seed: int = 0) -> Iterator[Cluster]:
    """A cluster of such workers; those that speak both protocols are asked for the kind's."""
    workers = [InProcessWorker(kind, seed + 100 * n) for n, kind in enumerate(kinds)]
    watchdog = Watchdog(PATIENCE)
    sessions: list[Session] = []
    try:
        for worker, kind in zip(workers, kinds, strict=True):
            sessions.append(
                open_session(
                    worker.endpoint,
                    Identity("test", "fake", worker_session.OP_NAMES),
                    f"{worker.endpoint.port} device {{}}".format,
                    watchdog,
                    timeout=PATIENCE,
                    use_extension=kind.extension,
                    direct=kind.direct,
                )
            )
        yield Cluster(sessions)
    finally:
        for session in sessions:
            session.close()
        watchdog.close()
        for worker in workers:
            worker.close()
