"""Caravan's extension of the wire: agreement in HELLO, frames, statuses, the SESSION exchange.

A frame header opens every request and reply once both ends have shown the mark below in HELLO's
spare capability bytes: number, status, sequence number, length. The first four capability bytes
stay zero: an RDMA peer reads its queue-pair number there and so finds none.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from enum import IntEnum, IntFlag
from typing import Any, TypeVar

from caravan.errors import RemoteProtocolError, VersionMismatch
from caravan.trace.spans import LIMIT
from caravan.wire.layout import Layout

EXTENSION_VERSION = 1
CAPS_SIZE = 24
_MARK = b"\0\0\0\0caravan\0"

FRAME = Layout(
    (("number", "B"), ("status", "B"), ("flags", "H"), ("seq", "I"), ("length", "Q")), 16
)

MAX_JSON = 1 << 20
# What a head or a worker asks in JSON is short: a stranger may send it.
MAX_QUESTION = 16 << 10
MAX_ADDRESSES = 8
MAX_ERROR_TEXT = 4096
_MAX_TEXT = 256

# Graphs that both ends keep for each device, least recently used first out, counted alike.
GRAPH_LRU = 64

# A ticket is the number of a way from one device to another, and in so many low bits a count.
TICKET_BITS = 32

# Payload of one SET_MANY at most; what is bigger goes in a SET of its own.
MAX_SET_MANY = 1 << 20

# Tensors that one LOAD may ask for.
MAX_LOAD = 256

# Spans that a worker keeps for each device, the newest ones, and so those of one TIMELINE reply.
MAX_SPANS = LIMIT

# A buffer with handle h answers with base h << ADDRESS_SHIFT: addresses on the wire never are the
# worker's own, and handle and offset can be read off any of them.
ADDRESS_SHIFT = 40
MAX_BUFFER_SIZE = (1 << ADDRESS_SHIFT) - 1

# Of tensors in a buffer: more than any device wants, and little enough that sizes can be added up.
MAX_ALIGNMENT = 1 << 20

# The device of a SESSION that only asks what has become of a session.
NO_DEVICE = (1 << 32) - 1

# The ticket of a DATA without data: a sign of life on a way that nothing travels on.
BEAT_TICKET = (1 << 64) - 1

# The name of devices that take time and compute nothing: their results mean nothing.
SIMULATED = "sim"


# A key is 32 hexadecimal digits, and so is its public name.
_ID_DIGITS = 32


_T = TypeVar("_T")
_P = TypeVar("_P", "PeerTarget", "PeerRequest")


class Status(IntEnum):
    """Status of a reply; any but OK carries a UTF-8 text as payload."""

    OK = 0
    BAD_REQUEST = 1
    UNKNOWN_COMMAND = 2
    OUT_OF_MEMORY = 3
    COMPUTE_FAILED = 4
    UNKNOWN_GRAPH = 5
    REFUSED = 6
    INTERNAL = 7
    BUSY = 8
    PEER_LOST = 9
    ENDED = 10


class Source(IntEnum):
    """Where a worker has found the content of a tensor: LOAD's answer for each, in one byte."""

    NONE = 0
    DISK = 1
    CACHE = 2


# The words for them in SESSION's `sources`.
SOURCES = {"disk": Source.DISK, "cache": Source.CACHE}


class Asks(IntFlag):
    """What a worker asks for in its HELLO, before SESSION or PEER."""

    NOTHING = 0
    TOKEN = 1
    TLS = 2


def caps(supported: bool = True, asks: Asks = Asks.NOTHING) -> bytes:
    """HELLO's capability bytes of an end that speaks the extension (all zero: it does not)."""
    if not supported:
        return bytes(CAPS_SIZE)
    mark = _MARK + EXTENSION_VERSION.to_bytes(2, "little") + bytes((asks,))
    return mark.ljust(CAPS_SIZE, b"\0")


def agreed(peer_caps: bytes) -> int:
    """The extension version to use with a peer that sent `peer_caps`; 0 when it has none."""
    if peer_caps[: len(_MARK)] != _MARK:
        return 0
    version = int.from_bytes(peer_caps[len(_MARK) : len(_MARK) + 2], "little")
    return min(version, EXTENSION_VERSION)


