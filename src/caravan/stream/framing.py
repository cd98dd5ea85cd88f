"""The two framings of a stream: headers out, replies in.

`BaseFraming` is ggml-rpc (replies matched by order alone), `ExtFraming` Caravan's extension
(number, status and sequence number on each reply). The stream does not know which it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from caravan.errors import CaravanError, RemoteError, RemoteProtocolError
from caravan.stream.due import Due
from caravan.stream.ticket import Ticket
from caravan.transport.reader import Reader
from caravan.wire import codec
from caravan.wire.commands import EXT, Ext
from caravan.wire.extension import FRAME, MAX_ERROR_TEXT, error_text

_HALF = 1 << 31


@dataclass(slots=True)
class Reply:
    """One reply's header.

    Attributes:
        name: the command that it answers.
        ticket: what waits for it; whoever gets the reply must settle it.
        length: of the payload that follows.
        error: the peer's own words (a RemoteError), or why the reply cannot be used.
        pong: it is a sign of life and nothing else.
    """

    name: str
    ticket: Ticket | None
    length: int
    error: CaravanError | None = None
    pong: bool = False


class Framing(Protocol):
    """What the stream needs of a framing."""

    can_ping: bool

    def header(self, number: int, seq: int, size: int) -> bytes:
        """The bytes before a payload of `size` bytes."""

    def read_reply(self, reader: Reader, due: Due) -> Reply:
        """Wait for the next reply's header, and match it; takes its ticket off `due`.

        A ticket that was taken off is always returned, so that none is forgotten: what is wrong
        with its reply goes into `Reply.error`. A loss may empty `due` at any time.
        """


class BaseFraming:
    """ggml-rpc: no status, no number; the oldest request is the one that is answered."""

    can_ping = False

    def header(self, number: int, seq: int, size: int) -> bytes:
        return codec.base_request(number, size)

    def read_reply(self, reader: Reader, due: Due) -> Reply:
        (length,) = codec.BASE_REPLY.unpack(reader.read(codec.BASE_REPLY.size))
        ticket = due.take_oldest()
        if ticket is None:
            raise RemoteProtocolError("a reply that nothing asked for")
        return _sized(ticket.name, ticket, length)


class ExtFraming:
    """The extension: in request order, except those aside; errors also for silent commands."""

    can_ping = True

    def header(self, number: int, seq: int, size: int) -> bytes:
        return codec.ext_frame(number, seq, size)

    def read_reply(self, reader: Reader, due: Due) -> Reply:
        number, status, _flags, seq, length = FRAME.unpack(reader.read(FRAME.size))
        row = EXT.get(number)
        if row is None:
            raise RemoteProtocolError(f"reply to an unknown command {number}")
        if number == Ext.PING and seq == 0:
            if length or status:
                raise RemoteProtocolError("a PING reply with a payload")
            return Reply(row.name, None, 0, pong=True)
        ticket = due.take_aside(seq) if row.aside else self._match(row.name, seq, due)
        if status:
            return Reply(row.name, ticket, 0, self._error(status, length, reader))
        if ticket is None:
            raise RemoteProtocolError(f"a reply to {row.name} that nothing asked for")
        if ticket.name != row.name:
            error = RemoteProtocolError(f"a reply to {row.name} where {ticket.name}'s is due")
            return Reply(row.name, ticket, 0, error)
        return _sized(row.name, ticket, length)

    @staticmethod
    def _match(name: str, seq: int, due: Due) -> Ticket | None:
        oldest = due.oldest()
        if oldest is None:
            return None
        if oldest.seq == seq:
            return due.take_oldest()
        # an error of a silent command stands before the next reply that is due
        if (seq - oldest.seq) & 0xFFFFFFFF < _HALF:
            raise RemoteProtocolError(f"reply to {name} #{seq} before #{oldest.seq}")
        return None

    @staticmethod
    def _error(status: int, length: int, reader: Reader) -> CaravanError:
        if length > MAX_ERROR_TEXT:
            return RemoteProtocolError(f"error text of {length} bytes")
        try:
            return RemoteError(status, error_text(reader.read(length)))
        except CaravanError as exc:
            return exc


def _sized(name: str, ticket: Ticket, length: int) -> Reply:
    if length == ticket.size or (ticket.at_most and length < ticket.size):
        return Reply(name, ticket, length)
    error = RemoteProtocolError(f"reply to {name} has {length} bytes, expected {ticket.size}")
    return Reply(name, ticket, 0, error)
