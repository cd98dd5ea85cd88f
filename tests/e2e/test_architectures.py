"""No honest graph is refused: models of many kinds compute on a worker what they do without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import caravan
from caravan.llm import Context, ContextParams, Model, ModelParams
from e2e.architectures import ARCHITECTURES, VOCAB, make

N_PROMPT, STEPS = 40, 3
_SIZES = {"n_ctx": 128, "n_ubatch": 16}
WAYS = {
    "plain": ContextParams(**_SIZES, flash_attn="off"),
    "flash attention": ContextParams(**_SIZES, flash_attn="on"),
    "q8_0 cache": ContextParams(**_SIZES, flash_attn="on", type_k="q8_0", type_v="q8_0"),
    "q4_0 cache": ContextParams(**_SIZES, flash_attn="on", type_k="q4_0", type_v="q4_0"),
}
# their heads are no multiple of a block
_NO_BLOCKS = ("deepseek2", "kimi-linear")


@pytest.fixture(scope="module")
def worker() -> Iterator[caravan.LocalWorkers]:
    with caravan.LocalWorkers(1, threads=2) as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def observe(model: Model, params: ContextParams) -> list[np.ndarray]:
    """The logits after the prompt and after each greedy step."""
    seen = []
    with Context(model, params) as context:
        context.decode([(7 * i + 3) % VOCAB for i in range(N_PROMPT)])
        for _ in range(STEPS):
            seen.append(context.logits())
            context.decode([int(seen[-1].argmax())])
        seen.append(context.logits())
    return seen


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_worker_computes_what_the_engine_does_alone(arch, folder, worker) -> None:
    path = folder / f"{arch}.gguf"
    make(path, arch)
    ways = {k: v for k, v in WAYS.items() if "cache" not in k or arch not in _NO_BLOCKS}
    with Model(path, ModelParams(repack=False)) as model:
        alone = {name: observe(model, params) for name, params in ways.items()}
    with (
        caravan.connect(worker.endpoints) as cluster,
        Model(path, devices=cluster.devices) as model,
    ):
        for name, params in ways.items():
            for ours, theirs in zip(observe(model, params), alone[name], strict=True):
                assert np.isfinite(theirs).all()
                assert np.array_equal(ours, theirs), name
