"""TLS between heads and workers and among workers: the engine's own numbers, and every refusal."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

import caravan
from caravan.errors import AuthenticationError, CaravanError, ConnectError, UsageError, WorkerLost
from caravan.llm import Context, ContextParams, Model, SamplingParams
from caravan.stream.routes import Path as Way
from caravan.transport.certificates import Tls, client_context, server_context
from caravan.transport.tcp import SocketTransport
from caravan.transport.tls import TlsTransport, secure
from caravan.wire import codec, extension
from caravan.wire.commands import HELLO_REPLY, Ext
from caravan.wire.extension import FRAME, Asks, SessionRequest, TlsRequest
from damaged_link import TO_HEAD, TO_WORKER, DamagedLink
from e2e.processes import (
    caravan as command,
)
from e2e.processes import (
    children,
    kill,
    peer,
    wait_for,
)
from held_link import HeldLink
from tls_ends import certificates
from wired import Side, receive

PARAMS = ContextParams(n_ctx=512, n_ubatch=32)
N_PROMPT = 100
TOKEN = "a token for tests, 32 letters long"
DAMAGED = "the link damaged what it carried, or somebody changed it"
# What the worker says of it may be lost with the connection, where the head is just sending.
NOTICED = {TO_HEAD: DAMAGED, TO_WORKER: f"{DAMAGED}|broken pipe|reset|closed by the other end"}


def options(tls: Tls) -> tuple[str, ...]:
    named = {"--tls-ca": tls.ca, "--tls-cert": tls.cert, "--tls-key": tls.key}
    return tuple(word for name, path in named.items() if path for word in (name, path))


def worker(
    name: str = "worker", *more: str, ca: bool = True, devices: str = "CPU:1"
) -> caravan.Worker:
    """One with the certificate of that name; with `ca` it wants one of heads, too."""
    return caravan.Worker(devices, options=(*options(certificates().tls(name, ca)), *more))


def head(name: str = "head") -> Tls:
    return certificates().tls(name, ca=True)


@pytest.fixture(scope="module")
def mutual() -> Iterator[caravan.Worker]:
    """A worker that wants certificates of heads."""
    with worker() as started:
        yield started


@pytest.fixture(scope="module")
def one_sided() -> Iterator[caravan.Worker]:
    """A worker that has a certificate and wants none, and gives little time."""
    with worker("worker", "--timeout", "1", ca=False) as started:
        yield started


@pytest.fixture(scope="module")
def plain() -> Iterator[caravan.Worker]:
    with caravan.Worker("CPU:1") as started:
        yield started


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def with_token(token_file) -> Iterator[caravan.Worker]:
    with worker("worker", "--token-file", token_file, ca=False) as started:
        yield started


def serves(started: caravan.Worker, **connection) -> None:
    """It takes a head, whatever was before; a spare that is starting is waited for."""
    with caravan.connect([started.endpoint], **connection) as cluster:
        assert cluster.devices
        for device in cluster.devices:
            device.link.memory()


# numbers


def same(devices, smollm2: Path, tokens: list[int], expected: np.ndarray) -> bool:
    with Model(smollm2, devices=devices) as model, Context(model, PARAMS) as context:
        context.decode(tokens[:40])
        return np.array_equal(context.logits(), expected)


@pytest.mark.parametrize("kind", ["certificates of both ends", "a token instead of a CA"])
def test_the_engines_own_numbers_with_direct_copies(kind, smollm2, tokens, expected, token_file):
    with ExitStack() as stack:
        if kind.startswith("cert"):
            started = [worker(devices=devices) for devices in ("CPU:1,CPU:1", "CPU:1")]
            connection = {"tls": head()}
        else:
            started = [worker("worker", "--token-file", token_file, ca=False) for _ in range(2)]
            connection = {"token": TOKEN}
        endpoints = [stack.enter_context(one).endpoint for one in started]
        cluster = stack.enter_context(caravan.connect(endpoints, **connection))
        for device in cluster.devices:
            assert isinstance(device.link.stream._transport, TlsTransport)
        assert same(cluster.devices, smollm2, tokens, expected)
        assert {route.path for route in cluster.routes().values()} == {Way.DIRECT}


def test_workers_that_do_not_trust_each_other_leave_copies_to_the_head(
    mutual, plain, smollm2, tokens, expected
):
    endpoints = [plain.endpoint, f"tls://{mutual.endpoint}"]
    with pytest.raises(ConnectError, match=r"does not speak TLS, which --tls-ca asks for"):
        caravan.connect(endpoints, tls=head())
    # the head's own CA would keep it from the plain one
    with (
        caravan.connect([plain.endpoint]) as one,
        caravan.connect([mutual.endpoint], tls=head(), taken=["RPC0"]) as two,
    ):
        devices = [*one.devices, *two.devices]
        assert same(devices, smollm2, tokens, expected)


def test_a_unix_socket_does_without(tmp_path):
    with worker_at(f"unix:{tmp_path}/socket") as started:
        assert started.endpoint.startswith("unix:")
        serves(started)
        serves(started, tls=head())


def worker_at(host: str) -> caravan.Worker:
    return caravan.Worker("CPU:1", host=host, options=options(certificates().tls("worker", True)))


# who is refused


def test_a_head_without_anything_at_a_worker_with_tls(mutual):
    with pytest.raises(ConnectError, match=r"asks for TLS, and nothing here tells .*--tls-ca"):
        caravan.connect([mutual.endpoint])
    serves(mutual, tls=head())


def test_a_head_that_has_never_heard_of_tls(mutual):
    """It goes on with SESSION, in the clear."""
    request = extension.encode_json(SessionRequest("", 0, "0", "0"))
    with clear(mutual) as wire:
        wire.send([codec.ext_frame(Ext.SESSION, 1, len(request)), request])
        number, status, _, _, length = FRAME.unpack(receive(wire, FRAME.size))
        assert (number, status) == (Ext.SESSION, extension.Status.REFUSED)
        assert receive(wire, length) == b"this worker wants TLS"
    serves(mutual, tls=head())


@pytest.mark.parametrize("asked", ["tls://", "--tls-ca"])
def test_a_head_that_wants_tls_at_a_worker_without(plain, asked):
    endpoint = f"tls://{plain.endpoint}" if asked == "tls://" else plain.endpoint
    tls = head() if asked == "--tls-ca" else None
    with pytest.raises(ConnectError, match="does not speak TLS, which"):
        caravan.connect([endpoint], tls=tls)
    serves(plain)


@pytest.mark.parametrize("wrong", [True, "ca.pem", {"ca": "ca.pem"}])
def test_what_is_no_tls_is_told(wrong):
    with pytest.raises(UsageError, match=rf"^tls is of type {type(wrong).__name__}: expected cara"):
        caravan.connect(["127.0.0.1:1"], tls=wrong)


def test_a_head_that_wants_tls_at_a_server_of_llama_cpp():
    answer = codec.hello_reply(codec_version(), bytes(extension.CAPS_SIZE))
    with peer(answer) as endpoint, pytest.raises(ConnectError, match="does not speak TLS"):
        caravan.connect([f"tls://{endpoint}"])


def codec_version():
    from caravan.wire.versions import V8

    return V8


def test_a_worker_of_another_ca(mutual):
    other = certificates(1)
    with pytest.raises(ConnectError, match="its certificate is not of the CA that is trusted here"):
        caravan.connect([mutual.endpoint], tls=other.tls("head", ca=True))
    serves(mutual, tls=head())


def test_a_head_of_another_ca(mutual):
    own, other = certificates(), certificates(1)
    foreign = Tls(own.path("ca"), other.path("head"), other.path("head-key"))
    with pytest.raises(ConnectError, match="does not know the CA of the certificate"):
        caravan.connect([mutual.endpoint], tls=foreign)
    serves(mutual, tls=head())


def test_a_head_without_a_certificate_at_a_worker_that_wants_one(mutual):
    with pytest.raises(ConnectError, match=r"opened no session .*wants to see .*--tls-cert"):
        caravan.connect([mutual.endpoint], tls=certificates().tls(ca=True))
    serves(mutual, tls=head())


def test_a_worker_whose_certificate_has_expired():
    with worker("expired", ca=False) as started:
        with pytest.raises(ConnectError, match="its certificate has expired"):
            caravan.connect([started.endpoint], tls=head())
        wait_for(lambda: any("has expired" in line for line in started.messages()))


def test_a_head_whose_certificate_has_expired(mutual):
    with pytest.raises(ConnectError, match="has expired"):
        caravan.connect([mutual.endpoint], tls=head("expired"))
    serves(mutual, tls=head())


def test_a_wrong_token_within_tls_goes_no_further_than_the_door(with_token):
    with pytest.raises(AuthenticationError, match="refused the token"):
        caravan.connect([with_token.endpoint], token="another token of the same kind", tls=head())
    serves(with_token, token=TOKEN)


# who does not do as it should


sources = itertools.count(1)


@contextmanager
def clear(started: caravan.Worker) -> Iterator[SocketTransport]:
    """A connection that has said HELLO, of a machine from which nobody came before: of any one the
    worker tells little."""
    host, _, port = started.endpoint.rpartition(":")
    source = (f"127.1.{next(sources)}.1", 0)
    sock = socket.create_connection((host, int(port)), source_address=source)
    wire = SocketTransport(sock, started.endpoint)
    try:
        wire.send([codec.hello_request(extension.caps())])
        receive(wire, codec.BASE_REPLY.size + HELLO_REPLY.size)
        yield wire
    finally:
        wire.close()


@contextmanager
def before_the_handshake(started: caravan.Worker) -> Iterator[SocketTransport]:
    """A connection on which TLS is next."""
    request = extension.encode_json(TlsRequest())
    with clear(started) as wire:
        wire.send([codec.ext_frame(Ext.TLS, 1, len(request)), request])
        assert receive(wire, FRAME.size) == codec.ext_frame(Ext.TLS, 1, 0)
        yield wire


def say_garbage(wire: SocketTransport) -> None:
    wire.send([b"GET / HTTP/1.1\r\n\r\n"])
    ended(wire)


def speak_tls_1_2(wire: SocketTransport) -> None:
    context = client_context(head())
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ConnectError, match=r"does not speak TLS 1\.3"):
        secure(wire, context, server=False, timeout=20)


def say_nothing(wire: SocketTransport) -> None:
    ended(wire)


def stop_in_the_middle(wire: SocketTransport) -> None:
    wire.send([b"\x16\x03\x01\x01\x00\x01"])
    ended(wire)


def leave_in_the_middle(wire: SocketTransport) -> None:
    wire.send([b"\x16\x03\x01\x01\x00\x01"])
    wire.close()


def come_for_another_session(wire: SocketTransport) -> None:
    transport = secure(wire, client_context(head()), server=False, timeout=20)
    request = extension.encode_json(SessionRequest("0" * 32, 0, "0", "0"))
    transport.send([codec.ext_frame(Ext.SESSION, 1, len(request)), request])
    _, status, _, _, length = FRAME.unpack(receive(transport, FRAME.size))
    assert status == extension.Status.REFUSED
    assert receive(transport, length) == b"no such session"


def say_nothing_within(wire: SocketTransport) -> None:
    ended(secure(wire, client_context(head()), server=False, timeout=20))


def ended(wire: SocketTransport | TlsTransport) -> None:
    with contextlib.suppress(CaravanError):
        while True:
            wire.recv_into(memoryview(bytearray(1000)))


STRANGERS: dict[str, tuple[Callable[[SocketTransport], None], str]] = {
    "garbage": (say_garbage, "what it sends is not TLS"),
    "TLS 1.2": (speak_tls_1_2, "it does not speak TLS 1.3"),
    "silence": (say_nothing, "no answer in time"),
    "half a ClientHello": (stop_in_the_middle, "no answer in time"),
    "gone": (leave_in_the_middle, "closed by the other end"),
    "another session": (come_for_another_session, "it came for another session"),
    "silence within": (say_nothing_within, "the client was silent for too long"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_who_does_not_get_in_costs_nothing(one_sided, name):
    """The process that it was given to serves the next one."""
    behave, words = STRANGERS[name]
    with caravan.connect([one_sided.endpoint], tls=head()):
        used = session_of(one_sided)
    wait_for(lambda: len(children(one_sided.pid)) == 1 and used not in children(one_sided.pid))
    spare = children(one_sided.pid)
    with before_the_handshake(one_sided) as wire:
        behave(wire)
    wait_for(lambda: any(words in line for line in list(one_sided.messages())[-2:]))
    # another one was started meanwhile, perhaps
    assert spare[0] in children(one_sided.pid)
    with caravan.connect([one_sided.endpoint], tls=head()):
        assert session_of(one_sided) == spare[0]


def session_of(started: caravan.Worker) -> int:
    """The process that serves a head: it has more connections than a spare."""
    return max(children(started.pid), key=sockets_of)


def sockets_of(pid: int) -> int:
    count = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            count += str(file.readlink()).startswith("socket:")
    return count


def test_a_process_that_is_killed_in_the_middle_of_a_record(mutual, smollm2):
    with (
        HeldLink(mutual.endpoint, 5_000_000) as link,
        caravan.connect([link.endpoint], tls=head()) as cluster,
    ):
        transport = cluster.devices[0].link.stream._transport
        # else all that is on its way at a time may fit into the system's buffers
        for end in (transport._socket._sock, *link._sockets):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        side = Side(lambda: Model(smollm2, devices=cluster.devices))
        wait_for(lambda: link.held and transport._left)
        kill(session_of(mutual))
        link.release()
        # the worker is asked why, by TLS too
        with pytest.raises(WorkerLost, match="SIGKILL"):
            side.join()
    serves(mutual, tls=head())


# damage


@pytest.mark.parametrize("way", [TO_WORKER, TO_HEAD], ids=["to the worker", "to the head"])
@pytest.mark.parametrize("phase", ["connect", "load", "prompt", "decode"])
def test_a_byte_that_changes_on_the_link(mutual, smollm2, tokens, expected, phase, way):
    with DamagedLink(mutual.endpoint) as link:
        if phase == "connect":
            # within the handshake, behind HELLO
            link.damage(way, 400)
            with pytest.raises(ConnectError, match=f"no TLS|{DAMAGED}"):
                caravan.connect([link.endpoint], tls=head())
            assert link.damaged == 1
        else:
            lose(link, phase, way, smollm2, tokens, expected)
    serves(mutual, tls=head())


def lose(link, phase: str, way: int, smollm2: Path, tokens: list[int], expected) -> None:
    with caravan.connect([link.endpoint], tls=head()) as cluster:
        if phase == "load":
            link.damage(way, 1_000_003 if way == TO_WORKER else 30)
            with pytest.raises(WorkerLost, match=NOTICED[way]):
                Model(smollm2, devices=cluster.devices)
        else:
            with (
                Model(smollm2, devices=cluster.devices) as model,
                Context(model, PARAMS) as context,
            ):
                context.decode(tokens[:40])
                assert np.array_equal(context.logits(), expected)
                link.damage(way, 30)
                with pytest.raises(WorkerLost, match=NOTICED[way]):
                    context.decode(tokens[40:] if phase == "prompt" else tokens[40:41])
                    context.logits()
    assert link.damaged == 1


@pytest.mark.parametrize("harm", ["a byte changes", "the process is killed"])
def test_a_text_goes_on_after_a_loss(mutual, smollm2, tokens, harm):
    def pieces(context: Context, **more) -> Iterator[str]:
        greedy = SamplingParams(temp=0)
        return caravan.generate(context, tokens, max_tokens=12, sampling=greedy, **more)

    with (
        DamagedLink(mutual.endpoint) as link,
        caravan.connect([link.endpoint], tls=head()) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        expected = [*pieces(context)]
        context.clear()
        running = pieces(context, resume=True)
        seen = [next(running) for _ in range(4)]
        if harm == "a byte changes":
            link.damage(TO_HEAD, 30)
        else:
            kill(session_of(mutual))
        assert [*seen, *running] == expected
        assert link.damaged == (harm == "a byte changes")


# in the middle


class Middleman:
    """Between head and worker, with a certificate of its own.

    Args:
        strip: take the wish for TLS out of the worker's HELLO; else it waits for TLS, and speaks it
            with both.
    """

    def __init__(self, target: str, strip: bool) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._strip = strip
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()

    def _run(self) -> None:
        try:
            near = SocketTransport(self._server.accept()[0], "head")
        except OSError:
            return
        far = SocketTransport(socket.create_connection(self._target), "worker")
        with contextlib.suppress(CaravanError):
            self._stand_between(near, far)
        near.close()
        far.close()

    def _stand_between(self, near: SocketTransport, far: SocketTransport) -> None:
        # the worker's answers to HELLO, AUTH, PROVE and TLS have these sizes
        hello = codec.BASE_REPLY.size + HELLO_REPLY.size
        for number, size in enumerate((hello, FRAME.size + 32, FRAME.size + 32, FRAME.size)):
            pass_on(near, far)
            if number and self._strip:
                pass_on(far, near)
                continue
            answer = receive(far, size)
            if self._strip:
                caps = extension.caps(True, Asks.TOKEN | Asks.TLS)
                assert caps in answer
                answer = answer.replace(caps, extension.caps(True, Asks.TOKEN))
            near.send([answer])
        own = certificates(1).tls("worker")
        one = secure(near, server_context(own), server=True, timeout=20)
        two = secure(far, client_context(Tls()), server=False, timeout=20)
        while True:
            pass_on(one, two)
            pass_on(two, one)


def pass_on(source: SocketTransport | TlsTransport, sink: SocketTransport | TlsTransport) -> None:
    buffer = memoryview(bytearray(4096))
    sink.send([buffer[: source.recv_into(buffer)]])


@pytest.mark.parametrize("strip", [False, True], ids=["certificate of its own", "no TLS at all"])
def test_nobody_sits_in_the_middle_of_a_head_with_a_token(with_token, strip):
    middleman = Middleman(with_token.endpoint, strip)
    try:
        with pytest.raises(AuthenticationError) as caught:
            caravan.connect([middleman.endpoint], token=TOKEN)
        assert strip or "somebody sits in the middle" in str(caught.value)
    finally:
        middleman.close()
    serves(with_token, token=TOKEN)


# the command line


def test_the_options_and_the_environment_of_heads(mutual, monkeypatch):
    given = options(head())
    done = command("devices", "--rpc", mutual.endpoint, *given, "--json")
    assert done.returncode == 0, done.stderr
    for name, path in zip(("CA", "CERT", "KEY"), given[1::2], strict=True):
        monkeypatch.setenv(f"CARAVAN_TLS_{name}", path)
    done = command("devices", "--rpc", f"tls://{mutual.endpoint}", "--json")
    assert done.returncode == 0, done.stderr
    # workers that are started here do without
    done = command("devices", "--local-workers", "1", "--json")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--tls-cert", "worker.pem"), "--tls-cert without --tls-key"),
        (("--tls-ca", "ca.pem"), "a worker needs a certificate for TLS"),
        (("--tls-cert", "none.pem", "--tls-key", "worker-key.pem"), "none.pem: no such file"),
        (("--tls-cert", "worker.pem", "--tls-key", "head-key.pem"), "not that of the certificate"),
        (("--tls-cert", "ca-key.pem", "--tls-key", "worker-key.pem"), "not in PEM form"),
    ],
)
def test_a_worker_with_wrong_files_does_not_start(words, told):
    place = certificates().directory
    paths = [str(place / word) if word.endswith(".pem") else word for word in words]
    done = command("worker", "-p", "0", *paths)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert told in done.stderr


@pytest.mark.parametrize("name", ["run", "bench", "devices"])
def test_a_head_with_wrong_files_does_not_begin(name, tmp_path):
    model = ("-m", str(tmp_path / "none.gguf")) if name != "devices" else ()
    prompt = ("-p", "x") if name == "run" else ()
    done = command(name, *model, *prompt, "--tls-ca", str(tmp_path / "none.pem"))
    assert done.returncode == 2
    assert "none.pem: no such file" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_who_has_a_certificate_needs_no_token_on_a_network():
    """Where other machines can connect something has to keep strangers out."""
    with worker_at("0.0.0.0") as started:
        port = started.endpoint.rpartition(":")[2]
        with caravan.connect([f"tls://127.0.0.1:{port}"], tls=head()) as cluster:
            assert cluster.devices
    done = command("worker", "-H", "0.0.0.0", "-p", "0", *options(certificates().tls("worker")))
    assert done.returncode == 2
    assert "--token-file" in done.stderr
