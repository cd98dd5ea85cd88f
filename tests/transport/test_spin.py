"""Looking for bytes without sleeping: for how long, and for whose sake it stops."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from caravan.transport import tcp


class Looks:
    """A poll object that has an event at its n-th look."""

    def __init__(self, at: int = 1 << 60) -> None:
        self.looks = 0
        self._at = at

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        assert timeout == 0
        self.looks += 1
        return [(0, 1)] if self.looks >= self._at else []


@pytest.fixture
def alone(monkeypatch):
    """Whatever else the machine does."""
    monkeypatch.setattr(tcp, "_LET_IN", 3600.0)


def test_it_looks_again_and_again(alone):
    looks = Looks(at=5)
    assert tcp._spin(looks, 3600.0) is True
    assert looks.looks == 5


def test_it_ends_in_time(alone, monkeypatch):
    looks, times = Looks(), iter([0.0, 1.0, 2.0, 6.0])
    monkeypatch.setattr(tcp, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert tcp._spin(looks, 5.0) is False
    assert looks.looks == 3


def test_it_ends_when_somebody_else_was_let_in(monkeypatch):
    looks, times = Looks(), iter([0.0, 0.1, 0.2, 5.0])
    monkeypatch.setattr(tcp, "_LET_IN", 0.15)
    monkeypatch.setattr(tcp, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert tcp._spin(looks, 3600.0) is False
    assert looks.looks == 3
