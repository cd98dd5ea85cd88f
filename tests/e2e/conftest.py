"""What modules that say PARAMS and N_PROMPT have in common: a prompt, and the engine's own word."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from caravan.llm import Context, Model, ModelParams
from e2e.loads import TOTALS, Pair, check, loaded, two_keepers

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


# loading


@pytest.fixture(scope="module")
def keepers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with two_keepers(tmp_path_factory.mktemp("keepers")) as pair:
        yield pair


@pytest.fixture
def head_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> Path:
    """The head's cache, which is not there yet."""
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path / "head"))
    return tmp_path / "head"


@pytest.fixture
def pair(keepers: Pair, head_cache: Path) -> Pair:
    """Two workers with empty caches, and without models."""
    keepers.settle()
    keepers.empty()
    return keepers


@pytest.fixture
def kept(pair: Pair, smollm2: Path, tokens: list[int], expected: np.ndarray) -> Pair:
    """Two workers with everything in their caches; they have been sent it once."""
    if not pair.full:
        check(loaded(pair.endpoints, smollm2, tokens), expected, network=TOTALS)
        pair.settle()
        for cache in pair.caches:
            full = cache.with_name(f"{cache.name}.full")
            shutil.copytree(cache, full, copy_function=os.link)
            pair.full.append(full)
    for cache, full in zip(pair.caches, pair.full, strict=True):
        shutil.rmtree(cache)
        shutil.copytree(full, cache, copy_function=os.link)
    return pair
