"""The talk between supervisor and session process: JSON messages over a SOCK_SEQPACKET pair.

Down: `Secrets` once, then `Adopt`, with the connection's file descriptor. Up: `Ready` once, then
`Entered` for every connection that has come in by TLS, `Closed` for every one that ended, `Notice`
for what every session would say again, and `Leaving` at last. A closed pair means that the other
side is gone.
"""

from __future__ import annotations

import array
import json
import socket
from dataclasses import asdict, dataclass, field
from typing import Any

from caravan.wire.extension import DeviceInfo

_MAX_MESSAGE = 256 << 10


@dataclass(frozen=True, slots=True)
class Adopt:
    """A connection that has said HELLO.

    Attributes:
        connection: the supervisor's number for it.
        peer: the other end, for messages.
        major: version of the base protocol to speak; 0 for the extension.
        key: the session's key (extension).
        seq, device: of the SESSION or PEER request that is still to be answered (extension).
        peer_key, addresses: what the head may tell other workers of this session (extension).
        route: of a connection from another worker, the head's number; 0 for one from a head.
        seconds: within which the client has to come in by TLS; 0: it has introduced itself. With
            TLS the request is still to come, so `seq`, `device` and `route` are not known.
        new: of a connection by TLS: it is for a new session.
    """

    connection: int
    peer: str
    major: int
    key: str = ""
    seq: int = 0
    device: int = 0
    peer_key: str = ""
    addresses: list[str] = field(default_factory=list)
    route: int = 0
    seconds: float = 0.0
    new: bool = False


@dataclass(frozen=True, slots=True)
class Secrets:
    """What a session process needs and no command line may show.

    Attributes:
        token: its text, for the ways to other workers; empty for none.
    """

    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Ready:
    """A session process has loaded the engine; `error` when it could not."""

    error: str = ""
    engine: str = ""
    protocol: int = 0
    devices: list[DeviceInfo] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Entered:
    """A connection by TLS has shown what it must, and is let in."""

    connection: int


@dataclass(frozen=True, slots=True)
class Closed:
    """A connection ended.

    Attributes:
        as_new: it was the only one and has left nothing behind: the process may serve another head.
        why: of one that did not get in.
    """

    connection: int
    as_new: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """A line for the person who runs the worker, which the supervisor says once and no more."""

    text: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """The process is about to end, and why, in words for its head."""

    text: str


Message = Adopt | Secrets | Ready | Entered | Closed | Notice | Leaving
_KINDS: dict[str, type[Message]] = {
    "Adopt": Adopt,
    "Secrets": Secrets,
    "Ready": Ready,
    "Entered": Entered,
    "Closed": Closed,
    "Notice": Notice,
    "Leaving": Leaving,
}


def send(control: socket.socket, message: Message, fd: int | None = None) -> None:
    """Raises OSError when the other side is gone."""
    data = json.dumps({"kind": type(message).__name__, **asdict(message)}).encode()
    if fd is None:
        control.send(data)
    else:
        socket.send_fds(control, [data], [fd])


def receive(control: socket.socket) -> tuple[Message | None, int | None]:
    """A message and the descriptor that came along; (None, None) at the end of the talk."""
    try:
        data, ancillary = _read(control)
    except ConnectionResetError:
        # it left something unread, which is told before what it has said last
        try:
            data, ancillary = _read(control)
        except ConnectionError:
            return None, None
    except ConnectionError:
        return None, None
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if not data:
        return None, None
    return _decode(json.loads(data)), (fds[0] if fds else None)


def _read(control: socket.socket) -> tuple[bytes, list[tuple[int, int, bytes]]]:
    data, ancillary, _flags, _address = control.recvmsg(
        _MAX_MESSAGE, socket.CMSG_SPACE(array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
    )
    return data, ancillary


def _decode(obj: dict[str, Any]) -> Message:
    kind = _KINDS[obj.pop("kind")]
    if kind is Ready:
        obj["devices"] = [DeviceInfo(**device) for device in obj["devices"]]
    return kind(**obj)
