"""Real workers and copies between them: who gets in, what gets through, what breaks off."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from caravan.wire import codec, extension
from caravan.wire.commands import EXT, Ext
from caravan.wire.extension import FRAME, PeerRequest, PeerTarget, Status
from caravan.worker.local import Worker
from wired import wait_until
from worker.raw_client import Answer, ExtClient, Wire
from worker.test_worker_life import children, session_of


@pytest.fixture(scope="module")
def other_worker() -> Iterator[Worker]:
    with Worker("CPU:1") as running:
        yield running


@pytest.fixture
def source(worker) -> Iterator[ExtClient]:
    with ExtClient(worker.endpoint) as client:
        yield client


@pytest.fixture
def sink(other_worker) -> Iterator[ExtClient]:
    with ExtClient(other_worker.endpoint) as client:
        yield client


def open_way(source: ExtClient, sink: ExtClient, route: int = 1, **changes) -> Answer:
    """PEER_OPEN and its answer."""
    fields = {
        "route": route,
        "addresses": sink.session.peer_addresses,
        "key": sink.session.peer_key,
        "device": 0,
        **changes,
    }
    return source.call_raw(Ext.PEER_OPEN, extension.encode_json(PeerTarget(**fields)))


class Introduced(Wire):
    """A client that comes as a worker does."""

    def __init__(self, endpoint: str, request: PeerRequest | bytes) -> None:
        super().__init__(endpoint)
        _, caps = self.hello(extension.caps())
        assert extension.agreed(caps)
        payload = request if isinstance(request, bytes) else extension.encode_json(request)
        self.send(codec.ext_frame(Ext.PEER, 9, len(payload)), payload)

    def answer(self) -> Answer:
        number, status, _flags, seq, length = FRAME.unpack(self.read(FRAME.size))
        return Answer(number, status, seq, self.read(length))


def data(ticket: int, content: bytes) -> bytes:
    row = EXT[Ext.DATA]
    return codec.ext_frame(Ext.DATA, 0, 8 + len(content)) + row.request.pack(ticket) + content


def assert_lost(client: ExtClient, text: str) -> None:
    """The next answer is the error of a TAKE."""
    answer = client.answer_of()
    assert (answer.number, answer.status) == (Ext.TAKE, Status.PEER_LOST)
    assert text in extension.error_text(answer.body)


# what gets through


def test_bytes_go_from_worker_to_worker(source, sink):
    assert source.session.peer_key != sink.session.peer_key != sink.key
    opened = open_way(source, sink)
    assert opened.status == 0
    assert 0 < int.from_bytes(opened.body, "little") < 20e9
    size = 3 << 20
    (_, one), (_, two) = source.alloc(size), sink.alloc(size)
    content = np.random.default_rng(7).bytes(size)
    source.set(one, content)
    for ticket in range(10):
        source.post(Ext.PUSH, 1, 0, ticket, one + ticket, size - 10)
        sink.post(Ext.TAKE, 1, 0, ticket, two + 10 - ticket, size - 10)
        assert sink.get(two + 10 - ticket, size - 10) == content[ticket : ticket + size - 10]
    source.fence()


def test_both_directions_and_several_ways(source, sink):
    assert open_way(source, sink, 1).status == 0
    assert open_way(source, sink, 2).status == 0
    assert open_way(sink, source, 1).status == 0
    (_, one), (_, two) = source.alloc(64), sink.alloc(64)
    source.set(one, b"abcdefgh")
    # the second way is taken from first
    source.post(Ext.PUSH, 1, 0, 1, one, 4)
    source.post(Ext.PUSH, 2, 0, 1, one + 4, 4)
    sink.post(Ext.TAKE, 2, 0, 1, two, 4)
    sink.post(Ext.TAKE, 1, 0, 1, two + 4, 4)
    sink.post(Ext.PUSH, 1, 0, 1, two, 8)
    source.post(Ext.TAKE, 1, 0, 1, one + 8, 8)
    assert source.get(one, 16) == b"abcdefghefghabcd"


def test_a_way_into_ones_own_worker(source, worker):
    with ExtClient(worker.endpoint) as other:
        assert open_way(source, other).status == 0
        (_, one), (_, two) = source.alloc(64), other.alloc(64)
        source.set(one, b"data")
        source.post(Ext.PUSH, 1, 0, 1, one, 4)
        other.post(Ext.TAKE, 1, 0, 1, two, 4)
        assert other.get(two, 4) == b"data"


def test_over_a_unix_socket_with_a_relative_path(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with Worker("CPU:1", host="unix:w.sock") as near, ExtClient(near.endpoint) as sink:
        assert sink.session.peer_addresses == [f"unix:{tmp_path}/w.sock"]
        assert open_way(source, sink).status == 0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("10.1.2.3", "10.1.2.3:{port}"),
        ("10.1.2.3:77", "10.1.2.3:77"),
        ("[fd00::1]", "[fd00::1]:{port}"),
        ("unix:/some/where", "unix:/some/where"),
    ],
)
def test_the_address_that_peers_are_told(given, told):
    with Worker("CPU:1", options=("--peer-address", given)) as running:
        port = running.endpoint.rpartition(":")[2]
        with ExtClient(running.endpoint) as client:
            assert client.session.peer_addresses == [told.format(port=port)]


# who gets in


def test_only_its_own_key_opens_a_session(source, sink):
    for key in ("", "no such key", sink.key, source.session.peer_key, "f" * 32):
        answer = open_way(source, sink, key=key)
        assert answer.status == Status.PEER_LOST
        assert answer.body == f"{sink_endpoint(sink)}: no such session".encode()
    # and the other key opens no session to a head
    with ExtClient(sink_endpoint(sink), 1, sink.session.peer_key) as head:
        assert head.answer.status == Status.REFUSED
    sink.fence()
    assert open_way(source, sink).status == 0


def sink_endpoint(sink: ExtClient) -> str:
    return sink.session.peer_addresses[0]


def test_only_while_the_session_lives(source, other_worker):
    with ExtClient(other_worker.endpoint) as gone:
        gone.post(Ext.BYE)
        gone.assert_closed()
    wait_until(lambda: b"no such session" in open_way(source, gone).body)


def test_no_such_device(source, sink):
    answer = open_way(source, sink, device=1)
    assert answer.status == Status.PEER_LOST
    assert answer.body == f"{sink_endpoint(sink)}: this worker has no device 1".encode()


def test_a_route_number_is_used_once(source, sink, other_worker):
    assert open_way(source, sink, 5).status == 0
    with Introduced(other_worker.endpoint, PeerRequest(5, sink.session.peer_key, 0)) as again:
        answer = again.answer()
        assert (answer.number, answer.seq, answer.status) == (Ext.PEER, 9, Status.REFUSED)
        assert answer.body == b"no room for route 5"
        again.assert_closed()
    # the way that stands is none the worse
    (_, one), (_, two) = source.alloc(64), sink.alloc(64)
    source.set(one, b"data")
    source.post(Ext.PUSH, 5, 0, 1, one, 4)
    sink.post(Ext.TAKE, 5, 0, 1, two, 4)
    assert sink.get(two, 4) == b"data"


def test_a_worker_without_the_extension_has_no_ways(source):
    with Worker("CPU:1", options=("--no-extension",)) as plain:
        asked = PeerTarget(1, [plain.endpoint], "f" * 32, 0)
        answer = source.call_raw(Ext.PEER_OPEN, extension.encode_json(asked))
        assert answer.status == Status.PEER_LOST
        assert answer.body.decode() == f"{plain.endpoint} is no Caravan worker"


HOSTILE = {
    "nothing": b"",
    "no json": b"\xff\xfe{",
    "no object": b"[]",
    "a head's words": b'{"session":"","device":0,"caravan":"","engine":""}',
    "route 0": b'{"route":0,"key":"","device":0}',
    "a long route": b'{"route":4294967296,"key":"","device":0}',
    "a negative device": b'{"route":1,"key":"","device":-1}',
    "a key of no text": b'{"route":1,"key":["f"],"device":0}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_introductions_are_hung_up_on(sink, other_worker, name):
    with Introduced(other_worker.endpoint, HOSTILE[name]) as wire:
        wire.assert_closed()
    sink.fence()


@pytest.mark.parametrize("key", ["\\ud800", "\\u0000", "é" * 300])
def test_keys_of_strange_letters_are_refused(sink, other_worker, key):
    text = f'{{"route":1,"key":"{key}","device":0}}'.encode()
    with Introduced(other_worker.endpoint, text) as wire:
        assert wire.answer().status == Status.REFUSED
        wire.assert_closed()
    sink.fence()


def test_other_first_frames_are_hung_up_on(other_worker):
    for number, length in ((Ext.DATA, 8), (Ext.PUSH, 32), (Ext.PEER_OPEN, 2), (Ext.PEER, 1 << 30)):
        with Wire(other_worker.endpoint) as wire:
            wire.hello(extension.caps())
            wire.send(codec.ext_frame(number, 1, length), bytes(min(length, 32)))
            wire.assert_closed()


def test_a_silent_introduction_holds_up_nobody():
    with Worker("CPU:1", options=("--timeout", "1")) as running:
        wires = []
        for _ in range(5):
            wires.append(Wire(running.endpoint))
            wires[-1].hello(extension.caps())
            wires[-1].send(codec.ext_frame(Ext.PEER, 1, 100), b"{")
        with ExtClient(running.endpoint) as client:
            client.fence()
        for wire in wires:
            wire.assert_closed()
            wire.close()


# what breaks off


@contextlib.contextmanager
def introduced(sink: ExtClient, endpoint: str, route: int = 1) -> Iterator[Introduced]:
    with Introduced(endpoint, PeerRequest(route, sink.session.peer_key, 0)) as wire:
        answer = wire.answer()
        assert (answer.number, answer.status, answer.seq, answer.body) == (Ext.PEER, 0, 9, b"")
        yield wire


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (data(2, b"data"), "ticket 1 of 4 bytes is due"),
        (data(1, b"dat"), "ticket 1 of 4 bytes is due"),
        (b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n", "is due"),
        (data(1, b"data")[:-1], "closed"),
        (b"", "closed"),
    ],
)
def test_what_a_way_should_not_bring(sink, other_worker, sent, text):
    _, base = sink.alloc(64)
    with introduced(sink, other_worker.endpoint) as wire:
        sink.post(Ext.TAKE, 1, 0, 1, base, 4)
        wire.send(sent)
        wire.close()
        assert_lost(sink, text)
    sink.post(Ext.TAKE, 1, 0, 2, base, 4)
    assert_lost(sink, text)
    # the session lives, and other ways into it can be opened
    with introduced(sink, other_worker.endpoint, 2) as wire:
        sink.post(Ext.TAKE, 2, 0, 1, base, 4)
        wire.send(data(1, b"data"))
        assert sink.get(base, 4) == b"data"


def test_a_source_that_is_killed_in_the_middle_of_a_push(other_worker, sink):
    size = 32 << 20
    with Worker("CPU:1") as dying:
        spare = children(dying.pid)
        with ExtClient(dying.endpoint) as source:
            assert open_way(source, sink).status == 0
            (_, one), (_, two) = source.alloc(size), sink.alloc(size)
            # what nobody takes yet fills the connection
            source.post(Ext.PUSH, 1, 0, 1, one, size)
            source.fence()
            os.kill(session_of(dying, spare), signal.SIGKILL)
            source.assert_closed()
            sink.post(Ext.TAKE, 1, 0, 1, two, size)
            assert_lost(sink, "clos")
    sink.fence()


def test_a_sink_that_is_gone_is_no_error_of_the_source(source):
    with Worker("CPU:1") as dying, ExtClient(dying.endpoint) as sink:
        assert open_way(source, sink).status == 0
    _, base = source.alloc(1 << 20)
    for ticket in range(50):
        source.post(Ext.PUSH, 1, 0, ticket, base, 1 << 20)
    source.fence()


def test_a_session_that_ends_takes_its_ways_along(source, sink, worker):
    assert open_way(source, sink).status == 0
    assert open_way(sink, source).status == 0
    _, base = sink.alloc(64)
    sink.post(Ext.TAKE, 1, 0, 1, base, 4)
    source.post(Ext.BYE)
    source.assert_closed()
    assert_lost(sink, "closed")
