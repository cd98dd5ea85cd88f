"""Opening a way to another worker: whatever answers at its addresses, or nothing."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from caravan.errors import RemoteError
from caravan.transport.reader import Reader
from caravan.wire import codec, extension
from caravan.wire.commands import EXT, Ext
from caravan.wire.extension import PeerTarget, Status
from caravan.wire.versions import V8
from caravan.worker import ext_channel, peering
from caravan.worker.ext_channel import ExtChannel
from servers import Script, close, hello, raw, steps
from stream.scripted import Peer as Other
from wired import PATIENCE, receive
from worker.fakes import FakeDevice
from worker.test_channels import Peer, hold, serving

KEY = "f" * 32


def target(*addresses: object, route: int = 3) -> PeerTarget:
    return PeerTarget(route, [str(address) for address in addresses], KEY, 1)


def peer(payload: bytes = b"", status: int = 0) -> Script:
    """The answer to PEER."""

    def step(other: Other) -> None:
        other.table = None
        request = other.request("PEER")
        other.asked = json.loads(request.payload)  # type: ignore[attr-defined]
        other.reply(request, payload, status)

    return step


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def impatient(monkeypatch) -> None:
    """For what never answers. Who does answer may take its time on a busy machine: see patient."""
    monkeypatch.setattr(peering, "_TIMEOUT", 0.2)


@pytest.fixture(autouse=True)
def patient(monkeypatch) -> None:
    monkeypatch.setattr(peering, "_TIMEOUT", PATIENCE)


def fails(*addresses: object) -> str:
    """Why no way can be opened."""
    with pytest.raises(RemoteError) as caught:
        peering.open_way(target(*addresses))
    assert caught.value.code == Status.PEER_LOST
    assert "\n" not in caught.value.text
    return caught.value.text


def test_the_right_worker(serve):
    server = serve(steps(hello(), peer()))
    transport, elapsed = peering.open_way(target(server.endpoint))
    (other,) = server.peers
    assert other.asked == {"route": 3, "key": KEY, "device": 1}
    assert 0 < elapsed < PATIENCE * 1e9
    other.raw(b"what comes next is not read")
    assert Reader(transport).read(9) == b"what come"
    # a way may be idle for as long as it likes
    assert transport._sock.gettimeout() is None
    transport.send([b"data"])
    assert receive(other.transport, 4) == b"data"
    transport.close()


def test_the_last_of_several_addresses(serve):
    wrong = serve(steps(hello(), peer(b"no such session", Status.REFUSED)))
    right, unused = serve(steps(hello(), peer())), serve()
    transport, _ = peering.open_way(
        target(
            "no:such:endpoint",
            closed_port(),
            wrong.endpoint,
            right.endpoint,
            unused.endpoint,
        )
    )
    assert transport.peer == str(right.endpoint)
    assert unused.peers == []
    transport.close()


def test_every_address_says_why(serve, impatient):
    port, silent = closed_port(), serve()
    text = fails(port, silent.endpoint, "a b")
    assert text.split("; ") == [
        f"cannot connect to {port}: connection refused",
        f"{silent.endpoint}: no answer in time",
        "endpoint 'a b' names no host: expected HOST:PORT",
    ]


def test_no_address():
    assert fails() == "no address to reach it"


ANSWERS = {
    "http": (raw(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "answers, but is no RPC worker"),
    "no extension": (hello(V8, bytes(24)), "is no Caravan worker"),
    "hangs up": (close, "closed"),
    "hangs up after HELLO": (steps(hello(), close), "closed"),
    "wrong key": (
        steps(hello(), peer(b"no such session", Status.REFUSED)),
        "no such session",
    ),
    "wrong key, many words": (
        steps(hello(), peer(bytes(extension.MAX_ERROR_TEXT), Status.REFUSED)),
        "no reason given",
    ),
    "another answer": (
        steps(hello(), raw(codec.ext_frame(Ext.SESSION, 1, 2) + b"{}")),
        "answered PEER with something else",
    ),
    "an endless answer": (
        steps(hello(), raw(codec.ext_frame(Ext.PEER, 1, 1 << 40))),
        "answered PEER with something else",
    ),
    "part of an answer": (
        steps(hello(), raw(codec.ext_frame(Ext.PEER, 1, 100, Status.REFUSED)), close),
        "closed",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_who_is_not_the_right_worker(serve, name):
    script, text = ANSWERS[name]
    server = serve(script)
    assert text in fails(server.endpoint)


@pytest.mark.parametrize("script", [lambda other: None, hello()], ids=["at once", "after HELLO"])
def test_who_says_nothing(serve, impatient, script):
    server = serve(script)
    assert "no answer in time" in fails(server.endpoint)


# as a command


@pytest.fixture
def worker() -> Iterator[Peer]:
    device = FakeDevice()
    with serving(ExtChannel, [device]) as (peer, made):
        peer.lane, peer.device = made[0], device
        yield peer
        for outlet in made[0].peers._out.values():
            outlet.close()
            outlet._transport.close()


def open_peer(worker: Peer, asked: PeerTarget) -> int:
    return worker.ext(Ext.PEER_OPEN, tail=extension.encode_json(asked))


def test_it_is_answered_aside_with_the_round_trip(worker, serve):
    base = worker.alloc(1 << 16)
    hold(worker, worker.device, base)
    fence = worker.ext(Ext.FENCE)
    server = serve(steps(hello(), peer()))
    seq = open_peer(worker, target(server.endpoint))
    number, status, answered, body = worker.answer()
    assert (number, status, answered) == (Ext.PEER_OPEN, 0, seq)
    assert 0 < EXT[Ext.PEER_OPEN].reply.unpack(body)[0] < PATIENCE * 1e9
    worker.ext(Ext.PUSH, 3, 0, 8, base, 4)
    worker.device.gate.set()
    assert worker.answer()[2] == fence
    frame = codec.ext_frame(Ext.DATA, 0, 12) + (8).to_bytes(8, "little") + bytes(4)
    assert receive(server.peers[0].transport, len(frame)) == frame


def test_it_is_answered_aside_with_what_went_wrong(worker):
    port = closed_port()
    seq = open_peer(worker, target(port))
    number, status, answered, text = worker.answer()
    assert (number, status, answered) == (Ext.PEER_OPEN, Status.PEER_LOST, seq)
    assert text.decode() == f"cannot connect to {port}: connection refused"
    # and there is no such way
    worker.ext(Ext.PUSH, 3, 0, 8, 0, 0)
    assert worker.answer()[1] == Status.BAD_REQUEST


def test_a_second_way_of_the_same_number_is_closed_again(worker, serve):
    servers = [serve(steps(hello(), peer())) for _ in range(2)]
    open_peer(worker, target(servers[0].endpoint))
    assert worker.answer()[1] == 0
    open_peer(worker, target(servers[1].endpoint))
    assert worker.answer()[1:4:2] == (Status.REFUSED, b"no room for route 3")
    with pytest.raises(Exception, match="closed"):
        receive(servers[1].peers[0].transport, 1)


@pytest.mark.parametrize(
    "payload",
    [b"", b"{}", b"[" * 1000, b'{"route":0,"addresses":[],"key":"","device":0}', b"\xff" * 50],
)
def test_what_is_no_target_is_answered(worker, payload):
    seq = worker.ext(Ext.PEER_OPEN, tail=payload)
    assert worker.answer()[:3] == (Ext.PEER_OPEN, Status.BAD_REQUEST, seq)


def test_a_target_too_long_to_be_read_is_answered(worker):
    worker.ext(Ext.PEER_OPEN, tail=bytes(extension.MAX_QUESTION + 1))
    assert worker.answer()[1] == Status.BAD_REQUEST
    fence = worker.ext(Ext.FENCE)
    assert worker.answer()[2] == fence


def test_a_bound_on_those_that_are_being_opened(worker, serve, impatient):
    server = serve()
    count = ext_channel._MAX_OPENING + 1
    asked = [open_peer(worker, target(server.endpoint, route=n + 1)) for n in range(count)]
    answers = {seq: status for _, status, seq, _ in (worker.answer() for _ in asked)}
    assert sorted(answers) == asked
    assert answers.pop(asked[-1]) == Status.BUSY
    assert set(answers.values()) == {Status.PEER_LOST}
    # there is room again
    open_peer(worker, target(closed_port()))
    assert worker.answer()[1] == Status.PEER_LOST
