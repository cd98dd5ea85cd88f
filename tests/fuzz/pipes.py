"""Raw connections of a fuzzed session: sends while it reads, and parses all replies."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import Counter
from collections.abc import Sequence

from caravan.wire import codec, extension
from caravan.wire.commands import Ext
from caravan.wire.extension import FRAME, SessionReply, SessionRequest

_LAST_SEQ = 0xFFFFFFFF


class Broken(Exception):
    """A worker's reply that is none: a finding."""


class Pipe:
    """A connection that speaks the extension.

    Attributes:
        statuses: of all replies so far.
        open: nobody has closed it yet.
        reached, pings, ways: answers so far to fences, to PING and to PEER_OPEN.
    """

    def __init__(self, endpoint: str, device: int = 0, key: str = "") -> None:
        host, _, port = endpoint.rpartition(":")
        self.sock = socket.create_connection((host, int(port)), 30)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.statuses: Counter[int] = Counter()
        self.open = True
        self._out = bytearray()
        self._in = bytearray()
        self._skip = 0
        self._fence = 0
        self.reached = 0
        self.pings = 0
        self.ways = 0
        self.session = self._introduce(device, key)
        self.sock.setblocking(False)

    def _introduce(self, device: int, key: str) -> SessionReply:
        request = extension.encode_json(SessionRequest(key, device, "fuzz", "fuzz"))
        frame = codec.ext_frame(Ext.SESSION, 0, len(request))
        self.sock.sendall(codec.hello_request(extension.caps()) + frame + request)
        self._exactly(8 + 28)
        number, status, _, _, length = FRAME.unpack(self._exactly(FRAME.size))
        body = self._exactly(length)
        if number != Ext.SESSION or status:
            raise ConnectionError(extension.error_text(body))
        return extension.decode_session_reply(body)

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self.sock.recv(size - len(data))
            if not part:
                raise ConnectionError("closed")
            data += part
        return bytes(data)

    def close(self) -> None:
        self.open = False
        self.sock.close()

    def post(self, number: int, payload: bytes, seq: int = 1, length: int | None = None) -> None:
        """Queue a frame; `length` if it shall lie."""
        self._out += codec.ext_frame(number, seq, len(payload) if length is None else length)
        self._out += payload

    def fence(self) -> None:
        """Ask for a sign that all before it has been done; `reached` counts those that came."""
        self._fence += 1
        self.post(Ext.FENCE, b"", _LAST_SEQ - self._fence)

    @property
    def behind(self) -> bool:
        return self.open and self.reached < self._fence

    @property
    def writing(self) -> bool:
        return self.open and bool(self._out)

    def write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                count = self.sock.send(memoryview(self._out)[: 1 << 18])
            except OSError as exc:
                if isinstance(exc, BlockingIOError):
                    raise
                self.close()
                return
            del self._out[:count]

    def read(self) -> None:
        try:
            data = self.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._in += data
        self._parse()

    def _parse(self) -> None:
        while True:
            dropped = min(self._skip, len(self._in))
            del self._in[:dropped]
            self._skip -= dropped
            if self._skip or len(self._in) < FRAME.size:
                return
            number, status, flags, seq, length = FRAME.unpack(self._in[: FRAME.size])
            if flags or status > 32 or length > 1 << 32:
                raise Broken(f"a reply {bytes(self._in[:16]).hex()}")
            self._skip = FRAME.size + length
            self.statuses[status] += 1
            if number == Ext.FENCE and seq == _LAST_SEQ - self.reached - 1:
                self.reached += 1
            self.pings += number == Ext.PING
            self.ways += number == Ext.PEER_OPEN


def pump(pipes: Sequence[Pipe], patience: float) -> bool:
    """Move bytes until every fence is reached or its pipe closed; False if nothing comes."""
    last = time.monotonic()
    while waiting := [p for p in pipes if p.behind or p.writing]:
        readers = [p.sock for p in pipes if p.open]
        writers = [p.sock for p in waiting if p.writing]
        by_sock = {p.sock: p for p in pipes}
        readable, writable, _ = select.select(readers, writers, [], 0.05)
        if readable or writable:
            last = time.monotonic()
        elif time.monotonic() - last > patience:
            return False
        for sock in writable:
            by_sock[sock].write()
        for sock in readable:
            if by_sock[sock].open:
                by_sock[sock].read()
    return True
