"""Activations that travel at half their size: GET_CAST, SET_CAST, and PUSH and TAKE with a type."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from caravan import engine
from caravan.transport import memory
from caravan.wire import codec
from caravan.wire.commands import EXT, Ext
from caravan.wire.dtypes import MAX_CAST, WireType
from caravan.wire.extension import Status
from caravan.worker.ext_channel import ExtChannel
from caravan.worker.native import NativeBuffer
from worker.fakes import FakeDevice
from worker.raw_client import ExtClient
from worker.test_channels import Peer, serving

IN, OUT = 7, 8
VALUES = np.random.default_rng(5).standard_normal(512).astype(np.float32)
HALF = VALUES.astype(np.float16)


@pytest.fixture
def client(worker) -> Iterator[ExtClient]:
    with ExtClient(worker.endpoint) as made:
        yield made
        made.fence()


def test_a_real_worker_converts_both_ways(client):
    _, base = client.alloc(4 * VALUES.nbytes)
    client.set(base + 64, VALUES.tobytes())
    (data,) = client.call(Ext.GET_CAST, base + 64, VALUES.nbytes, 1)
    assert data == HALF.tobytes()
    client.post(Ext.SET_CAST, base + 4096, 1, tail=data)
    assert client.get(base + 4096, VALUES.nbytes) == HALF.astype(np.float32).tobytes()
    # bf16 of the same, read as what it is
    (data,) = client.call(Ext.GET_CAST, base + 64, VALUES.nbytes, 2)
    client.post(Ext.SET_CAST, base + 4096, 2, tail=data)
    got = np.frombuffer(client.get(base + 4096, VALUES.nbytes), np.float32)
    assert (got.view(np.uint32) & 0xFFFF == 0).all()
    np.testing.assert_allclose(got, VALUES, rtol=2**-8)


def test_nothing_is_converted_to_nothing(client):
    _, base = client.alloc(64)
    assert client.call(Ext.GET_CAST, base, 0, 1) == (b"",)
    client.post(Ext.SET_CAST, base, 2)


@pytest.mark.parametrize("host", [True, False])
def test_memory_that_the_host_cannot_reach(host):
    """Through the calls that a GPU's memory takes."""
    loaded = engine.load()
    ggml = loaded.ggml
    buffer = NativeBuffer(loaded, ggml.buft_alloc_buffer(ggml.cpu_buffer_type(), 8192), host)
    buffer.clear(0)
    buffer.write(64, VALUES.tobytes())
    data = buffer.narrow(64, VALUES.nbytes, WireType.F16)
    assert data == HALF.tobytes()
    buffer.widen(4096, data, WireType.F16)
    assert bytes(buffer.read(4096, VALUES.nbytes)) == HALF.astype(np.float32).tobytes()
    assert bytes(buffer.read(4096 + VALUES.nbytes, 64)) == bytes(64)
    buffer.free()


# hostile requests; the connection goes on

SIZE = 256
BAD_GETS = {
    "as it is": (0, 64, 0),
    "unknown type": (0, 64, 3),
    "type of another list": (0, 64, 30),
    "part of a number": (0, 62, 1),
    "one byte": (0, 1, 2),
    "between two numbers": (2, 64, 1),
    "past the end": (SIZE - 60, 64, 1),
    "endless": (0, (1 << 64) - 4, 1),
    "too many": (0, 2 * MAX_CAST + 4, 2),
}
BAD_SETS = {
    "as it is": (0, 0, bytes(64)),
    "unknown type": (0, 7, bytes(64)),
    "half a number": (0, 1, bytes(63)),
    "between two numbers": (1, 1, bytes(64)),
    "past the end": (SIZE - 124, 2, bytes(64)),
}


@pytest.fixture
def peer() -> Iterator[Peer]:
    with serving(ExtChannel, [FakeDevice()]) as (made, found):
        made.lane = found[0]
        yield made


