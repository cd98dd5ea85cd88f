"""Fixtures of the tests of who may come in: scripted workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from servers import Server, starting


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with starting() as start:
        yield start
