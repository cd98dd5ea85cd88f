"""Connecting takes as long as it may and no longer, however slowly a peer answers."""

from __future__ import annotations

import threading

import pytest

from caravan.backend import cluster
from caravan.errors import ConnectError, UsageError


def test_a_handshake_without_end_is_given_up(monkeypatch):
    """A peer may answer each step just in time, and there may be many steps."""
    release = threading.Event()
    closed = threading.Event()

    class Late:
        def close(self) -> None:
            closed.set()

    def slow(*args, **options):
        release.wait(30)
        return Late()

    monkeypatch.setattr(cluster, "open_session", slow)
    monkeypatch.setattr(cluster, "_GRACE_SECONDS", 0.1)
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1:9.*too long"):
        cluster.connect(["127.0.0.1:9"], timeout=0.2)
    # what opens after all is closed at once
    release.set()
    assert closed.wait(10)
    for thread in threading.enumerate():
        if thread.name == "caravan-connect":
            thread.join(10)


def test_an_endpoint_given_twice_is_refused():
    with pytest.raises(UsageError, match=r"127\.0\.0\.1:50052 is given twice"):
        cluster.connect(["127.0.0.1:50052", "127.0.0.1:9", "127.0.0.1"])


@pytest.mark.parametrize("timeout", [0, -1])
def test_a_timeout_must_be_above_zero(timeout):
    with pytest.raises(UsageError):
        cluster.connect(["127.0.0.1:9"], timeout=timeout)
