"""Fixtures of the worker's tests: one real worker for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from caravan.worker.local import Worker


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    with Worker("CPU:1,CPU:1") as running:
        yield running


@pytest.fixture(scope="session")
def worker7() -> Iterator[Worker]:
    with Worker("CPU:1,CPU:1", options=("--protocol", "7")) as running:
        yield running
