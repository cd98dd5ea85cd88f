"""The verbs of a device: the bytes of each, in either protocol, and how refusals come out."""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass, field

import pytest

from caravan import interrupt
from caravan.errors import (
    AllocationError,
    CaravanError,
    DeviceError,
    LocalProtocolError,
    WorkerLost,
)
from caravan.stream.base_link import BaseLink
from caravan.stream.ext_link import ExtLink
from caravan.stream.link import ExtGraph
from caravan.stream.reach import Reach
from caravan.stream.ticket import Ticket
from caravan.transport.endpoint import Endpoint
from caravan.wire.commands import SET_ENTRY
from caravan.wire.dtypes import WireType
from caravan.wire.extension import MAX_SET_MANY, DeviceInfo, Status
from caravan.wire.versions import V7, V8
from stream.scripted import Rig
from wired import PATIENCE, Side, wait_until

REACH = Reach(Endpoint("lab", 50052), "key", ())
INFO = DeviceInfo("CPU", "a processor", 0, 1, 10, 20, 32, 1 << 40, True)
BASE = 1 << 40


@dataclass
class Tensor:
    """A tensor with recognisable records."""

    number: int = 1

    def address(self) -> int:
        return BASE + 64 * self.number

    def base_record(self) -> bytes:
        return bytes([self.number]) * 296

    def ext_record(self) -> bytes:
        return bytes([self.number]) * 268


@dataclass
class Graph:
    uid: int
    handles: frozenset[int] = field(default_factory=frozenset)
    written: list[tuple[int, int]] = field(default_factory=list)

    def base_payload(self):
        return 3, [b"node ids", b"", b"records"]

    def ext_payload(self):
        rows = [b"rows", memoryview(b" and more")]
        return ExtGraph(3, 5, rows, self.handles, self.written)


