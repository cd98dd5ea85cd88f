"""What reads bytes of others, one function for each: whatever the bytes, only errors of ours come
out. `guided` feeds them what coverage leads to, `test_harness` the stored sessions and mutations.

A function takes a payload; `HARNESSES` names them by the first byte of a fuzzer's input.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

import numpy as np

from caravan.errors import CaravanError
from caravan.trust.token import Token
from caravan.wire import codec, extension
from caravan.wire.commands import EXT, Base, Ext, base_table
from caravan.wire.extension import FRAME
from caravan.wire.records import RPC_TENSOR
from caravan.wire.versions import V7, V8
from caravan.worker import base_handlers, handlers
from caravan.worker.buffers import Memory
from caravan.worker.handshake import Terms, greet
from caravan.worker.lane import Lane
from caravan.worker.loader import wishes
from caravan.worker.table import Table, from_base, from_extension, from_records
from caravan.worker.validate import check, check_record
from worker.fakes import FakeDevice, lanes

Harness = Callable[[bytes], None]

_HANDLES = 8
_SIZE = 1 << 16
# What a socket takes without a reader.
_MOST_WORDS = 64 << 10


def _u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


# Buffers enough for the stored sessions, all of one device.
MEMORY = Memory(
    1,
    _u64(*range(1, _HANDLES + 1)),
    _u64(*[1 << 24] * _HANDLES),
    _u64(*[n << 32 for n in range(1, _HANDLES + 1)]),
    _u64(*range(0x1000, 0x1000 + _HANDLES)),
)


# Open to everybody, and asking for a token.
TERMS = (Terms(V8), Terms(V7), Terms(V8, token=Token("0" * 32)))


def _greet(data: bytes, terms: Terms) -> None:
    """Greet a client that sends `data` and leaves."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[:_MOST_WORDS])
        theirs.shutdown(socket.SHUT_WR)
        greet(ours, terms)


def greeting(data: bytes) -> None:
    """The first bytes on a new connection."""
    for terms in TERMS:
        _quiet(lambda t=terms: _greet(data, t))
    _greet(data, TERMS[0])


def headers(data: bytes) -> None:
    for major in (7, 8):
        if len(data) >= 9:
            _quiet(lambda m=major: codec.decode_base_request(data[:9], base_table(m)))
    if len(data) >= FRAME.size:
        _quiet(lambda: codec.decode_ext_request(data[: FRAME.size]))
    _quiet(lambda: codec.decode_hello_reply(data))
    extension.agreed(data)
    extension.error_text(data)


def questions(data: bytes) -> None:
    """JSON from a head or a worker, and from a worker that a head asks."""
    for decode in (
        extension.decode_session_request,
        extension.decode_peer_request,
        extension.decode_peer_target,
        extension.decode_session_reply,
    ):
        _quiet(lambda d=decode: d(data))


def ext_graph(data: bytes) -> None:
    head = EXT[Ext.GRAPH_COMPUTE].request
    _, n_nodes, n_tensors = head.unpack_from(data)
    check(from_extension(n_nodes, n_tensors, data[head.size :]), MEMORY)


def ext_record(data: bytes) -> None:
    check_record(handlers._records(data), MEMORY)


def base_graph(data: bytes) -> None:
    head = base_table(8)[Base.GRAPH_COMPUTE].request
    *_, n_nodes = head.unpack_from(data)
    check(from_base(n_nodes, data[head.size :]), MEMORY)


def base_record(data: bytes) -> None:
    count = len(data) // RPC_TENSOR.itemsize
    if count:
        data = data[: count * RPC_TENSOR.itemsize]
        base_handlers.TensorRef.parse(data).part(0, 1)
        table: Table = from_records(np.frombuffer(data, RPC_TENSOR))
        check_record(table, MEMORY)


