"""Connecting takes as long as it may and no longer, however slowly a peer answers."""

from __future__ import annotations

import threading

import pytest

from caravan.backend import cluster
from caravan.errors import ConnectError, UsageError
from caravan.stream.watchdog import Watchdog


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


@pytest.mark.parametrize(
    ("error", "seconds"), [(KeyboardInterrupt, cluster._HURRIED_SECONDS), (ValueError, 5.0)]
)
def test_ctrl_c_does_not_wait_long_for_a_link_that_takes_nothing(error, seconds, monkeypatch):
    deadlines = []

    class Open:
        endpoint = "lab:50052"

        def close(self, deadline: float) -> None:
            deadlines.append(deadline)

    class Still:
        def monotonic(self) -> float:
            return 100.0

    monkeypatch.setattr(cluster, "time", Still())
    watchdog = Watchdog(30.0)
    with pytest.raises(error), cluster.Cluster([Open(), Open()], [], watchdog, lambda: None):
        raise error
    assert deadlines == [100.0 + seconds] * 2
    assert cluster._HURRIED_SECONDS < 1.0
