"""Changes to recorded messages, by someone who knows what is in them: fields, tensor records,
entries, JSON, lengths. Everything comes from one seeded `random.Random`.
"""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import numpy as np

from caravan.engine.layouts import OP_NAMES, TYPE_BLOCK, TYPE_BYTES
from caravan.wire.commands import BASE_8, EXT, LOAD_ENTRY, SET_ENTRY, Base, Command, Ext, base_table
from caravan.wire.records import EXT_TENSOR, RPC_TENSOR

WORDS = (
    *(0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 33, 63, 64, 100, 127, 128, 255, 256, 1000, 4095, 4096),
    *(65535, 65536, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 39) - 1),
    *(1 << 39, (1 << 40) - 1, 1 << 40, (1 << 40) + 1, 2 << 40, 3 << 40, 99 << 40),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1),
)
# Where a worker may be told to connect to: nothing here leaves this machine.
ADDRESSES = ("127.0.0.1:1", "127.0.0.1:99999", "unix:/nowhere", "", "[::1]:1", "/" * 300)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
_TYPES = [n for n, block in enumerate(TYPE_BLOCK) if block]
_WIDTH = {"B": 1, "H": 2, "I": 4, "Q": 8}


class Mutator:
    """See the module; `table` is of the protocol that is spoken."""

    def __init__(self, rng: random.Random, protocol: int) -> None:
        self.rng = rng
        self.protocol = protocol
        self.table: dict[int, Command] = EXT if protocol == 0 else base_table(protocol)
        self.record = EXT_TENSOR if protocol == 0 else RPC_TENSOR

    def word(self, old: int, width: int) -> int:
        """Another value for a field of `width` bytes."""
        rng = self.rng
        value = rng.choice(
            (
                lambda: rng.choice(WORDS),
                lambda: old + rng.choice((-8, -4, -1, 1, 4, 8, 32, 64)),
                lambda: old ^ (1 << rng.randrange(8 * width)),
                lambda: old * 2,
                lambda: old // 2,
                lambda: -old,
                lambda: rng.getrandbits(8 * width),
            )
        )()
        return value & ((1 << 8 * width) - 1)

    def payload(self, number: int, payload: bytes) -> bytes:
        """The same message with something in it changed."""
        rng, command = self.rng, self.table.get(number)
        if number == Ext.PEER_OPEN and not self.protocol:
            return self.json(payload)
        if command is None or not command.fits(len(payload)):
            return self.bytes_(payload)
        dice = rng.random()
        if dice < 0.04:
            return self.bytes_(payload)
        head, tail = payload[: command.request.size], payload[command.request.size :]
        if head and (not tail or dice < 0.25):
            return self.head(command, head) + tail
        return head + self.tail(number, head, tail)

    def bytes_(self, payload: bytes) -> bytes:
        """Without knowing what it is: cut, extended, bits turned."""
        rng = self.rng
        data = bytearray(payload)
        match rng.randrange(4):
            case 0:
                return payload[: rng.randrange(len(payload) + 1)]
            case 1:
                return payload + rng.randbytes(rng.choice((1, 4, 8, 300)))
            case 2:
                return b""
        for _ in range(rng.randint(1, 8)):
            if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(data)

    def head(self, command: Command, head: bytes) -> bytes:
        """One field of the fixed part."""
        values = list(command.request.unpack(head))
        index = self.rng.randrange(len(values))
        code = command.request.fields[index][1]
        if code in _WIDTH:
            values[index] = self.word(values[index], _WIDTH[code])
        elif self.protocol and len(values[index]) % RPC_TENSOR.itemsize == 0:
            values[index] = self.rows(values[index])
        else:
            values[index] = self.bytes_(values[index])[: len(values[index])]
        return command.request.pack(*values)

    def tail(self, number: int, head: bytes, tail: bytes) -> bytes:
        if self.protocol == 0:
            if number in (Ext.GRAPH_COMPUTE, Ext.INIT_TENSOR, Ext.ALLOC_SIZE):
                return self.rows(tail)
            if number == Ext.SET_MANY:
                return self.entries(tail, SET_ENTRY.size, int.from_bytes(head, "little"))
            if number == Ext.LOAD:
                return self.entries(tail, LOAD_ENTRY.size, int.from_bytes(head, "little"))
        elif number == Base.GRAPH_COMPUTE:
            return self.base_graph(head, tail)
        return self.bytes_(tail)

    def entries(self, tail: bytes, size: int, count: int) -> bytes:
        """A word of one of the records at the start."""
        if not 0 < count * size <= len(tail):
            return self.bytes_(tail)
        data = bytearray(tail)
        at = size * self.rng.randrange(count) + 8 * self.rng.randrange(min(size // 8, 6))
        (old,) = struct.unpack_from("<Q", data, at)
        struct.pack_into("<Q", data, at, self.word(old, 8))
        return bytes(data)

    def json(self, tail: bytes) -> bytes:
        """Structure only, never the text of an address: it must not become somebody else's."""
        rng = self.rng
        try:
            value = dict(json.loads(tail))
            key = rng.choice(sorted(value))
        except (ValueError, IndexError, TypeError, RecursionError):
            return tail
        match rng.randrange(6):
            case 0:
                del value[key]
            case 1:
                value[key] = rng.choice((None, -1, 1 << 70, "", [], {}, 1.5, True, [[]] * 100))
            case 2:
                value["addresses"] = rng.choices(ADDRESSES, k=rng.randrange(12))
            case 3:
                value["key"] = rng.choice(("", "0" * 32, "\ud800", "x" * 5000))
            case 4:
                return tail[: rng.randrange(len(tail))]
            case 5:
                return b"[" * rng.choice((10, 5000)) + b"]"
        return json.dumps(value).encode()

    # graphs

    def base_graph(self, head: bytes, tail: bytes) -> bytes:
        """The node ids, the count, or the records."""
        n_nodes = int.from_bytes(head[-4:], "little")
        start = 8 * n_nodes + 4
        if not n_nodes or start > len(tail):
            return self.bytes_(tail)
        dice = self.rng.random()
        if dice < 0.1:
            nodes = np.frombuffer(tail, "<u8", n_nodes).copy()
            nodes[self.rng.randrange(n_nodes)] = self.rng.choice((0, 1, int(nodes[0])))
            return nodes.tobytes() + tail[8 * n_nodes :]
        if dice < 0.15:
            count = self.word(int.from_bytes(tail[start - 4 : start], "little"), 4)
            return tail[: start - 4] + struct.pack("<I", count) + tail[start:]
        return tail[:start] + self.rows(tail[start:])

    def rows(self, data: bytes) -> bytes:
        count = len(data) // self.record.itemsize
        if not count or len(data) % self.record.itemsize:
            return self.bytes_(data)
        rows = np.frombuffer(data, self.record).copy()
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            self.row(rows, self.rng.randrange(count))
        return rows.tobytes()

    def row(self, rows: np.ndarray, r: int) -> None:
        """One change to one record."""
        rng = self.rng
        change = rng.choice(_CHANGES)
        other = rng.randrange(len(rows))
        match change:
            case "ne" | "nb" | "src" | "op_params":
                k = rng.randrange(rows[change].shape[1])
                self.set(rows, r, (change, k), rows[change][other, k])
            case "shape":
                self.shape(rows, r, other)
            case "type":
                rows["type"][r] = rng.choice((*_TYPES, *WORDS[:16]))
                if rng.random() < 0.5:
                    self.shape(rows, r, r)
            case "op":
                rows["op"][r] = rng.randrange(len(OP_NAMES) + 2)
            case "param":
                rows["op_params"].view("<f4")[r, rng.randrange(16)] = rng.choice(_FLOATS)
            case "sources":
                rows["src"][r] = rows["src"][other]
            case "params":
                rows["op_params"][r] = rows["op_params"][other]
            case "row":
                rows[r] = rows[other]
            case "swap":
                rows[[r, other]] = rows[[other, r]]
            case _:
                self.set(rows, r, (change,), rows[change][other])

    def set(self, rows: np.ndarray, r: int, place: tuple[Any, ...], others: Any) -> None:
        """A field of a record: like another one's, or anything."""
        array = rows[place[0]]
        at = (r, *place[1:])
        if self.rng.random() < 0.4:
            array[at] = others
            return
        width = array.dtype.itemsize
        value = self.word(int(array[at]), width)
        array[at] = np.array(value, f"<u{width}").view(array.dtype)

    def shape(self, rows: np.ndarray, r: int, other: int) -> None:
        """Other dimensions, and strides that go with them."""
        ne = [int(n) for n in rows["ne"][other]]
        for k in range(4):
            if self.rng.random() < 0.3:
                ne[k] = self.rng.choice((0, 1, 2, 3, 4, 7, 8, 16, 32, 64, 256, 1 << 16))
        kind = min(int(rows["type"][r]), len(TYPE_BLOCK) - 1)
        block, size = int(TYPE_BLOCK[kind]) or 1, int(TYPE_BYTES[kind])
        nb = [size, size * ne[0] // block]
        nb += [nb[1] * ne[1], nb[1] * ne[1] * ne[2]]
        most = (1 << 31) if self.protocol else 1 << 62
        rows["ne"][r] = [n % most for n in ne]
        rows["nb"][r] = [n % most for n in nb]


_CHANGES = (
    *("ne", "nb", "src", "op_params", "data", "view_offs", "view_src", "shape", "type", "op"),
    *("flags", "use_count", "param", "sources", "params", "row", "swap"),
    *("ne", "nb", "src", "op_params", "data", "shape", "type", "op", "op"),
)
assert set(BASE_8) and len(OP_NAMES) > 90
