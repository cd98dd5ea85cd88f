"""The two command tables: llama.cpp's RPC (protocol 7 and 8) and Caravan's extension.

One row a command: number, fixed request part, whether bytes follow, the reply. Both ends, the docs
and the tests iterate over these rows; no other place knows a number or a size.
Format of the base protocol: ggml-rpc 7.0.0 and 8.0.0; the extension: docs/protocol.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from caravan.wire.layout import EMPTY, Layout

TENSOR_SIZE = 296  # one rpc_tensor, see records.RPC_TENSOR
_TENSOR = f"{TENSOR_SIZE}s"


@dataclass(frozen=True, slots=True)
class Command:
    """One row of a table.

    Attributes:
        number: the byte on the wire.
        name: upper-case name, as in the format's source.
        request: the fixed part of the request.
        tail: whether a variable number of bytes follows the fixed part.
        reply: the fixed part of the reply; None for a silent command.
        reply_tail: whether a variable number of bytes follows in the reply.
        aside: whether it is answered when it arrives, ahead of replies that are still due.
    """

    number: int
    name: str
    request: Layout
    tail: bool = False
    reply: Layout | None = None
    reply_tail: bool = False
    aside: bool = False

    @property
    def silent(self) -> bool:
        """True when success is not answered."""
        return self.reply is None

    def fits(self, length: int) -> bool:
        """Whether a request of `length` payload bytes can be this command."""
        return length >= self.request.size if self.tail else length == self.request.size


class Base(IntEnum):
    """Numbers of the base protocol (ggml-rpc)."""

    ALLOC_BUFFER = 0
    GET_ALIGNMENT = 1
    GET_MAX_SIZE = 2
    BUFFER_GET_BASE = 3
    FREE_BUFFER = 4
    BUFFER_CLEAR = 5
    SET_TENSOR = 6
    SET_TENSOR_HASH = 7
    GET_TENSOR = 8
    COPY_TENSOR = 9
    GRAPH_COMPUTE = 10
    GET_DEVICE_MEMORY = 11
    INIT_TENSOR = 12
    GET_ALLOC_SIZE = 13
    HELLO = 14
    DEVICE_COUNT = 15
    GRAPH_RECOMPUTE = 16
    MEMSET_TENSOR = 17
    # since protocol 8
    SET_TENSOR_2D = 18
    GET_TENSOR_2D = 19
    COMM_INIT = 20
    COMM_ALLREDUCE = 21
    COMM_FREE = 22


class Ext(IntEnum):
    """Numbers of Caravan's extension; apart from the base ones so that a mix-up is noticed."""

    SESSION = 64
    ALLOC = 65
    FREE = 66
    CLEAR = 67
    SET = 68
    GET = 69
    MEMSET = 70
    COPY = 71
    GRAPH_COMPUTE = 72
    GRAPH_RECOMPUTE = 73
    MEMORY = 74
    PING = 75
    BYE = 76
    INIT_TENSOR = 77
    ALLOC_SIZE = 78
    FENCE = 79
    SET_MANY = 80
    PEER_OPEN = 81
    PUSH = 82
    TAKE = 83
    CLOCK = 84
    TIMELINE = 85
    STATS = 86
    # between two workers
    PEER = 87
    DATA = 88
    # of activations that travel in another type than they have
    GET_CAST = 89
    SET_CAST = 90
    # weights that need not cross the network, and those that need not a second time
    LOAD = 91
    KEEP = 92
    # who may come in, before SESSION or PEER; docs/protocol.md has their order
    AUTH = 93
    PROVE = 94
    TLS = 95


HELLO_REPLY = Layout(
    (("major", "B"), ("minor", "B"), ("patch", "B"), ("pad", "B"), ("caps", "24s")), 28
)
DEVICE = Layout((("device", "I"),), 4)
POINTER = Layout((("remote_ptr", "Q"),), 8)
U8 = Layout((("value", "B"),), 1)
U32 = Layout((("value", "I"),), 4)
U64 = Layout((("value", "Q"),), 8)
MEMORY_REPLY = Layout((("free", "Q"), ("total", "Q")), 16)
RECOMPUTE_8 = Layout((("device", "I"), ("uid", "Q")), 12)
STATS_REPLY = Layout(
    (
        ("now", "Q"),
        ("computing", "Q"),
        ("waiting", "Q"),
        ("sending", "Q"),
        ("bytes_in", "Q"),
        ("bytes_out", "Q"),
        ("graphs", "Q"),
    ),
    56,
)
LOAD_ENTRY = Layout((("address", "Q"), ("size", "Q"), ("digest", "32s"), ("name", "64s")), 112)
SET_ENTRY = Layout((("address", "Q"), ("size", "Q")), 16)
PARCEL = Layout(
    (("route", "I"), ("dtype", "I"), ("ticket", "Q"), ("address", "Q"), ("size", "Q")), 32
)
NONCE = Layout((("nonce", "32s"),), 32)
MAC = Layout((("mac", "32s"),), 32)
GRAPH_HEAD_7 = Layout((("device", "I"), ("n_nodes", "I")), 8)
GRAPH_HEAD_8 = Layout((("device", "I"), ("uid", "Q"), ("n_nodes", "I")), 16)