def refused(peer: Peer, seq: int) -> None:
    _, status, answered, text = peer.answer()
    assert (status, answered) == (Status.BAD_REQUEST, seq), text


@pytest.mark.parametrize("name", BAD_GETS)
def test_reads_that_make_no_sense_are_refused(peer, name):
    offset, size, dtype = BAD_GETS[name]
    base = peer.alloc(SIZE)
    refused(peer, peer.ext(Ext.GET_CAST, base + offset, size, dtype))
    peer.ext(Ext.FENCE)
    assert peer.answer()[1] == 0


@pytest.mark.parametrize("name", BAD_SETS)
def test_writes_that_make_no_sense_are_refused(peer, name):
    offset, dtype, data = BAD_SETS[name]
    base = peer.alloc(SIZE)
    refused(peer, peer.ext(Ext.SET_CAST, base + offset, dtype, tail=data))
    peer.ext(Ext.GET, base, SIZE)
    assert peer.answer()[3] == bytes(SIZE)


def test_a_write_that_is_too_long_is_skipped(peer, monkeypatch):
    from caravan.worker import ext_channel

    monkeypatch.setitem(ext_channel._LIMITS, Ext.SET_CAST, 12 + 64)
    base = peer.alloc(SIZE)
    refused(peer, peer.ext(Ext.SET_CAST, base, 1, tail=bytes(66)))
    peer.ext(Ext.SET_CAST, base, 1, tail=bytes(64))
    peer.ext(Ext.FENCE)
    assert peer.answer()[1] == 0


@pytest.mark.parametrize("name", ["PUSH", "TAKE"])
def test_copies_that_make_no_sense_are_refused(peer, name):
    base = peer.alloc(SIZE)
    for route, dtype, offset, size in (
        (0, 1, 0, 64),
        (OUT, 3, 0, 64),
        (OUT, 1, 0, 62),
        (OUT, 2, 2, 64),
        (OUT, 1, SIZE - 4, 8),
    ):
        refused(peer, peer.ext(Ext[name], route, dtype, 1, base + offset, size))


@pytest.mark.parametrize("host", [True, False])
def test_a_push_is_half_as_long_and_a_take_widens_it(host):
    near, far = memory.pair(1 << 16)
    with (
        serving(ExtChannel, [FakeDevice(host=host)]) as (one, ours),
        serving(ExtChannel, [FakeDevice(host=host)]) as (other, theirs),
    ):
        ours[0].peers.add_out(OUT, near, ours[0].spans)
        theirs[0].peers.add_in(OUT, far)
        source, target = one.alloc(4096), other.alloc(4096)
        one.ext(Ext.SET, source, tail=VALUES.tobytes())
        for ticket, dtype in ((1, 1), (2, 0), (3, 2)):
            one.ext(Ext.PUSH, OUT, dtype, ticket, source, VALUES.nbytes)
            other.ext(Ext.TAKE, OUT, dtype, ticket, target, VALUES.nbytes)
            other.ext(Ext.GET, target, VALUES.nbytes)
            got = np.frombuffer(other.answer()[3], np.float32)
            np.testing.assert_allclose(got, VALUES, rtol=0 if dtype == 0 else 2**-7, atol=1e-6)
            assert np.array_equal(got, VALUES) == (dtype == 0)
        ours[0].peers._out[OUT].close()


def test_what_was_pushed_in_another_type_breaks_the_way(peer):
    near, far = memory.pair(1 << 16)
    peer.lane.peers.add_in(IN, far)
    base = peer.alloc(SIZE)
    near.send([codec.ext_frame(Ext.DATA, 0, 8 + 64) + EXT[Ext.DATA].request.pack(1) + bytes(64)])
    seq = peer.ext(Ext.TAKE, IN, 1, 1, base, 64)
    _, status, answered, text = peer.answer()
    assert (status, answered) == (Status.PEER_LOST, seq)
    assert b"ticket 1 of 32 bytes is due, and 64 bytes came" in text
