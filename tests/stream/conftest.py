"""Streams that are closed after each test, with their threads gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from caravan.stream import dispatcher
from servers import Server, starting
from stream.scripted import Clock, Rig, make_rig, stream_threads


@pytest.fixture
def open_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(*args, **kwargs) -> Rig:
        rigs.append(make_rig(*args, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.take_leave()
    assert stream_threads() == []


@pytest.fixture
def rig(open_rig) -> Rig:
    return open_rig()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(dispatcher, "time", clock)
    return clock


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with starting() as start:
        yield start
