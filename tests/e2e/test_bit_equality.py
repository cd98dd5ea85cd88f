"""The oracle: whatever the split, what comes out is what the engine alone computes, bit for bit.

The engine alone keeps its weights in plain buffers (repack off), as the workers do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import caravan
from caravan.llm import Context, ContextParams, EngineDevice, Model, ModelParams, SamplingParams

STEPS = 6
TEXT = "The caravan left the oasis before dawn, and nobody looked back. " * 40

# name -> context parameters, prompt tokens
CASES = {
    "ubatch divides": (ContextParams(n_ctx=256, n_ubatch=32), 128),
    "ubatch does not divide": (ContextParams(n_ctx=256, n_ubatch=27), 131),
    "ubatch of one": (ContextParams(n_ctx=64, n_ubatch=1, n_batch=16), 9),
    "longer than the batch": (ContextParams(n_ctx=256, n_batch=48, n_ubatch=20), 150),
    "quantised cache": (
        ContextParams(n_ctx=256, n_ubatch=32, type_k="q8_0", type_v="q4_0", flash_attn="on"),
        100,
    ),
    "quantised keys alone": (ContextParams(n_ctx=256, n_ubatch=32, type_k="q4_0"), 100),
    "flash attention off": (ContextParams(n_ctx=256, n_ubatch=32, flash_attn="off"), 100),
    "flash attention on": (ContextParams(n_ctx=256, n_ubatch=32, flash_attn="on"), 100),
    "cache on the head": (ContextParams(n_ctx=128, n_ubatch=32, offload_kqv=False), 70),
}


@pytest.fixture(scope="module")
def workers() -> Iterator[caravan.LocalWorkers]:
    with caravan.LocalWorkers(4, threads=1) as started:
        yield started


def observe(model: Model, params: ContextParams, n_prompt: int) -> tuple[list[np.ndarray], str]:
    """The logits after the prompt and after each greedy step, and a longer greedy text."""
    tokens = model.tokenize(TEXT)[:n_prompt]
    seen = []
    with Context(model, params) as context:
        context.decode(tokens)
        for _ in range(STEPS):
            seen.append(context.logits())
            context.decode([int(seen[-1].argmax())])
        seen.append(context.logits())
        context.clear()
        pieces = caravan.generate(
            context, tokens[:8], max_tokens=16, sampling=SamplingParams(temp=0)
        )
        return seen, "".join(pieces)


@pytest.fixture(scope="module")
def alone(smollm2: Path) -> dict[str, tuple[list[np.ndarray], str]]:
    with Model(smollm2, ModelParams(repack=False)) as model:
        return {name: observe(model, *case) for name, case in CASES.items()}


def compare(
    smollm2: Path,
    devices: Sequence[EngineDevice],
    alone: dict[str, tuple[list[np.ndarray], str]],
    params: ModelParams,
    cases: Sequence[str] = tuple(CASES),
) -> None:
    with Model(smollm2, params, devices=devices) as model:
        for name in cases:
            logits, text = observe(model, *CASES[name])
            expected, expected_text = alone[name]
            for step, (ours, theirs) in enumerate(zip(logits, expected, strict=True)):
                assert np.array_equal(ours, theirs), f"{name}, step {step}"
            assert text == expected_text, name


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_workers_compute_what_the_engine_computes(count, workers, smollm2, alone):
    with caravan.connect(workers.endpoints[:count]) as cluster:
        compare(smollm2, cluster.devices, alone, ModelParams())


@pytest.mark.parametrize("count", [1, 2])
def test_the_base_protocol_computes_the_same(count, workers, smollm2, alone):
    with caravan.connect(workers.endpoints[:count], extension=False) as cluster:
        assert not any(device.link.extension for device in cluster.devices)
        compare(smollm2, cluster.devices, alone, ModelParams())


SOME = ("ubatch does not divide", "quantised cache")


@pytest.mark.parametrize("protocol", ["7", "8"])
def test_both_versions_of_the_base_protocol(protocol, smollm2, alone):
    with (
        caravan.Worker("CPU:1,CPU:1", options=("--protocol", protocol)) as worker,
        caravan.connect([worker.endpoint], extension=False) as cluster,
    ):
        assert [device.link.version.major for device in cluster.devices] == [int(protocol)] * 2
        # they share a connection, and would be lost together
        assert {device.link.stream.device for device in cluster.devices} == {"RPC0,RPC1"}
        compare(smollm2, cluster.devices, alone, ModelParams(), SOME)


def test_two_devices_of_one_worker(smollm2, alone):
    with (
        caravan.Worker("CPU:1,CPU:1") as worker,
        caravan.connect([worker.endpoint]) as cluster,
    ):
        assert [device.name for device in cluster.devices] == ["RPC0", "RPC1"]
        compare(smollm2, cluster.devices, alone, ModelParams(), SOME)


@pytest.mark.parametrize(
    "params",
    [
        ModelParams(tensor_split=(3, 1)),
        ModelParams(tensor_split=(1, 9)),
        ModelParams(n_gpu_layers=12),
        ModelParams(n_gpu_layers=30),
        ModelParams(split_mode="none", main_gpu=1),
    ],
    ids=["3/1", "1/9", "12 layers", "all but the output", "one device"],
)
def test_other_splits(params, workers, smollm2):
    # layers that stay on the CPU must stay unpacked there to be the same bits
    params = ModelParams(
        tensor_split=params.tensor_split,
        n_gpu_layers=params.n_gpu_layers,
        split_mode=params.split_mode,
        main_gpu=params.main_gpu,
        repack=False,
    )
    with Model(smollm2, ModelParams(repack=False)) as model:
        expected = {name: observe(model, *CASES[name]) for name in SOME}
    with caravan.connect(workers.endpoints[:2]) as cluster:
        compare(smollm2, cluster.devices, expected, params, SOME)


def test_two_contexts_take_turns(workers, smollm2):
    """Contexts that share devices do not disturb each other, nor does one that goes away."""
    params = ContextParams(n_ctx=64, n_ubatch=16)
    with Model(smollm2, ModelParams(repack=False)) as model, Context(model, params) as context:
        tokens = model.tokenize(TEXT)[:40]
        context.decode(tokens)
        expected = context.logits()
    with (
        caravan.connect(workers.endpoints[:2]) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, params) as one,
    ):
        for length in range(8, 40, 8):
            one.decode(tokens[length - 8 : length])
            with Context(model, params) as other:
                other.decode(tokens)
                assert np.array_equal(other.logits(), expected)
        one.decode(tokens[32:])
        assert np.array_equal(one.logits(), expected)


def test_saved_state_comes_back(workers, smollm2):
    params = ContextParams(n_ctx=64, n_ubatch=16)
    with (
        caravan.connect(workers.endpoints[:2]) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, params) as context,
    ):
        tokens = model.tokenize(TEXT)[:30]
        context.decode(tokens)
        state = context.save_state()
        context.decode([5])
        expected = context.logits()
        context.clear()
        assert context.restore_state(state)
        context.decode([5])
        assert np.array_equal(context.logits(), expected)
