"""What modules that say PARAMS and N_PROMPT have in common: a prompt, and the engine's own word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from caravan.llm import Context, Model, ModelParams

TEXT = "The caravan left the oasis before dawn, and nobody looked back. " * 40


@pytest.fixture(scope="module")
def tokens(request: pytest.FixtureRequest, smollm2: Path) -> list[int]:
    """The module's N_PROMPT tokens."""
    with Model(smollm2, ModelParams(vocab_only=True)) as model:
        return model.tokenize(TEXT)[: request.module.N_PROMPT]


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, smollm2: Path, tokens: list[int]) -> np.ndarray:
    """The engine's own logits after 40 tokens, with the module's PARAMS."""
    with (
        Model(smollm2, ModelParams(repack=False)) as model,
        Context(model, request.module.PARAMS) as context,
    ):
        context.decode(tokens[:40])
        return context.logits()