_COMMON = (
    Command(
        Base.ALLOC_BUFFER,
        "ALLOC_BUFFER",
        Layout((("device", "I"), ("size", "Q")), 12),
        reply=Layout((("remote_ptr", "Q"), ("remote_size", "Q")), 16),
    ),
    Command(Base.GET_ALIGNMENT, "GET_ALIGNMENT", DEVICE, reply=U64),
    Command(Base.GET_MAX_SIZE, "GET_MAX_SIZE", DEVICE, reply=U64),
    Command(Base.BUFFER_GET_BASE, "BUFFER_GET_BASE", POINTER, reply=U64),
    Command(Base.FREE_BUFFER, "FREE_BUFFER", POINTER),
    Command(Base.BUFFER_CLEAR, "BUFFER_CLEAR", Layout((("remote_ptr", "Q"), ("value", "B")), 9)),
    Command(
        Base.SET_TENSOR,
        "SET_TENSOR",
        Layout((("tensor", _TENSOR), ("cache", "B"), ("offset", "Q")), 305),
        tail=True,
    ),
    Command(
        Base.SET_TENSOR_HASH,
        "SET_TENSOR_HASH",
        Layout((("tensor", _TENSOR), ("offset", "Q"), ("hash", "Q")), 312),
        reply=U8,
    ),
    Command(
        Base.GET_TENSOR,
        "GET_TENSOR",
        Layout((("tensor", _TENSOR), ("offset", "Q"), ("size", "Q")), 312),
        reply=EMPTY,
        reply_tail=True,
    ),
    Command(
        Base.COPY_TENSOR,
        "COPY_TENSOR",
        Layout((("src", _TENSOR), ("dst", _TENSOR)), 592),
        reply=U8,
    ),
    Command(Base.GET_DEVICE_MEMORY, "GET_DEVICE_MEMORY", DEVICE, reply=MEMORY_REPLY),
    Command(Base.INIT_TENSOR, "INIT_TENSOR", Layout((("tensor", _TENSOR),), 296)),
    Command(
        Base.GET_ALLOC_SIZE,
        "GET_ALLOC_SIZE",
        Layout((("device", "I"), ("tensor", _TENSOR), ("srcs", f"{10 * TENSOR_SIZE}s")), 3260),
        reply=U64,
    ),
    Command(Base.HELLO, "HELLO", Layout((("caps", "24s"),), 24), reply=HELLO_REPLY),
    Command(Base.DEVICE_COUNT, "DEVICE_COUNT", EMPTY, reply=U32),
    Command(
        Base.MEMSET_TENSOR,
        "MEMSET_TENSOR",
        Layout((("tensor", _TENSOR), ("offset", "Q"), ("size", "Q"), ("value", "B")), 313),
    ),
)

_ONLY_7 = (
    Command(Base.GRAPH_COMPUTE, "GRAPH_COMPUTE", GRAPH_HEAD_7, tail=True),
    Command(Base.GRAPH_RECOMPUTE, "GRAPH_RECOMPUTE", DEVICE),
)

_2D = (("offset", "Q"), ("size", "Q"), ("n_copies", "Q"), ("stride", "Q"))
_ONLY_8 = (
    Command(Base.GRAPH_COMPUTE, "GRAPH_COMPUTE", GRAPH_HEAD_8, tail=True),
    Command(Base.GRAPH_RECOMPUTE, "GRAPH_RECOMPUTE", RECOMPUTE_8),
    Command(
        Base.SET_TENSOR_2D, "SET_TENSOR_2D", Layout((("tensor", _TENSOR), *_2D), 328), tail=True
    ),
    Command(
        Base.GET_TENSOR_2D,
        "GET_TENSOR_2D",
        Layout((("tensor", _TENSOR), *_2D), 328),
        reply=EMPTY,
        reply_tail=True,
    ),
    Command(
        Base.COMM_INIT,
        "COMM_INIT",
        Layout(
            (("device", "I"), ("rank", "I"), ("world", "I"), ("port", "I"), ("host", "64s")), 80
        ),
        reply=U8,
    ),
    Command(
        Base.COMM_ALLREDUCE,
        "COMM_ALLREDUCE",
        Layout((("device", "I"), ("tensor", _TENSOR)), 300),
    ),
    Command(Base.COMM_FREE, "COMM_FREE", DEVICE),
)

BASE_7: dict[int, Command] = {row.number: row for row in (*_COMMON, *_ONLY_7)}
BASE_8: dict[int, Command] = {row.number: row for row in (*_COMMON, *_ONLY_8)}

