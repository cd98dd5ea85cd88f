"""The extension's agreement in HELLO, and its JSON texts under hostile input."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan.errors import RemoteProtocolError, VersionMismatch
from caravan.wire import extension
from caravan.wire.extension import (
    Asks,
    DeviceInfo,
    PeerRequest,
    PeerTarget,
    SessionReply,
    SessionRequest,
    TlsRequest,
)

texts = st.text(st.characters(categories=("L", "N", "P", "S")), max_size=40)
sizes = st.integers(0, 2**64 - 1)
devices = st.builds(
    DeviceInfo,
    name=texts,
    description=texts,
    type=st.integers(0, 3),
    threads=st.integers(0, 1024),
    memory_free=sizes,
    memory_total=sizes,
    alignment=st.integers(0, 12).map(lambda n: 1 << n),
    max_size=st.integers(1, extension.MAX_BUFFER_SIZE),
    pads=st.booleans(),
)
requests = st.builds(SessionRequest, texts, st.integers(0, 2**32), texts, texts)
addresses = st.lists(texts, max_size=extension.MAX_ADDRESSES)
replies = st.builds(
    SessionReply,
    texts,
    texts,
    texts,
    st.lists(texts, max_size=5),
    st.lists(devices, max_size=3),
    texts,
    addresses,
    st.lists(st.sampled_from(list(extension.SOURCES))),
)
routes = st.integers(1, 2**32 - 1)
targets = st.builds(PeerTarget, routes, addresses, texts, st.integers(0, 2**32))
introductions = st.builds(PeerRequest, routes, texts, st.integers(0, 2**32))

REQUEST = {"session": "", "device": 0, "caravan": "0.1.0", "engine": "0.26.0"}
DEVICE = {
    "name": "CPU",
    "description": "a processor",
    "type": 0,
    "threads": 1,
    "memory_free": 1,
    "memory_total": 2,
    "alignment": 32,
    "max_size": 1 << 30,
    "pads": False,
}
REPLY = {
    "session": "key",
    "caravan": "0.1.0",
    "engine": "0.26.0",
    "ops": ["NONE", "DUP"],
    "devices": [DEVICE],
    "peer_key": "other key",
    "peer_addresses": ["lab1:50052", "unix:/tmp/worker"],
    "sources": ["disk", "cache"],
}
PEER = {"route": 1, "key": "other key", "device": 0}
TARGET = {**PEER, "addresses": ["lab1:50052"]}
DECODERS = [
    extension.decode_session_request,
    extension.decode_session_reply,
    extension.decode_peer_request,
    extension.decode_peer_target,
    extension.decode_tls_request,
]
KINDS = (SessionRequest, SessionReply, PeerRequest, PeerTarget, TlsRequest)


def test_caps_bytes():
    assert extension.caps() == b"\0\0\0\0caravan\0\1\0" + bytes(10)
    assert extension.caps(False) == bytes(24)


@pytest.mark.parametrize("asks", [Asks.NOTHING, Asks.TOKEN, Asks.TLS, Asks.TOKEN | Asks.TLS])
def test_what_a_worker_asks_for_is_one_byte_after_the_version(asks):
    caps = extension.caps(True, asks)
    assert caps == b"\0\0\0\0caravan\0\1\0" + bytes((asks,)) + bytes(9)
    assert extension.asked(caps) == asks
    assert extension.agreed(caps) == 1


def test_who_has_no_mark_asks_for_nothing():
    assert extension.caps(False, Asks.TOKEN) == bytes(24)
    assert extension.asked(bytes(14) + b"\xff" * 10) == Asks.NOTHING
    assert extension.asked(extension.caps()[:14]) == Asks.NOTHING


def test_what_a_later_worker_asks_for_is_noticed():
    for bits in (4, 5, 128, 255):
        with pytest.raises(VersionMismatch, match="asks for more"):
            extension.asked(extension.caps()[:14] + bytes((bits,)) + bytes(9))


def test_both_ends_of_this_version_agree():
    assert extension.agreed(extension.caps()) == 1


@pytest.mark.parametrize(
    "caps",
    [
        bytes(24),
        b"",
        b"\0\0\0\0caravan",
        # Linux RDMA: queue pair, packet number, gid; Apple's: queue pair, lid, reserved, gid
        bytes.fromhex("1a0100004fd2a100") + bytes(10) + b"\xff\xff\x0a\0\0\1",
        bytes.fromhex("010000000b000000") + b"\xfe\x80" + bytes(6) + bytes(range(8)),
        # the mark elsewhere, or not whole
        b"caravan\0\1\0" + bytes(14),
        b"\1\0\0\0caravan\0\1\0" + bytes(10),
        b"\0\0\0\0caravaN\0\1\0" + bytes(10),
        b"\0\0\0\0caravans\1\0" + bytes(10),
        # the mark with version 0
        b"\0\0\0\0caravan\0\0\0" + bytes(10),
    ],
)
def test_no_extension_with_a_peer_that_has_no_mark(caps):
    assert extension.agreed(caps) == 0


def test_a_newer_peer_speaks_our_version():
    assert extension.agreed(b"\0\0\0\0caravan\0\xff\xff" + b"\xee" * 10) == 1


@given(st.binary(max_size=40))
def test_any_caps_have_an_answer(caps):
    assert extension.agreed(caps) in (0, 1)


@given(requests)
def test_requests_come_back(request):
    assert extension.decode_session_request(extension.encode_json(request)) == request


@given(replies)
def test_replies_come_back(reply):
    assert extension.decode_session_reply(extension.encode_json(reply)) == reply


@given(targets)
def test_targets_come_back(target):
    assert extension.decode_peer_target(extension.encode_json(target)) == target


@given(introductions)
def test_introductions_come_back(request):
    assert extension.decode_peer_request(extension.encode_json(request)) == request


ids = st.just("") | st.text("0123456789abcdef", min_size=32, max_size=32)


@given(ids, st.booleans())
def test_tls_requests_come_back(name, peer):
    request = TlsRequest("", name) if peer else TlsRequest(name)
    assert extension.decode_tls_request(extension.encode_json(request)) == request


@pytest.mark.parametrize(
    ("session", "peer"),
    [
        ("a" * 31, ""),
        ("a" * 33, ""),
        ("", "A" * 32),
        ("", "g" * 32),
        ("../" + "a" * 29, ""),
        ("a" * 32, "b" * 32),
    ],
)
def test_a_tls_request_for_no_process_is_refused(session, peer):
    with pytest.raises(RemoteProtocolError, match="TLS for a"):
        extension.decode_tls_request(json.dumps({"session": session, "peer": peer}).encode())


@given(st.text(max_size=40))
def test_a_public_id_is_32_digits_that_do_not_tell_the_key(key):
    name = extension.public_id(key)
    assert name != key
    assert extension.decode_tls_request(extension.encode_json(TlsRequest(name))).session == name


def test_public_ids_differ():
    assert extension.public_id("a") != extension.public_id("b")
    assert extension.public_id("a") == "d9f491b4270de7a8c78f0ba2ef1a0424"


def test_unknown_fields_are_ignored():
    data = json.dumps({**REQUEST, "later": [1]}).encode()
    assert asdict(extension.decode_session_request(data)) == REQUEST
    data = json.dumps({**REPLY, "later": {}, "devices": [{**DEVICE, "later": None}]}).encode()
    assert asdict(extension.decode_session_reply(data)) == {**REPLY, "idle_ms": 0}


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"3",
        b"[]",
        b'"text"',
        b"{}",
        b"\xff\xfe\xfd",
        b"\0" * 64,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"session":' + b"9" * 100_000 + b"}",
        b'{"session": NaN}',
        json.dumps(REQUEST).encode() + b"x",
        b" " * (1 << 20) + b"{}",
    ],
    ids=lambda data: f"{bytes(data[:12])!r}-{len(data)}",
)
def test_hostile_payloads_are_refused(decode, data):
    with pytest.raises(RemoteProtocolError):
        decode(data)


WRONG: list[Any] = [
    None,
    True,
    1.0,
    "1",
    [],
    {},
    [[]],
    -1,
    2**64,
    10**400,
    float("inf"),
    float("nan"),
]


def wrong_for(value: Any) -> list[Any]:
    if type(value) is int:
        return [item for item in WRONG if type(item) is not int or item < 0 or item >= 2**64]
    kinds = (int, bool) if type(value) is int else (type(value),)
    return [0, *(item for item in WRONG if type(item) not in kinds)]


@pytest.mark.parametrize("field", REQUEST)
def test_request_fields_of_wrong_types_are_refused(field):
    for wrong in wrong_for(REQUEST[field]):
        with pytest.raises(RemoteProtocolError, match=field):
            extension.decode_session_request(json.dumps({**REQUEST, field: wrong}).encode())
    missing = {name: value for name, value in REQUEST.items() if name != field}
    with pytest.raises(RemoteProtocolError, match=field):
        extension.decode_session_request(json.dumps(missing).encode())


@pytest.mark.parametrize("field", REPLY)
def test_reply_fields_of_wrong_types_are_refused(field):
    for wrong in wrong_for(REPLY[field]):
        if wrong == []:
            continue
        with pytest.raises(RemoteProtocolError):
            extension.decode_session_reply(json.dumps({**REPLY, field: wrong}).encode())
    missing = {name: value for name, value in REPLY.items() if name != field}
    with pytest.raises(RemoteProtocolError):
        extension.decode_session_reply(json.dumps(missing).encode())


@pytest.mark.parametrize("field", TARGET)
@pytest.mark.parametrize(
    ("decode", "whole"), [(extension.decode_peer_request, PEER), (DECODERS[3], TARGET)]
)
def test_peer_fields_of_wrong_types_are_refused(decode, whole, field):
    if field not in whole:
        return
    for wrong in wrong_for(whole[field]):
        if wrong == []:
            continue
        with pytest.raises(RemoteProtocolError):
            decode(json.dumps({**whole, field: wrong}).encode())
    missing = {name: value for name, value in whole.items() if name != field}
    with pytest.raises(RemoteProtocolError, match=field):
        decode(json.dumps(missing).encode())


@pytest.mark.parametrize("route", [0, 2**32])
def test_a_route_has_32_bits_and_is_not_0(route):
    for decode, whole in ((extension.decode_peer_request, PEER), (DECODERS[3], TARGET)):
        with pytest.raises(RemoteProtocolError, match=f"route {route} is out of range"):
            decode(json.dumps({**whole, "route": route}).encode())


@pytest.mark.parametrize(
    "wrong", [["lab1"] * 9, ["a" * 257], ["lab1\n"], ["\ud800"], [1], [None], [["lab1"]]]
)
def test_addresses_that_make_no_sense_are_refused(wrong):
    for decode, message in (
        (extension.decode_session_reply, {**REPLY, "peer_addresses": wrong}),
        (extension.decode_peer_target, {**TARGET, "addresses": wrong}),
    ):
        with pytest.raises(RemoteProtocolError, match="peer addresses that are none"):
            decode(json.dumps(message).encode())


def test_sources_of_a_later_version_are_passed_over():
    found = extension.decode_session_reply(
        json.dumps({**REPLY, "sources": ["tape", "cache", ""]}).encode()
    )
    assert found.sources == ["cache"]


@pytest.mark.parametrize("wrong", [[1], [None], [["cache"]], [{}]])
def test_sources_that_are_no_words_are_refused(wrong):
    with pytest.raises(RemoteProtocolError, match="sources of weights that are no words"):
        extension.decode_session_reply(json.dumps({**REPLY, "sources": wrong}).encode())


@pytest.mark.parametrize("field", DEVICE)
def test_device_fields_of_wrong_types_are_refused(field):
    for wrong in wrong_for(DEVICE[field]):
        device = {**DEVICE, field: wrong}
        with pytest.raises(RemoteProtocolError, match=field):
            extension.decode_session_reply(json.dumps({**REPLY, "devices": [device]}).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("alignment", value) for value in (0, 3, 48, 1 << 21, 1 << 63)),
        *(("max_size", value) for value in (0, 1 << 40)),
    ],
)
def test_devices_that_make_no_sense_are_refused(field, value):
    device = {**DEVICE, field: value}
    with pytest.raises(RemoteProtocolError, match=field):
        extension.decode_session_reply(json.dumps({**REPLY, "devices": [device]}).encode())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@given(st.data())
def test_any_bytes_are_valid_or_refused(data):
    raw = data.draw(
        st.binary(max_size=64)
        | json_values.map(lambda value: json.dumps(value).encode())
        | st.dictionaries(st.sampled_from(list(REPLY)), json_values).map(
            lambda fields: json.dumps({**REPLY, **fields}).encode()
        )
        | st.dictionaries(st.sampled_from(list(DEVICE)), json_values).map(
            lambda fields: json.dumps({**REPLY, "devices": [{**DEVICE, **fields}]}).encode()
        )
        | st.dictionaries(st.sampled_from(list(TARGET)), json_values).map(
            lambda fields: json.dumps({**TARGET, **fields}).encode()
        )
    )
    for decode in DECODERS:
        try:
            message = decode(raw)
        except RemoteProtocolError as exc:
            assert str(exc)
        else:
            assert type(message) in KINDS


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_reply_is_valid_or_refused(position, byte):
    raw = bytearray(json.dumps(REPLY).encode())
    raw[position % len(raw)] = byte
    try:
        extension.decode_session_reply(bytes(raw))
    except RemoteProtocolError as exc:
        assert str(exc)


def test_texts_of_a_peer_are_fit_to_print():
    device = {**DEVICE, "name": "C\x1b[31mPU\n\ud800", "description": "x" * 10_000}
    reply = extension.decode_session_reply(
        json.dumps({**REPLY, "devices": [device], "ops": ["a\nb" * 1000]}).encode()
    )
    assert reply.devices[0].name == "C [31mPU  "
    assert len(reply.devices[0].description) < 1000
    assert "\n" not in reply.ops[0]
    assert len(reply.ops[0]) < 1000


@given(st.binary(max_size=5000))
def test_error_text_is_one_printable_line(data):
    text = extension.error_text(data)
    assert text
    assert text.isprintable()
    assert len(text) <= extension.MAX_ERROR_TEXT


def test_error_text_of_nothing():
    assert extension.error_text(b"") == "no reason given"
    assert extension.error_text("kein Speicher für 3\nPuffer".encode()) == (
        "kein Speicher für 3 Puffer"
    )


def test_addresses_hold_handle_and_offset():
    assert extension.ADDRESS_SHIFT == 40
    assert extension.MAX_BUFFER_SIZE == (1 << 40) - 1
    assert extension.GRAPH_LRU == 64
