"""Recorded sessions: what heads really send, as messages that a fuzzer can change and send again.

`record` makes them, `tests/data/sessions.xz` keeps some. Weights are shortened; what is
secret or differs from run to run (keys, addresses) is put in anew when a session is replayed.
"""

from __future__ import annotations

import json
import lzma
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from caravan.wire import extension
from caravan.wire.codec import BASE_REQUEST
from caravan.wire.commands import EXT, Base, Ext, base_table
from caravan.wire.extension import FRAME

STORED = Path(__file__).parent.parent / "data" / "sessions.xz"
_SIZE = struct.Struct("<I")
# Of a write: enough to see what it is.
_KEPT = 64
_HELLO = BASE_REQUEST.size + 24


@dataclass(frozen=True)
class Message:
    """A request. `connection` is its number within the session."""

    connection: int
    number: int
    payload: bytes


@dataclass
class Recorded:
    """What one head sent to one worker.

    Attributes:
        protocol: 7 or 8, or 0 for the extension.
        devices: the device of each connection (extension).
    """

    name: str
    protocol: int
    devices: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


def parse(stream: bytes, protocol: int) -> tuple[int, list[tuple[int, bytes]]]:
    """The protocol that a recorded connection speaks and its requests after HELLO.

    Args:
        protocol: 0 for a worker that offers the extension; the base protocol's version otherwise.
    """
    caps = stream[BASE_REQUEST.size : _HELLO]
    rest = memoryview(stream)[_HELLO:]
    extended = not protocol and extension.agreed(caps) > 0
    head = FRAME if extended else BASE_REQUEST
    found: list[tuple[int, bytes]] = []
    while len(rest) >= head.size:
        values = head.unpack(rest[: head.size])
        end = head.size + values[-1]
        found.append((values[0], bytes(rest[head.size : end])))
        rest = rest[end:]
    return (0 if extended else protocol or 8), found


def shortened(protocol: int, number: int, payload: bytes) -> bytes:
    """Without the bulk of a write."""
    if protocol == 0:
        fixed = {Ext.SET: EXT[Ext.SET].request.size, Ext.SET_CAST: EXT[Ext.SET_CAST].request.size}
    else:
        table = base_table(protocol)
        fixed = {Base.SET_TENSOR: table[Base.SET_TENSOR].request.size}
    if number in fixed:
        return payload[: fixed[number] + _KEPT]
    return payload


def save(path: Path, sessions: Iterable[Recorded]) -> None:
    sessions = list(sessions)
    heads = [
        {
            "name": s.name,
            "protocol": s.protocol,
            "devices": s.devices,
            "messages": [(m.connection, m.number, len(m.payload)) for m in s.messages],
        }
        for s in sessions
    ]
    head = json.dumps(heads, separators=(",", ":")).encode()
    blob = b"".join(m.payload for s in sessions for m in s.messages)
    path.write_bytes(lzma.compress(_SIZE.pack(len(head)) + head + blob, preset=9))


def load(path: Path = STORED) -> list[Recorded]:
    data = lzma.decompress(path.read_bytes())
    (size,) = _SIZE.unpack_from(data)
    at = _SIZE.size + size
    sessions = []
    for head in json.loads(data[_SIZE.size : at]):
        messages = []
        for connection, number, length in head["messages"]:
            messages.append(Message(connection, number, data[at : at + length]))
            at += length
        sessions.append(Recorded(head["name"], head["protocol"], head["devices"], messages))
    return sessions
