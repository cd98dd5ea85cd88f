"""The worker's side of the door: in which order what has to be said, and who may not come in."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from caravan.errors import CaravanError, ConnectionClosed, RemoteProtocolError
from caravan.trust.token import Token
from caravan.wire import codec, extension
from caravan.wire.commands import Base, Ext
from caravan.wire.extension import FRAME, Asks, PeerRequest, SessionRequest, Status
from caravan.wire.proof import Challenge, Claim
from caravan.worker.handshake import Greeting, Terms, WrongToken, greet, refuse_proof
from wired import PATIENCE, Side

TOKEN = Token("a token of 24 characters")
ASKING = Terms(timeout=PATIENCE, token=TOKEN)
REQUEST = SessionRequest("", 0, "0.1.0", "0.26.0")
SESSION = extension.encode_json(REQUEST)
PEER = extension.encode_json(PeerRequest(1, "f" * 32, 0))


class Client:
    """The client's end of a socket pair whose other end is greeted."""

    def __init__(self, terms: Terms, address: str) -> None:
        self.sock, self.theirs = socket.socketpair()
        self.sock.settimeout(PATIENCE)
        self.greeting = Side(lambda: greet(self.theirs, terms, address))
        self.seq = 0

    def hello(self, caps: bytes | None = None) -> Asks:
        self.sock.sendall(codec.hello_request(extension.caps() if caps is None else caps))
        (length,) = codec.BASE_REPLY.unpack(self.read(codec.BASE_REPLY.size))
        _, caps = codec.decode_hello_reply(self.read(length))
        return extension.asked(caps)

    def send(self, number: int, payload: bytes = b"") -> None:
        self.seq += 1
        self.sock.sendall(codec.ext_frame(number, self.seq, len(payload)) + payload)

    def answer(self) -> tuple[int, int, bytes]:
        number, status, _flags, seq, length = FRAME.unpack(self.read(FRAME.size))
        assert seq == self.seq
        return number, status, self.read(length)

    def ask(self, number: int, payload: bytes) -> bytes:
        self.send(number, payload)
        answered, status, data = self.answer()
        assert (answered, status) == (number, 0), data
        return data

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.sock.recv(size - len(data))
            assert part, "the worker has closed the connection"
            data += part
        return data

    def prove(self, key: bytes = TOKEN.key) -> bytes:
        """AUTH, and PROVE without waiting for the answer; the MAC."""
        claim = Claim(key)
        mac = claim.prove(self.ask(Ext.AUTH, claim.nonce))
        self.send(Ext.PROVE, mac)
        return mac

    def refused(self, kind: type[CaravanError] = RemoteProtocolError) -> str:
        """Why the greeting has ended, without a byte more than was read already."""
        with pytest.raises(kind) as caught:
            self.greeting.join()
        assert type(caught.value) is kind
        return str(caught.value)

    def close(self) -> None:
        self.sock.close()
        self.theirs.close()


@pytest.fixture
def come() -> Iterator:
    clients: list[Client] = []

    def start(terms: Terms = ASKING, address: str = "10.0.0.5") -> Client:
        clients.append(Client(terms, address))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


# who knows the token


@pytest.mark.parametrize(("number", "payload"), [(Ext.SESSION, SESSION), (Ext.PEER, PEER)])
def test_who_proves_it_comes_in(come, number, payload):
    client = come()
    assert client.hello() == Asks.TOKEN
    client.prove()
    assert client.answer()[:2] == (Ext.PROVE, 0)
    client.send(number, payload)
    greeting = client.greeting.join()
    assert isinstance(greeting, Greeting)
    assert greeting.seq == 3
    assert greeting.request is not None


def test_nothing_is_read_beyond_the_first_frame(come):
    client = come()
    client.hello()
    client.prove()
    client.answer()
    client.send(Ext.SESSION, SESSION)
    client.sock.sendall(b"what comes next")
    client.greeting.join()
    assert client.theirs.recv(100) == b"what comes next"