def u64(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def u32(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def base_link(rig: Rig, version=V7) -> BaseLink:
    peers: list[BaseLink] = []
    lock = threading.Lock()
    for index in range(2):
        peers.append(BaseLink(rig.stream, INFO, index, version, peers, lock))
    return peers[1]


@pytest.fixture
def ext(open_rig):
    rig = open_rig("ext")
    return rig, ExtLink(rig.stream, INFO, 0, V8, REACH)


@pytest.fixture
def seven(open_rig):
    rig = open_rig("7")
    return rig, base_link(rig, V7)


@pytest.fixture
def eight(open_rig):
    rig = open_rig("8")
    return rig, base_link(rig, V8)


@pytest.fixture(params=["ext", "seven", "eight"])
def any_link(request):
    return request.getfixturevalue(request.param)


def tell(link) -> None:
    """Every verb that does not wait."""
    link.clear(9, 0xEE)
    link.init_tensor(Tensor(1))
    link.set_tensor(Tensor(2), 16, b"data")
    link.memset_tensor(Tensor(3), 8, 100, 0xAB)
    link.stream.flush()


def test_ext_tells(ext):
    rig, link = ext
    tell(link)
    link.copy_tensor(Tensor(1), Tensor(2), 77)
    link.free(9)
    assert [(r.name, r.payload) for r in (rig.peer.request() for _ in range(6))] == [
        ("CLEAR", u64(9) + b"\xee"),
        ("INIT_TENSOR", b"\1" * 268),
        ("SET", u64(BASE + 128 + 16) + b"data"),
        ("MEMSET", u64(BASE + 192 + 8, 100) + b"\xab"),
        ("COPY", u64(BASE + 64, BASE + 128, 77)),
        ("FREE", u64(9)),
    ]


@pytest.mark.parametrize("name", ["seven", "eight"])
def test_base_tells(name, request):
    rig, link = request.getfixturevalue(name)
    tell(link)
    link.free(9)
    assert [(r.name, r.payload) for r in (rig.peer.request() for _ in range(5))] == [
        ("BUFFER_CLEAR", u64(9) + b"\xee"),
        ("INIT_TENSOR", b"\1" * 296),
        ("SET_TENSOR", b"\2" * 296 + b"\0" + u64(16) + b"data"),
        ("MEMSET_TENSOR", b"\3" * 296 + u64(8, 100) + b"\xab"),
        ("FREE_BUFFER", u64(9)),
    ]


def test_what_nothing_depends_on_is_corked(any_link):
    rig, link = any_link
    link.clear(9, 0)
    link.init_tensor(Tensor())
    link.set_tensor(Tensor(), 0, b"data")
    link.memset_tensor(Tensor(), 0, 1, 0)
    assert rig.near.sends == []
    link.graph_compute(Graph(1))
    assert rig.near.sends


def test_bye_takes_what_is_corked_along(any_link):
    rig, link = any_link
    link.clear(9, 0)
    link.bye()
    assert rig.peer.request().payload == u64(9) + b"\0"
    if link.extension:
        assert rig.peer.request("BYE").payload == b""


def test_set_tensor_from_the_callers_memory(any_link):
    rig, link = any_link
    data = bytearray(b"precious" * 10_000)
    link.set_tensor(Tensor(), 0, memoryview(data), wait_sent=True)
    data[:] = bytes(len(data))
    assert rig.peer.request().payload.endswith(b"precious" * 10_000)


def test_set_tensor_of_a_relay(any_link):
    rig, link = any_link
    ticket = Ticket("GET", 4)
    link.set_tensor(Tensor(), 0, ticket)
    link.graph_compute(Graph(1))
    assert rig.near.sends == []
    ticket.resolve(b"data")
    assert rig.peer.request().payload.endswith(b"data")


@pytest.mark.parametrize("into", [False, True])
def test_ext_get_tensor(ext, into):
    rig, link = ext
    target = bytearray(4)
    ticket = link.get_tensor(Tensor(2), 16, 4, memoryview(target) if into else None)
    request = rig.peer.request("GET")
    assert request.payload == u64(BASE + 128 + 16, 4)
    rig.peer.reply(request, b"data")
    assert ticket.wait(PATIENCE) == (b"" if into else b"data")
    assert target == (b"data" if into else bytes(4))


def test_base_get_tensor(seven):
    rig, link = seven
    ticket = link.get_tensor(Tensor(2), 16, 4, None)
    request = rig.peer.request("GET_TENSOR")
    assert request.payload == b"\2" * 296 + u64(16, 4)
    rig.peer.reply(request, b"data")
    assert ticket.wait(PATIENCE) == b"data"


@pytest.mark.parametrize("kind", ["ext", "seven"])
def test_rows_are_written_one_by_one_where_there_is_no_command_for_them(request, kind):
    rig, link = request.getfixturevalue(kind)
    link.set_tensor_2d(Tensor(2), 8, 3, 16, [b"one", b"two"])
    link.stream.flush()
    if link.extension:
        link.memset_tensor(Tensor(3), 0, 1, 0)
        link.stream.flush()
        entries = SET_ENTRY.pack(BASE + 136, 3) + SET_ENTRY.pack(BASE + 152, 3)
        assert rig.peer.request("SET_MANY").payload == u32(2) + entries + b"onetwo"
        return
    for offset, data in ((8, b"one"), (24, b"two")):
        payload = rig.peer.request("SET_TENSOR").payload
        assert payload == b"\2" * 296 + b"\0" + u64(offset) + data


def test_rows_of_protocol_8_are_one_command(eight):
    rig, link = eight
    link.set_tensor_2d(Tensor(2), 8, 3, 16, [b"one", b"two"])
    target = bytearray(6)
    (ticket,) = link.get_tensor_2d(Tensor(1), 8, 3, 16, memoryview(target))
    assert rig.peer.request("SET_TENSOR_2D").payload == b"\2" * 296 + u64(8, 3, 2, 16) + b"onetwo"
    request = rig.peer.request("GET_TENSOR_2D")
    assert request.payload == b"\1" * 296 + u64(8, 3, 2, 16)
    rig.peer.reply(request, b"onetwo")
    ticket.wait(PATIENCE)
    assert target == b"onetwo"


def test_many_long_rows_are_several_commands(eight):
    rig, link = eight
    link.set_tensor_2d(Tensor(2), 0, 1 << 20, 2 << 20, [b"x" * (1 << 20)] * 2)
    link.stream.flush()
    for i in range(2):
        request = rig.peer.request("SET_TENSOR_2D")
        assert request.payload[296:328] == u64(i * (2 << 20), 1 << 20, 1, 2 << 20)


@pytest.mark.parametrize("kind", ["ext", "seven"])
def test_rows_are_read_one_by_one_and_none_waits_for_another(request, kind):
    rig, link = request.getfixturevalue(kind)
    target = bytearray(6)
    tickets = link.get_tensor_2d(Tensor(2), 8, 3, 16, memoryview(target))
    asked = [rig.peer.request() for _ in tickets]
    for got, data in zip(asked, (b"one", b"two"), strict=True):
        rig.peer.reply(got, data)
    tickets[-1].wait(PATIENCE)
    assert target == b"onetwo"


def answer(rig: Rig, call, *replies: tuple[str, bytes, bytes], status: int = 0):
    """The result of `call` when the peer answers these requests."""
    side = Side(call)
    for name, expected, reply in replies:
        request = rig.peer.request(name)
        assert request.payload == expected
        rig.peer.reply(request, reply, *([status] if status else []))
    return side.join()


def test_small_writes_leave_as_one_command(ext):
    rig, link = ext
    relay = Ticket("GET", 5)
    link.set_tensor(Tensor(1), 0, b"one")
    link.set_tensor(Tensor(2), 8, relay)
    link.set_tensor(Tensor(3), 0, b"")
    link.set_tensor(Tensor(3), 0, b"three")
    link.graph_compute(Graph(1))
    assert rig.near.sends == []
    relay.resolve(b"relay")
    assert len(rig.near.sends) == 1
    assert rig.peer.request("SET_MANY").payload == (
        u32(4)
        + u64(BASE + 64, 3, BASE + 128 + 8, 5, BASE + 192, 0, BASE + 192, 5)
        + b"onerelaythree"
    )
    assert rig.peer.request("GRAPH_COMPUTE")


def test_many_tiny_writes_stay_within_what_a_worker_takes(ext):
    rig, link = ext
    for _ in range(3 * MAX_SET_MANY // 100):
        link.set_tensor(Tensor(1), 0, b"x")
    link.bye()
    sizes = []
    while (request := rig.peer.request()).name == "SET_MANY":
        sizes.append(len(request.payload))
    assert len(sizes) > 1
    assert max(sizes) <= MAX_SET_MANY


def test_a_large_write_keeps_its_place_among_small_ones(ext):
    rig, link = ext
    link.set_tensor(Tensor(1), 0, b"before")
    link.set_tensor(Tensor(1), 0, b"x" * 20_000)
    link.set_tensor(Tensor(1), 0, b"after")
    link.bye()
    payloads = [rig.peer.request("SET").payload[8:] for _ in range(3)]
    assert payloads == [b"before", b"x" * 20_000, b"after"]


DEPENDENT = {
    "clear": lambda link: link.clear(9, 0),
    "init": lambda link: link.init_tensor(Tensor()),
    "get": lambda link: link.get_tensor(Tensor(), 0, 4, None),
    "memset": lambda link: link.memset_tensor(Tensor(), 0, 1, 0),
    "copy": lambda link: link.copy_tensor(Tensor(1), Tensor(2), 3),
    "compute": lambda link: link.graph_compute(Graph(0)),
    "free": lambda link: link.free(9),
    "large write": lambda link: link.set_tensor(Tensor(), 0, b"x" * 20_000),
    "own memory": lambda link: link.set_tensor(Tensor(), 0, b"x", wait_sent=True),
    "bye": lambda link: link.bye(),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_nothing_overtakes_a_small_write(ext, name):
    rig, link = ext
    link.set_tensor(Tensor(1), 0, b"first")
    DEPENDENT[name](link)
    link.stream.flush()
    assert rig.peer.request("SET").payload[8:] == b"first"
    assert rig.peer.request()


def test_ctrl_c_does_not_wait_for_a_size(any_link, monkeypatch):
    """The answer comes after all graphs that are on their way: with many, after many seconds."""
    rig, link = any_link
    side = Side(lambda: link.alloc_size(Tensor(), []))
    request = rig.peer.request()
    monkeypatch.setattr(interrupt, "pending", lambda: True)
    # the stop that the wait asks was bound before; a new question asks the new one
    rig.peer.reply(request, u64(5))
    assert side.join() == 5
    with pytest.raises(CaravanError, match="not waited for"):
        link.alloc_size(Tensor(), [])
    late = rig.peer.request()
    rig.peer.reply(late, u64(6))
    monkeypatch.undo()
    side = Side(lambda: link.alloc_size(Tensor(), []))
    rig.peer.reply(rig.peer.request(), u64(7))
    assert side.join() == 7


@pytest.mark.parametrize("question", ["alloc", "alloc_size", "memory"])
def test_no_question_overtakes_a_small_write(ext, question):
    rig, link = ext
    link.set_tensor(Tensor(1), 0, b"first")
    call = {
        "alloc": lambda: link.alloc(1),
        "alloc_size": lambda: link.alloc_size(Tensor(), []),
        "memory": link.memory,
    }[question]
    side = Side(call)
    assert rig.peer.request("SET").payload[8:] == b"first"
    rig.peer.request(question.upper())
    rig.peer.close()
    with pytest.raises(WorkerLost):
        side.join()


def test_small_writes_do_not_pile_up(ext):
    rig, link = ext
    for number in range(1000):
        link.set_tensor(Tensor(1), 0, bytes([number % 256]) * 1000)
    link.bye()
    written = []
    while (request := rig.peer.request()).name == "SET_MANY":
        (count,) = struct.unpack_from("<I", request.payload)
        assert len(request.payload) <= MAX_SET_MANY
        sizes = [size for _, size in SET_ENTRY.unpack_many(request.payload[4 : 4 + 16 * count])]
        data = request.payload[4 + 16 * count :]
        for size in sizes:
            written.append(data[:size])
            data = data[size:]
        assert data == b""
    assert written == [bytes([number % 256]) * 1000 for number in range(1000)]


WRITERS = {
    "clear": lambda link: link.clear(1, 0),
    "init": lambda link: link.init_tensor(Tensor(7)),
    "memset": lambda link: link.memset_tensor(Tensor(1), 3, 1, 0),
    "copy": lambda link: link.copy_tensor(Tensor(5), Tensor(1), 1),
    "take": lambda link: link.take(Tensor(1), 1, 5, 9),
    "free": lambda link: link.free(1),
    "relay": lambda link: link.set_tensor(Tensor(1), 3, resolved(b"x"), again=True),
    "own memory": lambda link: link.set_tensor(Tensor(1), 0, memoryview(b"x"), wait_sent=True),
    "weights": lambda link: link.set_tensor(Tensor(1), 2, b"x"),
    "overlap": lambda link: link.set_tensor(Tensor(1), 2, b"x", again=True),
    "nameless graph": lambda link: link.graph_compute(Graph(0, written=[(BASE, BASE + 65)])),
    "graph": lambda link: link.graph_compute(Graph(6, written=[(BASE + 67, BASE + 68)])),
}
BYSTANDERS = {
    "clear": lambda link: link.clear(2, 0),
    "memset": lambda link: link.memset_tensor(Tensor(1), 4, 1, 0),
    "copy": lambda link: link.copy_tensor(Tensor(1), Tensor(2), 1),
    "take": lambda link: link.take(Tensor(2), 1, 5, 9),
    "free": lambda link: link.free(2),
    "get": lambda link: link.get_tensor(Tensor(1), 0, 4, None),
    "push": lambda link: link.push(Tensor(1), 4, 5, 9),
    "graph": lambda link: link.graph_compute(
        Graph(6, written=[(0, BASE + 64), (BASE + 68, 1 << 50)])
    ),
}


def resolved(data: bytes) -> Ticket:
    ticket = Ticket("GET", len(data))
    ticket.resolve(data)
    return ticket


def sets_of(rig: Rig) -> int:
    """How often the first tensor was written in full, up to the end."""
    found = 0
    while (request := rig.peer.request()).name != "BYE":
        found += request.name == "SET" and request.payload == u64(BASE + 64) + b"data"
        if request.name == "SET_MANY":
            (count,) = struct.unpack_from("<I", request.payload)
            entries = SET_ENTRY.unpack_many(request.payload[4 : 4 + 16 * count])
            found += entries.count((BASE + 64, 4))
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_what_may_have_been_written_over_is_sent_again(ext, name):
    rig, link = ext
    for _ in range(2):
        link.set_tensor(Tensor(1), 0, b"data", again=True)
        WRITERS[name](link)
    link.set_tensor(Tensor(1), 0, b"data", again=True)
    link.bye()
    assert sets_of(rig) == 3


@pytest.mark.parametrize("name", BYSTANDERS)
def test_what_is_there_is_not_sent_again(ext, name):
    rig, link = ext
    for _ in range(2):
        link.set_tensor(Tensor(1), 0, b"data", again=True)
        BYSTANDERS[name](link)
    link.set_tensor(Tensor(1), 0, b"data", again=True)
    link.bye()
    assert sets_of(rig) == 1


def test_a_graph_that_is_computed_again_writes_again(ext):
    rig, link = ext
    graph = Graph(6, written=[(BASE + 64, BASE + 65)])
    for _ in range(3):
        link.set_tensor(Tensor(1), 0, b"data", again=True)
        link.graph_compute(graph)
    link.bye()
    assert sets_of(rig) == 3


def test_of_a_changed_write_the_change_is_sent(ext):
    rig, link = ext
    mask = bytearray(40_000)
    for number in range(3):
        mask[5000 + 2 * number] = 1
        link.set_tensor(Tensor(1), 0, bytes(mask), again=True)
        link.set_tensor(Tensor(1000), 0, b"unchanged", again=True)
    link.bye()
    requests = [rig.peer.request() for _ in range(3)]
    assert [request.name for request in requests] == ["SET", "SET_MANY", "BYE"]
    assert requests[0].payload == u64(BASE + 64) + bytes(5000) + b"\1" + bytes(34_999)
    head = u32(3) + u64(BASE + 64_000, 9, BASE + 5064, 8, BASE + 5064, 8)
    data = b"unchanged" + b"\1\0\1" + bytes(5) + b"\1\0\1\0\1" + bytes(3)
    assert requests[1].payload == head + data


def test_ext_casts(ext):
    rig, link = ext
    ticket = link.get_cast(Tensor(2), 8, WireType.F16)
    request = rig.peer.request("GET_CAST")
    assert request.payload == u64(BASE + 128, 8) + u32(1)
    rig.peer.reply(request, b"half")
    assert ticket.wait(PATIENCE) == b"half"
    link.set_tensor(Tensor(1), 0, b"before")
    link.set_cast(Tensor(2), 8, ticket, WireType.BF16)
    link.push(Tensor(2), 8, 5, 9, WireType.BF16)
    assert rig.peer.request("SET").payload == u64(BASE + 64) + b"before"
    assert rig.peer.request("SET_CAST").payload == u64(BASE + 128) + u32(2) + b"half"
    assert rig.peer.request("PUSH").payload == u32(5, 2) + u64(9, BASE + 128, 8)
    link.take(Tensor(2), 8, 5, 9, WireType.F16)
    link.stream.flush()
    assert rig.peer.request("TAKE").payload == u32(5, 1) + u64(9, BASE + 128, 8)


def test_converted_writes_that_change_nothing_are_dropped(ext):
    rig, link = ext
    for data, dtype in ((b"half", 1), (b"half", 1), (b"half", 2), (b"full", 2), (b"full", 2)):
        link.set_cast(Tensor(2), 8, data, WireType(dtype))
    link.set_tensor(Tensor(2), 0, b"full size", again=True)
    link.set_cast(Tensor(2), 8, b"full", WireType.BF16)
    link.bye()
    sent = [(r.name, r.payload[8:]) for r in (rig.peer.request() for _ in range(6))]
    assert sent == [
        ("SET_CAST", u32(1) + b"half"),
        ("SET_CAST", u32(2) + b"half"),
        ("SET_CAST", u32(2) + b"full"),
        ("SET", b"full size"),
        ("SET_CAST", u32(2) + b"full"),
        ("BYE", b""),
    ]


def test_ext_alloc(ext):
    rig, link = ext
    got = answer(rig, lambda: link.alloc(100), ("ALLOC", u64(100), u64(7, 7 << 40, 128)))
    assert (got.handle, got.base, got.size) == (7, 7 << 40, 128)


def test_base_alloc(seven):
    rig, link = seven
    got = answer(
        rig,
        lambda: link.alloc(100),
        ("ALLOC_BUFFER", u32(1) + u64(100), u64(7, 128)),
        ("BUFFER_GET_BASE", u64(7), u64(0x7F00_0000_0000)),
    )
    assert (got.handle, got.base, got.size) == (7, 0x7F00_0000_0000, 128)


def test_ext_alloc_without_room(ext):
    rig, link = ext
    with pytest.raises(AllocationError, match="no room for 5 GB"):
        answer(
            rig,
            lambda: link.alloc(5),
            ("ALLOC", u64(5), b"no room for 5 GB"),
            status=Status.OUT_OF_MEMORY,
        )
    assert rig.stream.lost is None


def test_ext_alloc_that_is_refused_for_another_reason(ext):
    rig, link = ext
    with pytest.raises(DeviceError, match="too many") as caught:
        answer(
            rig,
            lambda: link.alloc(5),
            ("ALLOC", u64(5), b"too many"),
            status=Status.REFUSED,
        )
    assert not isinstance(caught.value, AllocationError)
    assert rig.stream.lost is None


def test_base_alloc_without_room(seven):
    rig, link = seven
    with pytest.raises(AllocationError, match="no room for a buffer of 100 bytes"):
        answer(rig, lambda: link.alloc(100), ("ALLOC_BUFFER", u32(1) + u64(100), u64(0, 0)))
    assert rig.stream.lost is None


NONSENSE = [
    (7, 1 << 40, 99),
    (7, 0, 100),
    (7, (1 << 40) + 16, 100),
    (7, 2**64 - 32, 100),
    (7, 1 << 40, 2**64 - (1 << 40)),
]


@pytest.mark.parametrize(("handle", "base", "size"), NONSENSE)
def test_ext_alloc_that_makes_no_sense(ext, handle, base, size):
    rig, link = ext
    with pytest.raises(DeviceError, match="an allocation of 100 bytes"):
        answer(rig, lambda: link.alloc(100), ("ALLOC", u64(100), u64(handle, base, size)))


@pytest.mark.parametrize(("handle", "base", "size"), NONSENSE)
def test_base_alloc_that_makes_no_sense(seven, handle, base, size):
    rig, link = seven
    with pytest.raises(DeviceError, match="an allocation of 100 bytes"):
        answer(
            rig,
            lambda: link.alloc(100),
            ("ALLOC_BUFFER", u32(1) + u64(100), u64(handle, size)),
            ("BUFFER_GET_BASE", u64(handle), u64(base)),
        )


def test_ext_alloc_size(ext):
    rig, link = ext
    sent = b"\1" * 268 + b"\2" * 268 + b"\3" * 268
    size = answer(
        rig,
        lambda: link.alloc_size(Tensor(1), [Tensor(2), Tensor(3)]),
        ("ALLOC_SIZE", sent, u64(500)),
    )
    assert size == 500


def test_base_alloc_size(seven):
    rig, link = seven
    sent = u32(1) + b"\1" * 296 + b"\2" * 296 + bytes(9 * 296)
    size = answer(
        rig, lambda: link.alloc_size(Tensor(1), [Tensor(2)]), ("GET_ALLOC_SIZE", sent, u64(500))
    )
    assert size == 500


def test_base_alloc_size_with_more_sources_than_the_wire_has(seven):
    _, link = seven
    with pytest.raises(LocalProtocolError):
        link.alloc_size(Tensor(1), [Tensor(2)] * 11)


def test_ext_memory(ext):
    rig, link = ext
    assert answer(rig, link.memory, ("MEMORY", b"", u64(5, 6))) == (5, 6)


def test_base_memory(seven):
    rig, link = seven
    assert answer(rig, link.memory, ("GET_DEVICE_MEMORY", u32(1), u64(5, 6))) == (5, 6)


def test_a_refused_question_of_the_extension_without_a_fallback_loses_the_device(ext):
    rig, link = ext
    with pytest.raises(WorkerLost, match="MEMORY: broken"):
        answer(rig, link.memory, ("MEMORY", b"", b"broken"), status=Status.INTERNAL)


def test_base_copy(seven):
    rig, link = seven
    link.copy_tensor(Tensor(1), Tensor(2), 77)
    request = rig.peer.request("COPY_TENSOR")
    assert request.payload == b"\1" * 296 + b"\2" * 296
    rig.peer.reply(request, b"\1")
    assert answer(rig, link.memory, ("GET_DEVICE_MEMORY", u32(1), u64(5, 6))) == (5, 6)


def test_base_copy_that_the_server_cannot_do_is_not_passed_over(seven):
    rig, link = seven
    link.copy_tensor(Tensor(1), Tensor(2), 77)
    rig.peer.reply(rig.peer.request("COPY_TENSOR"), b"\0")
    wait_until(lambda: rig.stream.lost)
    assert rig.stream.lost.command == "COPY_TENSOR"
    assert "cannot copy" in str(rig.stream.lost)


def test_ext_graphs(ext):
    rig, link = ext
    full = ("GRAPH_COMPUTE", u64(6) + u32(3, 5) + b"rows and more")
    again = ("GRAPH_RECOMPUTE", u64(6))
    nameless = ("GRAPH_COMPUTE", u64(0) + u32(3, 5) + b"rows and more")

    def sent():
        request = rig.peer.request()
        return request.name, request.payload

    uses_2 = Graph(6, frozenset({1, 2}))
    link.graph_compute(uses_2)
    assert sent() == full
    link.graph_compute(uses_2)
    assert sent() == again
    # another buffer's end does not matter to it, its own does
    link.free(3)
    assert sent() == ("FREE", u64(3))
    link.graph_compute(uses_2)
    assert sent() == again
    link.free(2)
    assert sent() == ("FREE", u64(2))
    link.graph_compute(uses_2)
    assert sent() == full
    for _ in range(2):
        link.graph_compute(Graph(0))
        assert sent() == nameless


def base_graphs(rig: Rig, uid: bytes) -> None:
    """One link's graphs as a version 7 or 8 server has them."""
    link = base_link(rig, V8 if uid else V7)
    other = link._peers[0]
    full = ("GRAPH_COMPUTE", u32(1) + uid + u32(3) + b"node idsrecords")
    again = ("GRAPH_RECOMPUTE", u32(1) + uid)
    fence = ("GET_ALIGNMENT", u32(1))

    def sent():
        request = rig.peer.request()
        if request.name == "GET_ALIGNMENT":
            rig.peer.reply(request, u64(32))
        return request.name, request.payload

    link.graph_compute(Graph(6))
    assert (sent(), sent()) == (full, fence)
    link.graph_compute(Graph(6))
    assert (sent(), sent()) == (again, fence)
    # any buffer, of any device, takes all graphs along
    other.free(5)
    assert sent() == ("FREE_BUFFER", u64(5))
    link.graph_compute(Graph(6))
    assert (sent(), sent()) == (full, fence)
    assert rig.stream.lost is None


def test_graphs_of_version_7(open_rig):
    base_graphs(open_rig("7"), b"")


def test_graphs_of_version_8(open_rig):
    base_graphs(open_rig("8"), u64(6))


def names(rig: Rig, count: int) -> list[str]:
    return [rig.peer.request().name for _ in range(count)]


def test_a_nameless_graph_replaces_the_one_of_version_7(seven, eight):
    expected = {"seven": "GRAPH_COMPUTE", "eight": "GRAPH_RECOMPUTE"}
    for name, (rig, link) in {"seven": seven, "eight": eight}.items():
        for uid in (6, 0, 6):
            link.graph_compute(Graph(uid))
        assert names(rig, 6)[4] == expected[name]


def test_a_graph_leaves_in_one_segment_with_its_fence(seven):
    rig, link = seven
    link.graph_compute(Graph(6))
    names(rig, 2)
    before = len(rig.near.sends)
    link.graph_compute(Graph(6))
    assert len(rig.near.sends) == before + 1


def test_graphs_and_frees_from_two_threads_keep_their_order(ext):
    """A graph is never recomputed after the peer has forgotten it."""
    rig, link = ext
    graph = Graph(6, frozenset({2}))

    def compute():
        for _ in range(300):
            link.graph_compute(graph)

    def free():
        for _ in range(300):
            link.free(2)

    sides = [Side(compute), Side(free)]
    known = False
    for _ in range(600):
        request = rig.peer.request()
        if request.name == "FREE":
            known = False
        elif request.name == "GRAPH_COMPUTE":
            known = True
        else:
            assert known
    for side in sides:
        side.join()


def test_questions_to_a_lost_device(any_link):
    rig, link = any_link
    rig.peer.close()
    wait_until(lambda: rig.stream.lost)
    for call in (lambda: link.alloc(1), link.memory, lambda: link.alloc_size(Tensor(), [])):
        with pytest.raises(WorkerLost) as caught:
            call()
        assert caught.value is rig.stream.lost
    tell(link)
    link.copy_tensor(Tensor(1), Tensor(2), 3)
    link.graph_compute(Graph(1))
    link.free(1)
    link.bye()
    target = bytearray(b"old")
    assert link.get_tensor(Tensor(), 0, 3, memoryview(target)).done
    assert target == bytes(3)
