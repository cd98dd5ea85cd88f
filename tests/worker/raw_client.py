"""A scripted client that speaks raw wire bytes to a worker, in both protocols. No retries, no
threads: what a test sends is what goes out."""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import dataclass

import numpy as np

from caravan.wire import codec, extension
from caravan.wire.commands import EXT, Base, Ext, base_table
from caravan.wire.extension import FRAME, SessionReply, SessionRequest
from caravan.wire.proof import Claim
from caravan.wire.records import EXT_TENSOR, RPC_TENSOR

F32, Q4_0, Q8_0, I32 = 0, 2, 8, 26
ADD, MUL_MAT, VIEW = 2, 29, 37
COMPUTE = 16


class Closed(Exception):
    """The worker closed the connection."""


@dataclass
class Answer:
    number: int
    status: int
    seq: int
    body: bytes


class Wire:
    """A socket with exact reads and a bound of time."""

    def __init__(self, endpoint: str, timeout: float = 20.0) -> None:
        if endpoint.startswith("unix:"):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(timeout)
            self.sock.connect(endpoint[5:])
        else:
            host, _, port = endpoint.rpartition(":")
            self.sock = socket.create_connection((host.strip("[]"), int(port)), timeout)

    def __enter__(self):
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def send(self, *parts: bytes) -> None:
        try:
            self.sock.sendall(b"".join(parts))
        except (BrokenPipeError, ConnectionResetError) as exc:
            raise Closed from exc

    def read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self.sock.recv(size - len(data))
            except ConnectionResetError as exc:
                raise Closed from exc
            if not part:
                raise Closed
            data += part
        return bytes(data)

    def assert_closed(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            assert self.sock.recv(1) == b""

    def hello(self, caps: bytes):
        self.send(codec.hello_request(caps))
        (length,) = struct.unpack("<Q", self.read(8))
        return codec.decode_hello_reply(self.read(length))


class BaseClient(Wire):
    """Protocol 7 or 8, whichever the worker announces."""

    def __init__(self, endpoint: str, timeout: float = 20.0) -> None:
        super().__init__(endpoint, timeout)
        self.version, self.caps = self.hello(bytes(24))
        self.table = base_table(self.version.major)

    def post(self, number: int, *values, tail: bytes = b"") -> None:
        payload = self.table[number].request.pack(*values) + tail
        self.send(codec.base_request(number, len(payload)), payload)

    def reply(self) -> bytes:
        (length,) = struct.unpack("<Q", self.read(8))
        return self.read(length)

    def call(self, number: int, *values, tail: bytes = b"") -> tuple:
        self.post(number, *values, tail=tail)
        layout = self.table[number].reply
        body = self.reply()
        return layout.unpack(body) if layout.size else (body,)

    def alloc(self, size: int, device: int = 0) -> tuple[int, int]:
        """(handle, base)."""
        handle, got = self.call(Base.ALLOC_BUFFER, device, size)
        assert handle and got >= size
        return handle, self.call(Base.BUFFER_GET_BASE, handle)[0]

    def set(self, tensor: np.ndarray, data: bytes, offset: int = 0) -> None:
        self.post(Base.SET_TENSOR, tensor.tobytes(), 0, offset, tail=data)

    def get(self, tensor: np.ndarray, size: int, offset: int = 0) -> bytes:
        return self.call(Base.GET_TENSOR, tensor.tobytes(), offset, size)[0]

    def graph(self, nodes: list[int], tensors: list[np.ndarray], device: int = 0, uid: int = 0):
        head = [device, uid, len(nodes)] if self.version.major >= 8 else [device, len(nodes)]
        tail = np.array(nodes, "<u8").tobytes() + struct.pack("<I", len(tensors))
        tail += b"".join(t.tobytes() for t in tensors)
        self.post(Base.GRAPH_COMPUTE, *head, tail=tail)

    def recompute(self, device: int = 0, uid: int = 0) -> None:
        self.post(Base.GRAPH_RECOMPUTE, *([device, uid] if self.version.major >= 8 else [device]))


class ExtClient(Wire):
    """The extension, on one device."""

    def __init__(
        self,
        endpoint: str,
        device: int = 0,
        session: str = "",
        timeout: float = 20.0,
        token: bytes = b"",
    ) -> None:
        super().__init__(endpoint, timeout)
        self.seq = 0
        self.version, self.caps = self.hello(extension.caps())
        assert extension.agreed(self.caps) == 1
        if token:
            self.prove(token)
        request = SessionRequest(session, device, "test", "test")
        try:
            self.answer = self.call_raw(Ext.SESSION, extension.encode_json(request))
        except Closed:
            self.close()
            raise
        self.session: SessionReply | None = None
        if self.answer.status == 0:
            self.session = extension.decode_session_reply(self.answer.body)

    def prove(self, token: bytes) -> None:
        claim = Claim(token)
        answer = self.call_raw(Ext.PROVE, claim.prove(self.call_raw(Ext.AUTH, claim.nonce).body))
        if answer.status:
            self.close()
            raise Closed
        assert claim.believes(answer.body)

    @property
    def key(self) -> str:
        assert self.session is not None
        return self.session.session

    def post_raw(self, number: int, payload: bytes) -> int:
        self.seq += 1
        self.send(codec.ext_frame(number, self.seq, len(payload)), payload)
        return self.seq

    def answer_of(self) -> Answer:
        number, status, _flags, seq, length = FRAME.unpack(self.read(FRAME.size))
        return Answer(number, status, seq, self.read(length))

    def call_raw(self, number: int, payload: bytes) -> Answer:
        seq = self.post_raw(number, payload)
        answer = self.answer_of()
        assert (answer.number, answer.seq) == (number, seq), answer
        return answer

    def post(self, number: int, *values, tail: bytes = b"") -> int:
        return self.post_raw(number, EXT[number].request.pack(*values) + tail)

    def call(self, number: int, *values, tail: bytes = b"") -> tuple:
        answer = self.call_raw(number, EXT[number].request.pack(*values) + tail)
        assert answer.status == 0, answer
        layout = EXT[number].reply
        return layout.unpack(answer.body) if layout.size else (answer.body,)

    def alloc(self, size: int) -> tuple[int, int]:
        handle, base, got = self.call(Ext.ALLOC, size)
        assert got >= size
        return handle, base

    def set(self, address: int, data: bytes) -> None:
        self.post(Ext.SET, address, tail=data)

    def get(self, address: int, size: int) -> bytes:
        return self.call(Ext.GET, address, size)[0]

    def fence(self) -> None:
        self.call(Ext.FENCE)

    def graph(self, rows: np.ndarray, n_nodes: int, uid: int = 0) -> int:
        return self.post(Ext.GRAPH_COMPUTE, uid, n_nodes, len(rows), tail=rows.tobytes())


def strides(ne, size: int = 4, block: int = 1) -> list[int]:
    nb = [size, size * ne[0] // block]
    nb.append(nb[1] * ne[1])
    nb.append(nb[2] * ne[2])
    return nb


def row(ne, data: int, op: int = 0, src=(), kind: int = F32, **fields) -> np.ndarray:
    """One EXT_TENSOR, contiguous."""
    ne = [*ne, 1, 1, 1][:4]
    tensor = np.zeros((), EXT_TENSOR)
    tensor["ne"] = ne
    tensor["nb"] = strides(ne)
    tensor["data"] = data
    tensor["src"] = -1
    tensor["src"][: len(src)] = src
    tensor["view_src"] = -1
    tensor["op"] = op
    tensor["type"] = kind
    tensor["flags"] = COMPUTE if op else 0
    tensor["use_count"] = 1
    for name, value in fields.items():
        tensor[name] = value
    return tensor


def record(
    ident: int, ne, handle: int, data: int, op: int = 0, src=(), kind: int = F32
) -> np.ndarray:
    """One rpc_tensor, contiguous."""
    ne = [*ne, 1, 1, 1][:4]
    tensor = np.zeros((), RPC_TENSOR)
    tensor["id"] = ident
    tensor["ne"] = ne
    tensor["nb"] = strides(ne)
    tensor["buffer"] = handle
    tensor["data"] = data
    tensor["src"][: len(src)] = src
    tensor["op"] = op
    tensor["type"] = kind
    tensor["flags"] = COMPUTE if op else 0
    tensor["use_count"] = 1
    return tensor


def linear_rows(base: int, k: int = 8, m: int = 4, n: int = 3) -> tuple[np.ndarray, dict]:
    """y = W x + b as rows, W (m,k), x (n,k), b (m); and where each part lies."""
    at = {"w": 0, "x": 4096, "b": 8192, "wx": 12288, "y": 16384}
    rows = np.stack(
        [
            row((m, n), base + at["wx"], MUL_MAT, (2, 3)),
            row((m, n), base + at["y"], ADD, (0, 4)),
            row((k, m), base + at["w"]),
            row((k, n), base + at["x"]),
            row((m,), base + at["b"]),
        ]
    )
    return rows, at


def linear_records(handle: int, base: int, k: int = 8, m: int = 4, n: int = 3):
    """The same as rpc_tensors: (node ids, records by name)."""
    at = {"w": 0, "x": 4096, "b": 8192, "wx": 12288, "y": 16384}
    parts = {
        "w": record(11, (k, m), handle, base + at["w"]),
        "x": record(12, (k, n), handle, base + at["x"]),
        "b": record(13, (m,), handle, base + at["b"]),
        "wx": record(14, (m, n), handle, base + at["wx"], MUL_MAT, (11, 12)),
        "y": record(15, (m, n), handle, base + at["y"], ADD, (14, 13)),
    }
    return [14, 15], parts