def test_a_worker_without_a_token_asks_for_nothing(come):
    client = come(Terms(timeout=PATIENCE))
    assert client.hello() == Asks.NOTHING
    client.send(Ext.SESSION, SESSION)
    assert client.greeting.join() == Greeting(REQUEST, 1)


def test_it_is_asked_for_on_this_machine_too(come):
    for address in ("127.0.0.1", ""):
        assert come(ASKING, address).hello() == Asks.TOKEN


# who does not


@pytest.mark.parametrize("key", [b"another token of mine", TOKEN.key[:-1], TOKEN.key + b"\n"])
def test_a_wrong_token(come, key):
    client = come()
    client.hello()
    client.prove(key)
    with pytest.raises(WrongToken) as caught:
        client.greeting.join()
    assert caught.value.seq == 2
    refuse_proof(client.theirs, caught.value)
    assert client.answer() == (Ext.PROVE, Status.REFUSED, b"wrong token")


def test_what_was_shown_once_is_of_no_use_later(come):
    first = come()
    first.hello()
    claim = Claim(TOKEN.key)
    mac = claim.prove(first.ask(Ext.AUTH, claim.nonce))
    first.ask(Ext.PROVE, mac)
    again = come()
    again.hello()
    again.ask(Ext.AUTH, claim.nonce)
    again.send(Ext.PROVE, mac)
    assert again.refused(WrongToken) == "it does not know the token"


def test_what_the_worker_shows_is_no_proof_of_a_client(come):
    """Somebody asks one connection to get the answer for another one."""
    client = come()
    client.hello()
    nonce = client.ask(Ext.AUTH, bytes(32))
    # the worker would have to say this of itself, to a client that has proved it
    challenge = Challenge(TOKEN.key, bytes(32))
    challenge.nonce = nonce
    mac = challenge.answer(Claim.prove(_with_nonce(Claim(TOKEN.key), bytes(32)), nonce))
    assert mac is not None
    client.send(Ext.PROVE, mac)
    client.refused(WrongToken)


def _with_nonce(claim: Claim, nonce: bytes) -> Claim:
    claim.nonce = nonce
    return claim


@pytest.mark.parametrize(
    ("number", "payload"), [(Ext.SESSION, SESSION), (Ext.PEER, PEER)], ids=["SESSION", "PEER"]
)
@pytest.mark.parametrize("after_auth", [False, True])
def test_who_says_what_he_wants_first_is_told(come, number, payload, after_auth):
    client = come()
    client.hello()
    if after_auth:
        client.ask(Ext.AUTH, bytes(32))
    client.send(number, payload)
    assert client.answer() == (number, Status.REFUSED, b"this worker wants a token")
    assert client.refused() == f"it sent {Ext(number).name} without showing a token"


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([(Ext.PROVE, bytes(32))], "it sent PROVE without showing a token"),
        ([(Ext.AUTH, bytes(32)), (Ext.AUTH, bytes(32))], "it sent AUTH without showing a token"),
        ([(Ext.TLS, b"{}")], "it sent TLS without showing a token"),
        ([(Ext.PING, b"")], "it sent PING without showing a token"),
        ([(Ext.BYE, b"secrets")], "it left without showing that it knows the token"),
        ([(Ext.AUTH, bytes(31))], "AUTH cannot have 31 bytes"),
        ([(Ext.AUTH, bytes(33))], "AUTH cannot have 33 bytes"),
        ([(Ext.AUTH, b"")], "AUTH cannot have 0 bytes"),
        ([(Ext.AUTH, bytes(32)), (Ext.PROVE, bytes(31))], "PROVE cannot have 31 bytes"),
        ([(200, b"")], "unknown command 200"),
    ],
)
def test_what_is_out_of_order_ends_it(come, frames, why):
    client = come()
    client.hello()
    for number, payload in frames:
        client.send(number, payload)
    assert client.refused() == why


def test_a_proof_after_the_proof_ends_it(come):
    client = come()
    client.hello()
    client.prove()
    client.answer()
    client.send(Ext.AUTH, bytes(32))
    assert client.refused() == "the first frame is AUTH, not SESSION or PEER"


