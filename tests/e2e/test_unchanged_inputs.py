"""Inputs that are not sent again: over long stretches of changing work, the bits stay the engine's.

Whatever the head wrongly believes to be in a worker's memory shows as other logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import caravan
from caravan.llm import Context, ContextParams, Model, ModelParams

TEXT = "The caravan left the oasis before dawn, and nobody looked back. " * 40

# one thread, as the workers have: with more, a long cache is summed up in another order
CASES = {
    "flash attention": ContextParams(n_ctx=512, n_threads=1, n_ubatch=32, flash_attn="on"),
    "no flash attention": ContextParams(n_ctx=512, n_threads=1, n_ubatch=32, flash_attn="off"),
    "quantised cache": ContextParams(
        n_ctx=512, n_threads=1, n_ubatch=24, type_k="q8_0", type_v="q4_0", flash_attn="on"
    ),
    "cache of f32": ContextParams(n_ctx=512, n_threads=1, n_ubatch=32, type_k="f32", type_v="f32"),
}


@pytest.fixture(scope="module")
def workers() -> Iterator[caravan.LocalWorkers]:
    with caravan.LocalWorkers(2, threads=1) as started:
        yield started


def work(model: Model, params: ContextParams) -> list[np.ndarray]:
    """Prompts and steps in many sizes, back and forth, past a change of the graph's size."""
    tokens = model.tokenize(TEXT)
    seen: list[np.ndarray] = []
    with Context(model, params) as one, Context(model, params) as two:

        def step(context: Context, found: list[int]) -> None:
            context.decode(found)
            seen.append(context.logits())

        step(one, tokens[:250])
        for number in range(16):
            # across 256, where the engine makes a larger graph
            step(one, [tokens[number]])
        for number in range(5):
            step(two, tokens[number : 2 * number + 1])
            step(one, [tokens[number]])
        one.rewind(100)
        for number in range(4):
            step(one, [tokens[number + 7]])
        one.rewind(101)
        step(one, tokens[3:50])
        two.clear()
        for size in (1, 2, 1, 40, 1, 1):
            step(two, tokens[:size])
            step(one, tokens[size : size + 1])
        state = one.save_state()
        one.clear()
        step(one, [tokens[0]])
        assert one.restore_state(state)
        step(one, [tokens[1]])
        step(one, [tokens[1]])
        one.decode(tokens[:6], logits="all")
        seen.extend(one.logits(index) for index in range(6))
        one.decode(tokens[:6], logits="none")
        step(one, [tokens[2]])
    return seen


@pytest.fixture(scope="module")
def alone(smollm2: Path) -> dict[str, list[np.ndarray]]:
    with Model(smollm2, ModelParams(repack=False)) as model:
        return {name: work(model, params) for name, params in CASES.items()}


def compare(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert np.array_equal(ours, theirs), f"step {step}"


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_long_work_gives_the_same_bits(name, count, workers, smollm2, alone):
    with (
        caravan.connect(workers.endpoints[:count]) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
    ):
        compare(work(model, CASES[name]), alone[name])


def test_two_devices_of_one_worker(smollm2, alone):
    with (
        caravan.Worker("CPU:1,CPU:1") as worker,
        caravan.connect([worker.endpoint]) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
    ):
        compare(work(model, CASES["flash attention"]), alone["flash attention"])


def test_a_step_sends_what_changed(workers, smollm2):
    """A mask of thousands of positions changes in one of them; what is left is fixed costs."""
    with (
        caravan.connect(workers.endpoints) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, ContextParams(n_ctx=2304, n_ubatch=256, flash_attn="on")) as context,
    ):
        context.decode([7] * 2100)
        streams = [device.link.stream for device in cluster.devices]
        for token in (1, 2):
            # the second of them is a graph that the workers have
            context.decode([token])
            context.logits()
        before = [stream.bytes_sent for stream in streams]
        context.decode([3])
        context.logits()
        sent = [stream.bytes_sent - start for start, stream in zip(before, streams, strict=True)]
    mask = 2304 * 2
    embeddings = model.n_embd * 4
    assert sent[0] < embeddings + 400 < embeddings + mask
    assert sent[1] < 400
