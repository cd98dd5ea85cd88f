"""Which version of the protocol a worker announces, and what a client of another one does."""

from __future__ import annotations

import contextlib
import socket

import pytest

import caravan
from caravan.engine import load as load_engine
from caravan.wire import codec
from caravan.wire.commands import HELLO_REPLY
from caravan.wire.versions import V7, V8, Version
from interop.cases import SOME, assert_same, observe
from interop.peers import CppClient, CppServer, Ended, engine
from wired import wait_until


def announced(endpoint: str) -> Version:
    """What a client without the extension is told."""
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), 20.0) as sock, sock.makefile("rb") as file:
        sock.sendall(codec.hello_request(bytes(24)))
        (length,) = codec.BASE_REPLY.unpack(file.read(codec.BASE_REPLY.size))
        assert length == HELLO_REPLY.size
        version, _ = codec.decode_hello_reply(file.read(length))
        return version


@contextlib.contextmanager
def worker(folder, *options):
    with engine(folder):
        started = caravan.Worker("CPU:1", options=options)
    with started:
        yield started


@pytest.mark.parametrize("theirs", [True, False], ids=["ggml 0.25", "ggml 0.26"])
@pytest.mark.parametrize("option", ["auto", "7", "8"])
def test_a_worker_announces_what_its_engine_speaks_or_what_it_is_told(theirs, option, folder):
    expected = {"7": V7, "8": V8}.get(option, V7 if theirs else V8)
    with worker(folder if theirs else None, "--protocol", option) as started:
        assert announced(started.endpoint) == expected
        with caravan.connect([started.endpoint], extension=False) as cluster:
            assert cluster.devices[0].link.version == expected


def test_both_engines_mean_the_same_by_a_number(folder):
    """Ops and types travel as numbers, and the base protocol cannot ask what they mean."""
    ours = load_engine().ggml
    with CppClient(folder) as client:
        theirs = client.ask("names")
    assert theirs["op"] == [ours.op_name(number).decode() for number in range(101)]
    # the default engine may know a type more
    for number, name in enumerate(theirs["type"]):
        assert (ours.type_name(number) or b"").decode() == name


def test_llama_cpps_server_announces_7():
    with CppServer() as server:
        assert announced(server.endpoint) == V7


def test_a_client_of_7_at_a_worker_of_8_ends_with_its_own_words(folder, smollm2, alone):
    """It ends its process; the worker serves on, also a client of 7 once it is told to."""
    with worker(folder, "--protocol", "8") as started:
        with CppClient(folder) as client:
            client.tell("connect", endpoints=[started.endpoint])
            with pytest.raises(Ended, match=started.endpoint) as caught:
                client.answer()
            assert caught.value.code == -6
            assert "version" in caught.value.words
        # all that it can see is that the client has left; it says what to do, too
        wait_until(lambda: any("it left after HELLO" in line for line in started.messages()))
        told = " ".join(started.messages())
        assert "speaks RPC protocol 8.0.0" in told and "--protocol 7" in told
        with caravan.connect([started.endpoint]) as cluster:
            assert cluster.devices[0].memory()[1] > 0
    with worker(folder, "--protocol", "7") as started, CppClient(folder) as client:
        assert_same(observe(client, [started.endpoint], smollm2, SOME[:1]), alone)
