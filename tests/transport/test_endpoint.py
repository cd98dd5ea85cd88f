"""Endpoints as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan.errors import UsageError
from caravan.transport.endpoint import DEFAULT_PORT, Endpoint, parse_list

GOOD = [
    ("localhost:9090", Endpoint("localhost", 9090), "localhost:9090"),
    ("127.0.0.1:1", Endpoint("127.0.0.1", 1), "127.0.0.1:1"),
    ("gpu.example.org:65535", Endpoint("gpu.example.org", 65535), "gpu.example.org:65535"),
    ("host", Endpoint("host", 50052), "host:50052"),
    ("  host:7  ", Endpoint("host", 7), "host:7"),
    ("host:00080", Endpoint("host", 80), "host:80"),
    ("[::1]:9090", Endpoint("::1", 9090), "[::1]:9090"),
    ("[::1]", Endpoint("::1", 50052), "[::1]:50052"),
    ("::1", Endpoint("::1", 50052), "[::1]:50052"),
    ("fe80::", Endpoint("fe80::", 50052), "[fe80::]:50052"),
    ("2001:db8::5:1", Endpoint("2001:db8::5:1", 50052), "[2001:db8::5:1]:50052"),
    ("::ffff:10.0.0.1", Endpoint("::ffff:10.0.0.1", 50052), "[::ffff:10.0.0.1]:50052"),
    ("fe80::1%eth0", Endpoint("fe80::1%eth0", 50052), "[fe80::1%eth0]:50052"),
    ("[fe80::1%eth0]:80", Endpoint("fe80::1%eth0", 80), "[fe80::1%eth0]:80"),
    ("unix:/run/w.sock", Endpoint("", 0, "/run/w.sock"), "unix:/run/w.sock"),
    ("unix:rel:5", Endpoint("", 0, "rel:5"), "unix:rel:5"),
]
BAD = [
    "",
    "   ",
    ":",
    ":80",
    "host:",
    "host:0",
    "host:65536",
    "host:-1",
    "host:+1",
    "host:1.5",
    "host:http",
    "host:²",
    "host:٣",
    "host:8 0",
    "host: 80",
    "ho st:80",
    "host:" + "9" * 5000,
    "[::1",
    "[::1]80",
    "[::1]:",
    "[::1]:x",
    "[]:80",
    "unix:",
    "host:80:90",
    "http://host:80",
]


@pytest.mark.parametrize(("text", "endpoint", "shown"), GOOD)
def test_endpoints(text, endpoint, shown):
    assert Endpoint.parse(text) == endpoint
    assert str(endpoint) == shown
    assert Endpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:20])
def test_what_is_no_endpoint_is_a_usage_error(text):
    with pytest.raises(UsageError) as caught:
        Endpoint.parse(text)
    assert "\n" not in str(caught.value)


def test_another_default_port():
    assert Endpoint.parse("host", 9).port == 9
    assert Endpoint.parse("::1", 9).port == 9
    assert Endpoint.parse("[::1]", 9).port == 9
    assert DEFAULT_PORT == 50052


def test_lists():
    expected = [Endpoint("localhost", 9090), Endpoint("::1", 9091), Endpoint("c", 50052)]
    assert parse_list("localhost:9090, [::1]:9091,c") == expected
    assert parse_list("a:1,,b:2,") == [Endpoint("a", 1), Endpoint("b", 2)]


@pytest.mark.parametrize("text", ["", " ", ",", " , ,", "a:1,b:x"])
def test_lists_without_an_endpoint(text):
    with pytest.raises(UsageError):
        parse_list(text)


@given(st.text(max_size=30) | st.text("ab:[]%.0123456789", max_size=12))
def test_any_text_is_an_endpoint_or_a_usage_error(text):
    try:
        endpoint = Endpoint.parse(text)
    except UsageError as exc:
        assert str(exc)
    else:
        assert endpoint.path or (endpoint.host and 0 < endpoint.port < 65536)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("tls://lab1:7", Endpoint("lab1", 7, tls=True)),
        ("tls://lab1", Endpoint("lab1", DEFAULT_PORT, tls=True)),
        ("tls://[::1]:7", Endpoint("::1", 7, tls=True)),
    ],
)
def test_an_endpoint_that_asks_for_tls(text, meant):
    assert Endpoint.parse(text) == meant
    assert Endpoint.parse(str(meant)) == meant


@pytest.mark.parametrize("text", ["tls://", "tls://:7", "tls://unix:/x", "tls://tls://a", "tls:a"])
def test_what_asks_for_tls_nowhere(text):
    with pytest.raises(UsageError, match="Unix sockets" if "unix" in text else "endpoint"):
        Endpoint.parse(text)
