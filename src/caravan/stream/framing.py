"""The two framings of a stream: headers out, replies in.

`BaseFraming` is ggml-rpc (replies matched by order alone), `ExtFraming` Caravan's extension
(number, status and sequence number on each reply). The stream does not know which it has.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from caravan.errors import RemoteError, RemoteProtocolError
from caravan.stream.ticket import Ticket
from caravan.transport.reader import Reader
from caravan.wire import codec
from caravan.wire.commands import EXT, Ext
from caravan.wire.extension import FRAME, MAX_ERROR_TEXT, error_text

_HALF = 1 << 31


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply's header: the ticket that it answers, its length, and the error if it is one."""

    ticket: Ticket | None
    length: int
    error: RemoteError | None = None
    pong: bool = False


class Framing(Protocol):
    """What the stream needs of a framing."""

    can_ping: bool

    def header(self, number: int, seq: int, size: int) -> bytes:
        """The bytes before a payload of `size` bytes."""

    def read_reply(self, reader: Reader, pending: deque[Ticket]) -> Reply:
        """Wait for the next reply's header, and match it; takes its ticket off `pending`."""


class BaseFraming:
    """ggml-rpc: no status, no number; the oldest request is the one that is answered."""

    can_ping = False

    def header(self, number: int, seq: int, size: int) -> bytes:
        return codec.base_request(number, size)

    def read_reply(self, reader: Reader, pending: deque[Ticket]) -> Reply:
        (length,) = codec.BASE_REPLY.unpack(reader.read(codec.BASE_REPLY.size))
        if not pending:
            raise RemoteProtocolError("a reply that nothing asked for")
        ticket = pending.popleft()
        if length != ticket.size:
            raise RemoteProtocolError(
                f"reply to {ticket.name} has {length} bytes, expected {ticket.size}"
            )
        return Reply(ticket, length)


class ExtFraming:
    """The extension: in request order, except PING's; errors also for silent commands."""

    can_ping = True

    def header(self, number: int, seq: int, size: int) -> bytes:
        return codec.ext_frame(number, seq, size)

    def read_reply(self, reader: Reader, pending: deque[Ticket]) -> Reply:
        number, status, _flags, seq, length = FRAME.unpack(reader.read(FRAME.size))
        row = EXT.get(number)
        if row is None:
            raise RemoteProtocolError(f"reply to an unknown command {number}")
        if number == Ext.PING:
            if length or status:
                raise RemoteProtocolError("a PING reply with a payload")
            return Reply(None, 0, pong=True)
        ticket = self._match(row.name, seq, pending)
        if status:
            if length > MAX_ERROR_TEXT:
                raise RemoteProtocolError(f"error text of {length} bytes")
            return Reply(ticket, 0, RemoteError(status, error_text(reader.read(length))))
        if ticket is None:
            raise RemoteProtocolError(f"a reply to {row.name} that nothing asked for")
        if ticket.size >= 0 and length != ticket.size:
            raise RemoteProtocolError(
                f"reply to {row.name} has {length} bytes, expected {ticket.size}"
            )
        return Reply(ticket, length)

    @staticmethod
    def _match(name: str, seq: int, pending: deque[Ticket]) -> Ticket | None:
        if pending and pending[0].seq == seq:
            return pending.popleft()
        # an error of a silent command stands before the next reply that is due
        if pending and (seq - pending[0].seq) & 0xFFFFFFFF < _HALF:
            raise RemoteProtocolError(f"reply to {name} #{seq} before #{pending[0].seq}")
        return None
