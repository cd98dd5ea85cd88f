"""Whether other machines can connect is told by the addresses that are listened to."""

from __future__ import annotations

import socket

import pytest

from caravan.worker import listener


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("host", "exposed"),
    [
        ("127.0.0.1", False),
        ("127.8.9.10", False),
        ("localhost", False),
        ("0.0.0.0", True),
        pytest.param("::1", False, marks=pytest.mark.skipif(not _has_ipv6(), reason="no IPv6")),
        pytest.param("::", True, marks=pytest.mark.skipif(not _has_ipv6(), reason="no IPv6")),
        pytest.param(
            "::ffff:127.0.0.1", False, marks=pytest.mark.skipif(not _has_ipv6(), reason="no IPv6")
        ),
    ],
)
def test_what_others_can_reach(host, exposed):
    try:
        sockets, _ = listener.listen(host, 0)
    except Exception:
        # an address of IPv4 in the clothes of IPv6 is not to be had everywhere
        assert host.startswith("::ffff:")
        pytest.skip("this system does not listen there")
    try:
        assert listener.exposed(sockets) is exposed
    finally:
        listener.close(sockets)


def test_a_unix_socket_is_for_this_machine(tmp_path):
    sockets, _ = listener.listen(f"unix:{tmp_path}/socket", 0)
    assert not listener.exposed(sockets)
    listener.close(sockets)


def test_a_name_that_looks_like_loopback_is_looked_up(monkeypatch):
    """It may belong to anybody, and lead anywhere."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("0.0.0.0", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    sockets, _ = listener.listen("127.example.org", 0)
    assert listener.exposed(sockets)
    listener.close(sockets)
