"""The sample model, loaded once on the CPU, and small contexts of it."""

from __future__ import annotations

import pytest

from caravan.llm import Context, ContextParams, Model


@pytest.fixture(scope="session")
def model(smollm2):
    with Model(smollm2) as model:
        yield model


@pytest.fixture
def context(model):
    with Context(model, ContextParams(n_ctx=256, n_batch=32, n_ubatch=16, n_threads=1)) as context:
        yield context