def asked(peer_caps: bytes) -> Asks:
    """What the worker that sent `peer_caps` asks for; nothing without the mark.

    Raises VersionMismatch when it is more than this version knows.
    """
    if not agreed(peer_caps):
        return Asks.NOTHING
    (bits,) = peer_caps[len(_MARK) + 2 :][:1] or b"\0"
    if bits & ~(Asks.TOKEN.value | Asks.TLS.value):
        raise VersionMismatch("the worker asks for more than this version of Caravan knows")
    return Asks(bits)


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a worker says of one of its devices when a session opens.

    Attributes:
        name: the engine's name of it, such as `CPU` or `CUDA0`; `sim` for a simulated one.
        description: text for people.
        type: ggml's device type (0 CPU, 1 GPU, 2 IGPU, 3 ACCEL).
        threads: compute threads of a CPU device; 0 where that means nothing.
        memory_free, memory_total: bytes.
        alignment: of tensors in a buffer, bytes; a power of two.
        max_size: of one buffer, bytes.
        pads: whether a tensor may need more bytes than its own (then ask ALLOC_SIZE).
    """

    name: str
    description: str
    type: int
    threads: int
    memory_free: int
    memory_total: int
    alignment: int
    max_size: int
    pads: bool


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """The head's SESSION: opens a session (`session` empty) or joins one with a further device."""

    session: str
    device: int
    caravan: str
    engine: str


@dataclass(frozen=True, slots=True)
class SessionReply:
    """The worker's answer.

    Attributes:
        session: the secret key under which the head's further connections join.
        ops: the engine's op names by number.
        peer_key: the secret under which other workers' connections join, to push copies.
        peer_addresses: where they reach the worker, as endpoints, the best first.
        sources: words of SOURCES: where it looks for weights that LOAD asks for; with none of them
            there is nothing to be asked, and with no `cache` nothing to KEEP.
        idle_ms: milliseconds after which a connection on which the head said nothing counts as
            broken; 0 where that never happens.
    """

    session: str
    caravan: str
    engine: str
    ops: list[str]
    devices: list[DeviceInfo]
    peer_key: str
    peer_addresses: list[str]
    sources: list[str]
    idle_ms: int = 0


@dataclass(frozen=True, slots=True)
class PeerTarget:
    """PEER_OPEN: asks a worker to connect a device of its own to a device of another worker.

    Attributes:
        route: the head's number for this way from one device to the other, above 0.
        addresses: endpoints of the other worker, to be tried in this order.
        key: the other worker's `peer_key`.
        device: the other device's index there.
    """

    route: int
    addresses: list[str]
    key: str
    device: int


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """PEER: a worker introduces itself to another one; fields as in PeerTarget."""

    route: int
    key: str
    device: int


@dataclass(frozen=True, slots=True)
class TlsRequest:
    """TLS: which process a connection is for, while it is still in the clear.

    Attributes:
        session: `public_id` of the session that is joined; empty for a new one.
        peer: `public_id` of the peer key by which a worker comes; empty for a head.
    """

    session: str = ""
    peer: str = ""


Json = SessionRequest | SessionReply | PeerTarget | PeerRequest | TlsRequest


def public_id(key: str) -> str:
    """The name of a session's key, or peer key, that may be seen: nobody gets from it to the key.

    The first 32 hexadecimal digits of a SHA-256.
    """
    return hashlib.sha256(b"caravan id\0" + key.encode()).hexdigest()[:_ID_DIGITS]


def encode_json(message: Json) -> bytes:
    """The payload of a command that carries JSON."""
    return json.dumps(asdict(message), separators=(",", ":")).encode()


def decode_session_request(data: bytes) -> SessionRequest:
    """Raises RemoteProtocolError on anything but a whole, well-typed request."""
    return _build(SessionRequest, _object(data, MAX_QUESTION))


def decode_peer_request(data: bytes) -> PeerRequest:
    """Raises RemoteProtocolError on anything but a whole, well-typed request."""
    return _checked_route(_build(PeerRequest, _object(data, MAX_QUESTION)))


def decode_peer_target(data: bytes) -> PeerTarget:
    """Raises RemoteProtocolError on anything but a whole, well-typed request."""
    target = _checked_route(_build(PeerTarget, _object(data, MAX_QUESTION)))
    _check_addresses(target.addresses)
    return target