@pytest.mark.parametrize("number", [Ext.SESSION, Ext.PEER])
def test_a_first_frame_is_bounded(come, number):
    for terms in (ASKING, Terms(timeout=PATIENCE)):
        client = come(terms)
        client.hello()
        if terms.token:
            client.prove()
            client.answer()
        client.sock.sendall(codec.ext_frame(number, 9, extension.MAX_QUESTION + 1))
        assert client.refused() == f"{number.name} of 16385 bytes"
    # and so is what is read of one that comes too early
    client = come()
    client.hello()
    client.sock.sendall(codec.ext_frame(number, 9, extension.MAX_QUESTION + 1))
    client.refused()


@pytest.mark.parametrize("cut", [0, 1, 9, 20, 33, 40, 64, 80, 81, 100, 127])
def test_who_leaves_on_the_way_is_gone(come, cut):
    claim = Claim(TOKEN.key)
    client = come()
    said = codec.hello_request(extension.caps())
    said += codec.ext_frame(Ext.AUTH, 1, 32) + claim.nonce
    said += codec.ext_frame(Ext.PROVE, 2, 32) + bytes(32)
    client.sock.sendall(said[:cut])
    client.sock.shutdown(socket.SHUT_WR)
    client.refused(ConnectionClosed)


def test_silence_ends_it(come):
    client = come(Terms(timeout=0.05, token=TOKEN))
    client.hello()
    with pytest.raises(CaravanError, match="silent for too long"):
        client.greeting.join()


# clients of the base protocol


HERE = ("", "127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1")
ELSEWHERE = (
    "10.0.0.5",
    "192.168.0.3",
    "0.0.0.0",
    "::",
    "::2",
    "fe80::1",
    "fe80::1%eth0",
    "2001:db8::1",
    "::ffff:10.0.0.5",
    "::127.0.0.1",
    "128.0.0.1",
    "127.example.org",
    "localhost.example.org",
    "1270.0.0.1",
)


@pytest.mark.parametrize("address", HERE)
@pytest.mark.parametrize("token", [TOKEN, None])
def test_llama_cpps_programs_come_from_this_machine(address, token):
    assert Terms(token=token).welcomes_base(address)


@pytest.mark.parametrize("address", ELSEWHERE)
@pytest.mark.parametrize("token", [TOKEN, None])
def test_and_from_elsewhere_if_they_may(address, token):
    assert not Terms(token=token).welcomes_base(address)
    assert Terms(token=token, allow_base=True).welcomes_base(address)


@pytest.mark.parametrize("caps", [bytes(24), extension.caps()[:11] + b"x" * 13])
def test_one_from_elsewhere_hears_nothing(come, caps):
    client = come()
    client.sock.sendall(codec.hello_request(caps))
    why = client.refused()
    assert why.startswith("llama.cpp's programs cannot show a token")
    assert why.endswith("--allow-llama-cpp")
    client.theirs.close()
    assert client.sock.recv(100) == b""


@pytest.mark.parametrize(
    ("terms", "address"),
    [
        (ASKING, "127.0.0.1"),
        (ASKING, ""),
        (Terms(timeout=PATIENCE, token=TOKEN, allow_base=True), "10.0.0.5"),
    ],
)
def test_one_that_may_is_asked_for_nothing(come, terms, address):
    client = come(terms, address)
    assert client.hello(bytes(24)) == Asks.NOTHING
    client.sock.sendall(codec.base_request(Base.DEVICE_COUNT, 0))
    assert client.greeting.join() == Greeting()


def test_without_the_extension_nobody_gets_round_the_token(come):
    """A worker that does not offer it is spoken to in the base protocol alone."""
    client = come(Terms(timeout=PATIENCE, token=TOKEN, extension=False))
    client.sock.sendall(codec.hello_request(extension.caps()))
    assert client.refused().startswith("llama.cpp's programs")
