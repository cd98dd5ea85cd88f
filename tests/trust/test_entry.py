"""A client at the door of a worker: what it shows, what it believes, what it makes of the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from caravan.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionClosed,
    RemoteError,
    RemoteProtocolError,
    VersionMismatch,
)
from caravan.transport.tcp import connect
from caravan.trust.entry import Entry
from caravan.trust.token import Token
from caravan.wire import codec, extension
from caravan.wire.commands import Ext
from caravan.wire.extension import Asks, Status
from caravan.wire.proof import Challenge
from caravan.wire.versions import V8
from servers import Script, Server, close, hello, raw, steps
from stream.scripted import Peer
from wired import PATIENCE

TOKEN = Token("a token of 24 characters")
ASKING = extension.caps(True, Asks.TOKEN)


def prover(key: bytes = TOKEN.key, change: Callable[[bytes], bytes] = bytes) -> Script:
    """A worker's AUTH and PROVE; `change` is done to its MAC."""

    def step(peer: Peer) -> None:
        peer.table = None
        asked = peer.request("AUTH")
        challenge = Challenge(key, bytes(asked.payload))
        peer.reply(asked, challenge.nonce)
        shown = peer.request("PROVE")
        mac = challenge.answer(bytes(shown.payload))
        if mac is None:
            peer.reply(shown, b"wrong token", Status.REFUSED)
        else:
            peer.reply(shown, change(mac))

    return step


@pytest.fixture
def enter(serve):
    """Come to a worker that does these, with this token."""
    entries: list[Entry] = []

    def go(script: Script, token: Token | None = TOKEN) -> Entry:
        server: Server = serve(script)
        entry = Entry(connect(server.endpoint, PATIENCE), server.endpoint)
        entries.append(entry)
        entry.transport.set_timeout(PATIENCE)
        entry.hello()
        entry.satisfy(token)
        return entry

    yield go
    for entry in entries:
        entry.transport.close()


def test_nothing_is_shown_to_who_asks_for_nothing(enter):
    for token in (TOKEN, None):
        entry = enter(steps(hello(), raw(codec.ext_frame(Ext.SESSION, 1, 0))), token)
        assert entry.asks == Asks.NOTHING
        assert entry.extension
        # the next is what the caller says
        assert entry.ask(Ext.SESSION, b"{}") == b""


def test_both_ends_know_the_token(enter):
    entry = enter(steps(hello(V8, ASKING), prover()))
    assert entry.asks == Asks.TOKEN


def test_what_comes_later_counts_on(enter):
    def session(peer: Peer) -> None:
        request = peer.request("SESSION")
        assert request.seq == 3
        peer.reply(request, b"{}")

    entry = enter(steps(hello(V8, ASKING), prover(), session))
    assert entry.ask(Ext.SESSION, b"{}") == b"{}"


def test_no_token(enter, serve):
    with pytest.raises(AuthenticationError, match=r"wants a token: set CARAVAN_TOKEN or --token-f"):
        enter(hello(V8, ASKING), None)


def test_a_token_that_is_refused(enter):
    with pytest.raises(
        AuthenticationError,
        match=r"^the worker at 127\S+ refused the token: its own is another one$",
    ):
        enter(steps(hello(V8, ASKING), prover(b"another token")))


def reflect(peer: Peer) -> None:
    """Send back what the client has shown."""
    peer.table = None
    for name in ("AUTH", "PROVE"):
        request = peer.request(name)
        peer.reply(request, bytes(request.payload))


@pytest.mark.parametrize(
    "script",
    [
        reflect,
        prover(change=lambda mac: mac[:-1] + bytes([mac[-1] ^ 1])),
        prover(change=lambda mac: bytes(32)),
    ],
    ids=["reflected", "one bit", "zeros"],
)
def test_a_worker_that_cannot_prove_it(enter, script):
    with pytest.raises(AuthenticationError, match="could not prove that it knows the token"):
        enter(steps(hello(V8, ASKING), script))


def answers(*parts: tuple[Ext, int, bytes]) -> Script:
    """These frames, each to a frame of the client's."""

    def step(peer: Peer) -> None:
        peer.table = None
        for number, status, payload in parts:
            request = peer.request(None)
            peer.raw(codec.ext_frame(number, request.seq, len(payload), status) + payload)

    return step


STRANGE: dict[str, tuple[Script, type[Exception], str]] = {
    "another command": (answers((Ext.SESSION, 0, bytes(32))), RemoteProtocolError, "AUTH with som"),
    "a short nonce": (answers((Ext.AUTH, 0, bytes(31))), RemoteProtocolError, "AUTH with 31 bytes"),
    "a long nonce": (answers((Ext.AUTH, 0, bytes(33))), RemoteProtocolError, "AUTH with 33 bytes"),
    "an endless nonce": (
        raw(codec.ext_frame(Ext.AUTH, 1, 1 << 40)),
        RemoteProtocolError,
        "AUTH with something else",
    ),
    "a short mac": (
        answers((Ext.AUTH, 0, bytes(32)), (Ext.PROVE, 0, b"")),
        RemoteProtocolError,
        "PROVE with 0 bytes",
    ),
    "busy": (answers((Ext.AUTH, Status.BUSY, b"later")), RemoteError, "later"),
    "hangs up": (close, ConnectionClosed, "closed"),
    "hangs up later": (
        steps(answers((Ext.AUTH, 0, bytes(32))), close),
        ConnectionClosed,
        "closed",
    ),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_no_answer_is_an_error(enter, name):
    script, kind, text = STRANGE[name]
    with pytest.raises(kind, match=text):
        enter(steps(hello(V8, ASKING), script))


def test_tls_is_not_here_yet(enter):
    with pytest.raises(ConnectError, match="asks for TLS"):
        enter(steps(hello(V8, extension.caps(True, Asks.TLS))))


def test_who_asks_for_more_is_newer(enter):
    with pytest.raises(VersionMismatch, match="asks for more than this version"):
        enter(hello(V8, ASKING[:14] + b"\x09" + bytes(9)))


def test_nothing_is_asked_for_in_the_base_protocol(serve):
    server = serve(hello(V8, ASKING))
    entry = Entry(connect(server.endpoint, PATIENCE), server.endpoint)
    entry.transport.set_timeout(PATIENCE)
    entry.hello(use_extension=False)
    assert (entry.extension, entry.asks) == (False, Asks.NOTHING)
    entry.transport.close()
