"""A handful of the random kills of benchmarks/kills.py."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def kills():
    path = Path(__file__).parents[2] / "benchmarks" / "kills.py"
    spec = importlib.util.spec_from_file_location("kills", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["kills"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["kills"]


def test_the_text_is_the_same_whenever_a_worker_is_killed(kills, smollm2):
    chance = random.Random(7)
    with kills.victims() as workers:
        expected, seconds = kills.undisturbed(str(smollm2), workers)
        trials = [kills.trial(str(smollm2), workers, expected, seconds, chance) for _ in range(3)]
    assert expected
    assert all(trial.same for trial in trials), trials
    assert any(trial.resumes for trial in trials), trials
