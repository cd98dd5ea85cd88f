"""Opening sessions with scripted servers over TCP: good ones, old ones, hostile and silent ones."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from caravan.errors import (
    AuthenticationError,
    ConnectError,
    ProtocolError,
    RemoteProtocolError,
    VersionMismatch,
    WorkerLost,
)
from caravan.stream.base_link import BaseLink
from caravan.stream.caller import Identity
from caravan.stream.dispatcher import Stream
from caravan.stream.ext_link import ExtLink
from caravan.stream.session import CLOSE_SECONDS, Session, open_session
from caravan.stream.watchdog import Watchdog
from caravan.transport.endpoint import Endpoint
from caravan.wire import codec, extension
from caravan.wire.extension import Asks, DeviceInfo, SessionReply
from caravan.wire.versions import V7, V8, Version
from servers import Script, Server, close, drain, hello, raw, steps
from stream.scripted import Peer, stream_threads
from trust.test_entry import TOKEN, prover
from wired import PATIENCE, Side, wait_until

OPS = ("NONE", "DUP", "ADD")
IDENTITY = Identity("0.1.0", "0.26.0", OPS)
DEVICES = [
    DeviceInfo("CPU", "a processor", 0, 1, 10, 20, 32, 1 << 30, False),
    DeviceInfo("CUDA0", "a graphics card", 1, 0, 10, 20, 128, 1 << 30, True),
]
KEY = "0123456789abcdef0123456789abcdef"
GOOD = SessionReply(
    KEY, "0.1.0", "0.26.0", list(OPS), DEVICES, "f" * 32, ["127.0.0.1:1"], ["cache"]
)
ALONE = replace(GOOD, devices=DEVICES[:1])


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    dog = Watchdog(PATIENCE)
    yield dog
    dog.close()


def open_to(server: Server, dog: Watchdog, timeout: float = PATIENCE, **kwargs) -> Session:
    name = "RPC{}".format
    return open_session(server.endpoint, IDENTITY, name, dog, timeout=timeout, **kwargs)


def fails(server: Server, dog: Watchdog, kind: type[Exception], text: str, **kwargs) -> None:
    """That it fails so, in one line, and that no thread or connection stays."""
    with pytest.raises(kind, match=text) as caught:
        open_to(server, dog, **kwargs)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    wait_until(lambda: not stream_threads())
    # what the head has said last is theirs to read
    server.finish()
    for peer in server.peers:
        Side(lambda peer=peer: drain(peer)).join()


# steps of good servers


def leaves(told: list[str]) -> Script:
    """The head says BYE and why."""

    def step(peer: Peer) -> None:
        peer.table = None
        told.append(peer.request("BYE").payload.decode())

    return step


def session(reply: SessionReply | bytes = GOOD, status: int = 0) -> Script:
    def step(peer: Peer) -> None:
        peer.table = None
        request = peer.request("SESSION")
        peer.asked = json.loads(request.payload)  # type: ignore[attr-defined]
        data = reply if isinstance(reply, bytes) else extension.encode_json(reply)
        peer.reply(request, data, status)

    return step


def base(*answers: bytes) -> Script:
    def step(peer: Peer) -> None:
        for answer in answers:
            peer.reply(peer.request(), answer)

    return step


def drip(peer: Peer) -> None:
    """One byte after the other, each well within the timeout."""
    peer.request("HELLO")
    for byte in codec.hello_reply(V8, extension.caps()):
        peer.raw(bytes([byte]))
        threading.Event().wait(0.05)


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def u64(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


GOOD_DEVICE = (u64(32), u64(2**64 - 1), u64(10, 20))


# what works


def test_every_device_on_a_connection_of_its_own(serve, watchdog):
    server = serve(*[steps(hello(), session())] * 2)
    opened = open_to(server, watchdog)
    assert [link.info for link in opened.links] == DEVICES
    assert all(isinstance(link, ExtLink) for link in opened.links)
    assert [link.index for link in opened.links] == [0, 1]
    assert [link.stream.device for link in opened.links] == ["RPC0", "RPC1"]
    assert opened.links[0].stream is not opened.links[1].stream
    assert opened.version == V8
    # the second connection joins what the first has opened
    common = {"caravan": "0.1.0", "engine": "0.26.0"}
    assert [peer.asked for peer in server.peers] == [
        {"session": "", "device": 0, **common},
        {"session": KEY, "device": 1, **common},
    ]
    for link, peer in zip(opened.links, server.peers, strict=True):
        side = Side(link.memory)
        peer.reply(peer.request("MEMORY"), u64(5, 6))
        assert side.join() == (5, 6)
    opened.close()
    for peer in server.peers:
        peer.request("BYE")
    opened.close()
    assert stream_threads() == []


def test_bytes_of_the_first_reply_that_came_with_the_handshake_are_kept(serve, watchdog):
    def eager(peer: Peer) -> None:
        hello()(peer)
        peer.table = None
        request = peer.request("SESSION")
        data = extension.encode_json(ALONE)
        pong = codec.ext_frame(75, 0, 0)
        peer.raw(codec.ext_frame(64, request.seq, len(data)) + data + pong)
        peer.reply(peer.request("MEMORY"), u64(5, 6))

    opened = open_to(serve(eager), watchdog)
    assert opened.links[0].memory() == (5, 6)
    opened.close()


@pytest.mark.parametrize("version", [V7, V8])
def test_all_devices_of_a_base_server_on_one_connection(serve, watchdog, version):
    server = serve(steps(hello(version, bytes(24)), base(u32(2), *GOOD_DEVICE, *GOOD_DEVICE)))
    opened = open_to(server, watchdog)
    assert all(isinstance(link, BaseLink) for link in opened.links)
    assert [link.index for link in opened.links] == [0, 1]
    assert opened.links[0].stream is opened.links[1].stream
    assert opened.version == version
    info = opened.links[1].info
    assert (info.alignment, info.max_size) == (32, 2**64 - 1)
    assert (info.memory_free, info.memory_total) == (10, 20)
    assert info.pads
    opened.close()
    opened.close()
    assert len(server.peers) == 1


@pytest.mark.parametrize("caps", [bytes(24), b"\x01\x02\x03\x04" + bytes(20)])
def test_other_capabilities_mean_the_base_protocol(serve, watchdog, caps):
    server = serve(steps(hello(V8, caps), base(u32(1), *GOOD_DEVICE)))
    opened = open_to(server, watchdog)
    assert not opened.links[0].extension
    opened.close()


def test_the_extension_can_be_left_out(serve, watchdog):
    def check(peer: Peer) -> None:
        assert peer.request("HELLO").payload == bytes(24)
        peer.raw(codec.hello_reply(V8, extension.caps()))
        base(u32(1), *GOOD_DEVICE)(peer)

    opened = open_to(serve(check), watchdog, use_extension=False)
    assert not opened.links[0].extension
    opened.close()


def test_a_worker_that_dies_later(serve, watchdog):
    server = serve(steps(hello(), session(ALONE)))
    opened = open_to(server, watchdog)
    side = Side(opened.links[0].memory)
    server.peers[0].request("MEMORY")
    server.peers[0].close()
    with pytest.raises(WorkerLost) as caught:
        side.join()
    assert (caught.value.endpoint, caught.value.device) == (str(server.endpoint), "RPC0")
    assert caught.value.command == "MEMORY"
    opened.close()


def test_who_speaks_the_extension_is_watched_also_while_it_owes_nothing(serve):
    dog = Watchdog(0.5)
    server = serve(steps(hello(), session(ALONE)))
    opened = open_to(server, dog, timeout=0.5)
    assert server.peers[0].request("PING").seq == 0
    wait_until(lambda: opened.links[0].stream.lost is not None)
    assert "no sign of life for 0.5 s" in str(opened.links[0].stream.lost)
    opened.close()
    dog.close()


def test_a_worker_says_for_how_long_it_waits_for_a_word(serve, watchdog):
    server = serve(*[steps(hello(), session(replace(GOOD, idle_ms=1500)))] * 2)
    opened = open_to(server, watchdog)
    assert [link.stream.allowance for link in opened.links] == [1.5, 1.5]
    opened.close()


# what does not


def test_nobody_listens(watchdog):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        endpoint = Endpoint("127.0.0.1", gone.getsockname()[1])
    with pytest.raises(ConnectError, match="refused"):
        open_session(endpoint, IDENTITY, str, watchdog)


GARBAGE = {
    "http": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    "ssh": b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
    "zeros": bytes(100),
    "ones": b"\xff" * 100,
    "an error of another length": (29).to_bytes(8, "little") + bytes(29),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_server_of_another_kind(serve, watchdog, name):
    server = serve(raw(GARBAGE[name]))
    fails(server, watchdog, RemoteProtocolError, "answers, but is no RPC worker")


@pytest.mark.parametrize("version", [Version(6, 0, 0), Version(7, 1, 0), Version(9, 0, 0)])
def test_a_version_that_does_not_go_together(serve, watchdog, version):
    told = []
    age = "an older" if version.major < 7 else "a newer"
    text = rf"speaks RPC protocol {version} \({age} llama.cpp\); this head speaks"
    fails(serve(steps(hello(version), leaves(told))), watchdog, VersionMismatch, text)
    wait_until(lambda: told)
    assert re.search(text, told[0])


def test_a_version_that_does_not_go_together_without_the_extension(serve, watchdog):
    server = serve(hello(Version(6, 0, 0), bytes(24)))
    fails(server, watchdog, VersionMismatch, "speaks RPC protocol 6.0.0")


@pytest.mark.parametrize(
    ("ops", "text"),
    [
        (["NONE", "ADD", "DUP"], "calls op 1 ADD, this head's .* calls it DUP: use the same"),
        (["NONE", "DUP"], "has 2 ops, this head's .* has 3: use the same"),
        (["NONE", "DUP", "ADD", "SUB"], "has 4 ops, this head's .* has 3: use the same"),
    ],
)
def test_an_engine_with_other_ops(serve, watchdog, ops, text):
    told = []
    server = serve(steps(hello(), session(replace(GOOD, ops=ops)), leaves(told)))
    fails(server, watchdog, ProtocolError, text)
    # the worker hears why, too
    wait_until(lambda: told)
    assert re.search(text, told[0])


@pytest.mark.parametrize("count", [0, 17])
def test_too_few_or_too_many_devices(serve, watchdog, count):
    reply = replace(GOOD, devices=DEVICES[:1] * count)
    fails(serve(steps(hello(), session(reply))), watchdog, RemoteProtocolError, f"{count} devices")


@pytest.mark.parametrize("count", [0, 17, 2**32 - 1])
def test_too_few_or_too_many_base_devices(serve, watchdog, count):
    server = serve(steps(hello(V8, bytes(24)), base(u32(count))))
    fails(server, watchdog, RemoteProtocolError, f"offers {count} devices")


@pytest.mark.parametrize(("alignment", "size"), [(0, 1), (33, 1), (1 << 40, 1), (32, 0)])
def test_a_base_device_that_makes_no_sense(serve, watchdog, alignment, size):
    server = serve(steps(hello(V8, bytes(24)), base(u32(1), u64(alignment), u64(size), u64(1, 2))))
    fails(server, watchdog, RemoteProtocolError, f"alignment {alignment}")


def test_a_base_server_that_answers_nonsense(serve, watchdog):
    server = serve(steps(hello(V8, bytes(24)), base(b"12345")))
    fails(server, watchdog, RemoteProtocolError, "DEVICE_COUNT has 5 bytes, expected 4")


def test_a_session_that_is_refused(serve, watchdog):
    server = serve(steps(hello(), session(b"no such\ndevice", status=6)))
    fails(server, watchdog, ConnectError, "refused a session: no such device")


def test_a_join_that_is_refused(serve, watchdog):
    server = serve(steps(hello(), session()), steps(hello(), session(b"unknown key", status=6)))
    fails(server, watchdog, ConnectError, "refused a session: unknown key")


def test_a_join_with_another_version(serve, watchdog):
    server = serve(steps(hello(), session()), hello(Version(9, 0, 0)))
    fails(server, watchdog, VersionMismatch, "9.0.0")


BAD_JSON = {
    "not json": b"hello",
    "empty": b"",
    "deep": b"[" * 50_000,
    "no devices": json.dumps({**asdict(GOOD), "devices": 5}).encode(),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_a_session_reply_that_means_nothing(serve, watchdog, name):
    server = serve(steps(hello(), session(BAD_JSON[name])))
    fails(server, watchdog, RemoteProtocolError, "SESSION")


@pytest.mark.parametrize(
    "frame", [codec.ext_frame(69, 1, 0), codec.ext_frame(64, 1, 1 << 50), b"\xff" * 16]
)
def test_something_else_than_a_session_reply(serve, watchdog, frame):
    server = serve(steps(hello(), lambda peer: peer.reader.read(16), raw(frame)))
    fails(server, watchdog, RemoteProtocolError, "answered SESSION with something else")


CUT = {
    "at once": [close],
    "after the request": [lambda peer: peer.request("HELLO"), close],
    "inside of the reply": [raw(codec.hello_reply(V8, extension.caps())[:20]), close],
    "before the session": [hello(), close],
    "inside of the session": [hello(), raw(codec.ext_frame(64, 1, 100) + b"{"), close],
    "before the device count": [hello(V8, bytes(24)), close],
    "inside of the device count": [
        hello(V8, bytes(24)),
        lambda peer: peer.request("DEVICE_COUNT"),
        raw(u64(4) + b"\1"),
        close,
    ],
    "after the device count": [hello(V8, bytes(24)), base(u32(1)), close],
    "after the alignment": [hello(V8, bytes(24)), base(u32(1), u64(32)), close],
}


@pytest.mark.parametrize("name", CUT)
def test_a_server_that_closes(serve, watchdog, name):
    fails(serve(steps(*CUT[name])), watchdog, ConnectError, "127.0.0.1:")


@pytest.mark.parametrize(
    "second",
    [steps(close), steps(hello(), close), steps(hello(), raw(b"\x40\0"), close)],
    ids=["at once", "before the session", "inside of the session"],
)
def test_a_server_that_closes_the_second_connection(serve, watchdog, second):
    server = serve(steps(hello(), session()), second)
    fails(server, watchdog, ConnectError, "closed the connection")


def test_a_worker_that_asked_for_a_token_asks_every_connection_for_it(serve, watchdog):
    """Whoever answers the second one without is not the worker, and is told nothing."""
    told: list[str] = []
    caps = extension.caps(True, Asks.TOKEN)
    first = steps(hello(V8, caps), prover(), session())
    server = serve(first, steps(hello(), leaves(told)))
    fails(server, watchdog, AuthenticationError, "asked for a token before", token=TOKEN)
    assert KEY not in "".join(told)


SILENT = {
    "at once": [],
    "inside of the reply": [raw(codec.hello_reply(V8, extension.caps())[:20])],
    "dripping": [drip],
    "before the session": [hello()],
    "inside of the session": [hello(), raw(codec.ext_frame(64, 1, 100) + b"{")],
    "before the device count": [hello(V8, bytes(24))],
    "after the device count": [hello(V8, bytes(24)), base(u32(1))],
}


@pytest.mark.parametrize("name", SILENT)
def test_a_server_that_falls_silent(serve, name):
    dog = Watchdog(0.3)
    server = serve(steps(*SILENT[name]))
    fails(server, dog, ConnectError, "127.0.0.1:", timeout=0.3)
    dog.close()


def test_a_server_that_never_answers_the_second_connection(serve, watchdog):
    server = serve(steps(hello(), session()))
    fails(server, watchdog, ConnectError, "did not answer within 1 s", timeout=1.0)


def test_repr(serve, watchdog):
    server = serve(steps(hello(V7, bytes(24)), base(u32(1), *GOOD_DEVICE)))
    opened = open_to(server, watchdog)
    assert repr(opened) == f"<Session at {server.endpoint}, protocol 7.0.0, 1 devices>"
    opened.close()


class _Frozen:
    """A stream whose peer takes nothing any more: closing takes all the time that it is given."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock

    def close(self, *, timeout: float) -> None:
        self._clock[0] += timeout


def test_no_thread_is_to_be_had_for_the_last_connection(serve, watchdog, monkeypatch):
    """Then those that are there already end, and nothing stays open."""

    class Starved(Stream):
        def __init__(self, *args: Any) -> None:
            if "RPC1" in args:
                raise RuntimeError("can't start new thread")
            super().__init__(*args)

    monkeypatch.setattr("caravan.stream.session.Stream", Starved)
    server = serve(*[steps(hello(), session())] * 2)
    fails(server, watchdog, RuntimeError, "can't start new thread")


class _FrozenLink:
    def __init__(self, clock: list[float]) -> None:
        self.stream = _Frozen(clock)

    def bye(self) -> None:
        pass


def test_frozen_streams_share_one_bound_when_a_session_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr("caravan.stream.session.time.monotonic", lambda: clock[0])
    links: list[Any] = [_FrozenLink(clock), _FrozenLink(clock)]
    Session(Endpoint("127.0.0.1", 1), links, V8).close()
    assert clock[0] == 100.0 + CLOSE_SECONDS