def decode_tls_request(data: bytes) -> TlsRequest:
    """Raises RemoteProtocolError on anything but a whole, well-typed request."""
    request = _build(TlsRequest, _object(data, MAX_QUESTION))
    for name in (request.session, request.peer):
        if name and (len(name) != _ID_DIGITS or set(name) - set("0123456789abcdef")):
            raise RemoteProtocolError("TLS for a process whose name is none")
    if request.session and request.peer:
        raise RemoteProtocolError("TLS for a head and a worker at once")
    return request


def _checked_route(message: _P) -> _P:
    if not 0 < message.route < 1 << 32:
        raise RemoteProtocolError(f"route {message.route} is out of range")
    return message


def _check_addresses(addresses: list[Any]) -> None:
    if len(addresses) > MAX_ADDRESSES or not all(
        isinstance(address, str) and address.isprintable() and len(address) <= _MAX_TEXT
        for address in addresses
    ):
        raise RemoteProtocolError("peer addresses that are none")


def decode_session_reply(data: bytes) -> SessionReply:
    """Raises RemoteProtocolError on anything but a whole, well-typed reply."""
    obj = _object(data)
    devices = obj.get("devices")
    ops = obj.get("ops")
    if not isinstance(devices, list) or not isinstance(ops, list):
        raise RemoteProtocolError("SESSION reply without devices or ops")
    if not all(isinstance(op, str) for op in ops):
        raise RemoteProtocolError("SESSION reply with op names that are no text")
    obj.setdefault("idle_ms", 0)
    obj["ops"] = [_printable(op[:_MAX_TEXT]) for op in ops]
    obj["devices"] = [_build(DeviceInfo, device) for device in devices]
    reply = _build(SessionReply, obj)
    _check_addresses(reply.peer_addresses)
    if not all(isinstance(word, str) for word in reply.sources):
        raise RemoteProtocolError("sources of weights that are no words")
    # those that this version does not know are of no use, and no fault
    reply.sources[:] = [word for word in reply.sources if word in SOURCES]
    for device in reply.devices:
        if not is_alignment(device.alignment):
            raise RemoteProtocolError(f"device {device.name}: alignment {device.alignment}")
        if not 0 < device.max_size <= MAX_BUFFER_SIZE:
            raise RemoteProtocolError(f"device {device.name}: max_size {device.max_size}")
    return reply


def is_alignment(value: int) -> bool:
    """Whether a device may want its tensors at multiples of `value` bytes."""
    return 0 < value <= MAX_ALIGNMENT and value & (value - 1) == 0


def error_text(data: bytes) -> str:
    """The text of an error reply, made safe to print on one line."""
    text = bytes(data[:MAX_ERROR_TEXT]).decode("utf-8", "replace")
    return _printable(text).strip() or "no reason given"


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def _object(data: bytes, most: int = MAX_JSON) -> dict[str, Any]:
    if len(data) > most:
        raise RemoteProtocolError(f"{len(data)} bytes of JSON: there may be {most}")
    try:
        obj = json.loads(bytes(data))
    except (ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"SESSION payload is not JSON: {exc}") from exc
    if not isinstance(obj, dict):
        raise RemoteProtocolError("SESSION payload is not an object")
    return obj


def _build(cls: type[_T], obj: Any) -> _T:
    """A dataclass from untrusted JSON: every field present and of its plain type, texts short."""
    if not isinstance(obj, dict):
        raise RemoteProtocolError(f"{cls.__name__} is not an object")
    values: dict[str, Any] = {}
    for field in fields(cls):  # type: ignore[arg-type]
        value: Any = obj.get(field.name)
        wanted: Any = {"str": str, "int": int, "bool": bool}.get(str(field.type), list)
        if type(value) is not wanted:
            raise RemoteProtocolError(f"{cls.__name__}.{field.name} is missing or of a wrong type")
        if wanted is int and not 0 <= value < 1 << 64:
            raise RemoteProtocolError(f"{cls.__name__}.{field.name} is out of range: {value}")
        # it is shown to people: no control characters, no endless lines
        values[field.name] = _printable(value[:_MAX_TEXT]) if wanted is str else value
    return cls(**values)