_HANDLED = [
    number
    for number in handlers.HANDLERS
    # they wait, or take memory of the machine
    if number not in (Ext.TAKE, Ext.PUSH, Ext.INIT_TENSOR, Ext.ALLOC_SIZE)
]


def _lane() -> Lane:
    (lane,), _ = lanes(FakeDevice())
    for _handle in range(_HANDLES):
        lane.buffers.allocate(lane.device, _SIZE)
    return lane


def ext_command(data: bytes) -> None:
    """A payload that fits its command, at its device's turn."""
    if not data:
        return
    number = _HANDLED[data[0] % len(_HANDLED)]
    if EXT[number].fits(len(data) - 1):
        handlers.HANDLERS[number](_lane(), data[1:])


def loads(data: bytes) -> None:
    if EXT[Ext.LOAD].fits(len(data)):
        wishes(_lane(), data)


def base_command(data: bytes) -> None:
    if not data:
        return
    table = base_table(8)
    number = sorted(base_handlers.HANDLERS)[data[0] % len(base_handlers.HANDLERS)]
    if not table[number].fits(len(data) - 1):
        return
    lane = _lane()
    found = base_handlers.LANES[number]([lane], lane.buffers, data[1:])
    if number != Base.GET_ALLOC_SIZE:
        base_handlers.HANDLERS[number](found, data[1:])


HARNESSES: tuple[Harness, ...] = (
    *(greeting, headers, questions, ext_graph, ext_record, base_graph, base_record),
    *(ext_command, base_command, loads),
)


def feed(data: bytes) -> bool:
    """An input of a fuzzer: which harness, and its payload; whether it was accepted.

    Whatever else than an error of ours comes out is a finding.
    """
    if not data:
        return False
    try:
        HARNESSES[data[0] % len(HARNESSES)](data[1:])
    except CaravanError:
        return False
    return True


def _quiet(call: Callable[[], object]) -> None:
    with contextlib.suppress(CaravanError):
        call()


def inputs(protocol: int, number: int, payload: bytes) -> list[bytes]:
    """A recorded message as inputs for `feed`."""

    def of(harness: Harness, data: bytes) -> bytes:
        return bytes([HARNESSES.index(harness)]) + data

    found: list[bytes] = []
    if protocol == 0:
        found.append(of(headers, codec.ext_frame(number, 1, len(payload))))
        if number == Ext.GRAPH_COMPUTE:
            found.append(of(ext_graph, payload))
            found.append(of(ext_record, payload[16 : 16 + 268 * 3]))
        if number == Ext.LOAD:
            found.append(of(loads, payload))
        if number == Ext.PEER_OPEN:
            found.append(of(questions, payload))
        if number in _HANDLED:
            found.append(of(ext_command, bytes([_HANDLED.index(number)]) + payload))
        return found
    found.append(of(headers, codec.base_request(number, len(payload))))
    if number == Base.GRAPH_COMPUTE and protocol == 8:
        found.append(of(base_graph, payload))
    if number == Base.INIT_TENSOR:
        found.append(of(base_record, payload))
    if number in base_handlers.HANDLERS and protocol == 8:
        index = sorted(base_handlers.HANDLERS).index(number)
        found.append(of(base_command, bytes([index]) + payload))
    return found


def first_words() -> list[bytes]:
    """Greetings as they should be."""
    hello = codec.hello_request(extension.caps())
    words = []
    for number, message in (
        (Ext.SESSION, extension.SessionRequest("", 0, "1", "1")),
        (Ext.PEER, extension.PeerRequest(3, "k" * 32, 0)),
    ):
        body = extension.encode_json(message)
        greeted = hello + codec.ext_frame(number, 1, len(body)) + body
        words.append(bytes([HARNESSES.index(greeting)]) + greeted)
        words.append(bytes([HARNESSES.index(questions)]) + body)
    words.append(bytes([HARNESSES.index(greeting)]) + codec.hello_request(bytes(24)) + b"\0")
    return words
