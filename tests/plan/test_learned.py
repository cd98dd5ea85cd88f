"""Models that know so many positions and no more: beyond them the engine ends the process."""

from __future__ import annotations

import json

import pytest

from caravan.cli.main import main
from caravan.errors import UsageError
from caravan.llm import ContextParams, ModelParams
from caravan.llm.rehearsal import Rehearsal, Step
from caravan.plan.work import ModelWork
from e2e.architectures import make

KNOWN = 256
LONG = ContextParams(n_ctx=4096)


@pytest.fixture(scope="module", params=["gpt2", "bert"])
def path(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("learned") / f"{request.param}.gguf"
    make(file, request.param)
    return file


def test_work_stays_within_the_positions_that_are_known(path):
    work = ModelWork.of(path, ModelParams(), LONG, sequences=(1, 2))
    assert work.n_positions == KNOWN
    assert max(point.n_tokens for point in work.prompt) == KNOWN


def test_a_step_beyond_them_is_refused(path):
    with Rehearsal(path, ModelParams()) as rehearsal, pytest.raises(UsageError, match="made for"):
        rehearsal.run(LONG, [Step(KNOWN + 1)])


def test_no_plan_is_made_for_longer_prompts(path, tmp_path, capsys):
    file = tmp_path / "cluster.json"
    device = {"gflops": 100, "gbps": 50, "memory_gib": 1, "count": 2}
    file.write_text(json.dumps({"devices": [device]}))
    words = ["plan", "-m", str(path), "--cluster", str(file), "-n", "8"]
    assert main([*words, "-p", "200"]) == 0
    assert main([*words, "-p", "512"]) == 2
    assert f"was made for {KNOWN} tokens" in capsys.readouterr().err