EXT: dict[int, Command] = {
    row.number: row
    for row in (
        # both ways JSON, see extension.py
        Command(Ext.SESSION, "SESSION", EMPTY, tail=True, reply=EMPTY, reply_tail=True),
        Command(
            Ext.ALLOC,
            "ALLOC",
            U64,
            reply=Layout((("handle", "Q"), ("base", "Q"), ("size", "Q")), 24),
        ),
        Command(Ext.FREE, "FREE", Layout((("handle", "Q"),), 8)),
        Command(Ext.CLEAR, "CLEAR", Layout((("handle", "Q"), ("value", "B")), 9)),
        Command(Ext.SET, "SET", Layout((("address", "Q"),), 8), tail=True),
        Command(
            Ext.GET,
            "GET",
            Layout((("address", "Q"), ("size", "Q")), 16),
            reply=EMPTY,
            reply_tail=True,
        ),
        Command(
            Ext.MEMSET, "MEMSET", Layout((("address", "Q"), ("size", "Q"), ("value", "B")), 17)
        ),
        Command(Ext.COPY, "COPY", Layout((("src", "Q"), ("dst", "Q"), ("size", "Q")), 24)),
        Command(
            Ext.GRAPH_COMPUTE,
            "GRAPH_COMPUTE",
            Layout((("uid", "Q"), ("n_nodes", "I"), ("n_tensors", "I")), 16),
            tail=True,
        ),
        Command(Ext.GRAPH_RECOMPUTE, "GRAPH_RECOMPUTE", Layout((("uid", "Q"),), 8)),
        Command(Ext.MEMORY, "MEMORY", EMPTY, reply=MEMORY_REPLY),
        Command(Ext.PING, "PING", EMPTY, reply=EMPTY, aside=True),
        # the tail: why, in UTF-8, if it is not the usual end
        Command(Ext.BYE, "BYE", EMPTY, tail=True),
        Command(Ext.INIT_TENSOR, "INIT_TENSOR", EMPTY, tail=True),
        Command(Ext.ALLOC_SIZE, "ALLOC_SIZE", EMPTY, tail=True, reply=U64),
        Command(Ext.FENCE, "FENCE", EMPTY, reply=EMPTY),
        # after the count: so many SET_ENTRY, then their bytes one after the other
        Command(Ext.SET_MANY, "SET_MANY", Layout((("count", "I"),), 4), tail=True),
        # JSON, see extension.PeerTarget; the reply is the round trip to the peer in nanoseconds
        Command(Ext.PEER_OPEN, "PEER_OPEN", EMPTY, tail=True, reply=U64, aside=True),
        Command(Ext.PUSH, "PUSH", PARCEL),
        Command(Ext.TAKE, "TAKE", PARCEL),
        Command(Ext.CLOCK, "CLOCK", EMPTY, reply=U64, aside=True),
        # the reply's tail: records.SPAN
        Command(
            Ext.TIMELINE,
            "TIMELINE",
            Layout((("on", "B"),), 1),
            reply=Layout((("dropped", "Q"),), 8),
            reply_tail=True,
            aside=True,
        ),
        Command(Ext.STATS, "STATS", EMPTY, reply=STATS_REPLY, aside=True),
        # JSON, see extension.PeerRequest; the first frame from a worker to another one
        Command(Ext.PEER, "PEER", EMPTY, tail=True, reply=EMPTY),
        Command(Ext.DATA, "DATA", Layout((("ticket", "Q"),), 8), tail=True),
        # f32 in memory, f16 or bf16 on the wire: see dtypes.WireType; `size` is that in memory
        Command(
            Ext.GET_CAST,
            "GET_CAST",
            Layout((("address", "Q"), ("size", "Q"), ("dtype", "I")), 20),
            reply=EMPTY,
            reply_tail=True,
        ),
        Command(
            Ext.SET_CAST, "SET_CAST", Layout((("address", "Q"), ("dtype", "I")), 12), tail=True
        ),
        # after the count: so many LOAD_ENTRY; the reply has one extension.Source of a byte for each
        Command(
            Ext.LOAD,
            "LOAD",
            Layout((("count", "I"),), 4),
            tail=True,
            reply=EMPTY,
            reply_tail=True,
            aside=True,
        ),
        Command(Ext.KEEP, "KEEP", Layout((("address", "Q"), ("size", "Q"), ("digest", "32s")), 48)),
        # the client's first, then the worker's: see proof.py
        Command(Ext.AUTH, "AUTH", NONCE, reply=NONCE),
        Command(Ext.PROVE, "PROVE", MAC, reply=MAC),
        # JSON, see extension.TlsRequest; after the reply both ends shake hands for TLS
        Command(Ext.TLS, "TLS", EMPTY, tail=True, reply=EMPTY),
    )
}


def base_table(major: int) -> dict[int, Command]:
    """The base protocol's table of major version 7 or 8."""
    return BASE_8 if major >= 8 else BASE_7
