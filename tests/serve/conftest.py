"""Servers on fakes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serve.fakes import FakeService
from serve.serving import Served, serving


@pytest.fixture
def served() -> Iterator[Served]:
    service = FakeService()
    try:
        with serving(service) as found:
            yield found
    finally:
        service.batcher.close()


@pytest.fixture
def client(served):
    with served.openai() as found:
        yield found
