"""Fixtures of the worker's tests: one real worker for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from caravan.worker.local import Worker
from servers import Server, starting


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    with Worker("CPU:1,CPU:1") as running:
        yield running


@pytest.fixture(scope="session")
def worker7() -> Iterator[Worker]:
    with Worker("CPU:1,CPU:1", options=("--protocol", "7")) as running:
        yield running


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with starting() as start:
        yield start
