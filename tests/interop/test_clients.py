"""llama.cpp's own client on our workers: it computes what it computes with its own servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import caravan
from interop.cases import CASES, SOME, TEXT, assert_same, observe, shifting, told
from interop.peers import CppClient, CppServer, engine


@pytest.fixture(scope="module")
def workers(folder: Path) -> Iterator[list[str]]:
    """Three with llama.cpp's kernels, the last of them with two devices."""
    devices = ("CPU:1", "CPU:1", "CPU:1,CPU:1")
    with ExitStack() as stack:
        with engine(folder):
            started = [stack.enter_context(caravan.Worker(spec)) for spec in devices]
        yield [worker.endpoint for worker in started]


def test_it_computes_on_its_own_servers_what_it_computes_alone(folder, smollm2, alone):
    with CppServer() as one, CppServer(devices=2) as two, CppClient(folder) as client:
        seen = observe(client, [one.endpoint, two.endpoint], smollm2, SOME)
    assert_same(seen, alone)


@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 1), (0, 2), (0, 3), (2, 3)],
    ids=["one worker", "two workers", "three workers", "one worker with two devices"],
)
def test_it_computes_the_same_on_workers(first, last, workers, folder, smollm2, alone):
    with CppClient(folder) as client:
        seen = observe(client, workers[first:last], smollm2, CASES if last == 2 else SOME)
        assert client.close() == 0
    assert_same(seen, alone)


@pytest.mark.parametrize(
    "load",
    [{"split": [3, 1]}, {"split": [1, 9]}, {"n_gpu_layers": 12}, {"n_gpu_layers": 30}],
    ids=["3/1", "1/9", "12 layers", "all but the output"],
)
def test_other_splits(load, workers, folder, smollm2, alone):
    with CppClient(folder) as client:
        assert_same(observe(client, workers[:2], smollm2, SOME, **load), alone)


def test_workers_of_another_engine_compute_what_that_engine_computes(
    folder, smollm2, alone_default
):
    """The kernels are the workers', whatever the client has."""
    with (
        caravan.Worker("CPU:1", options=("--protocol", "7")) as one,
        caravan.Worker("CPU:1", options=("--protocol", "7")) as two,
        CppClient(folder) as client,
    ):
        seen = observe(client, [one.endpoint, two.endpoint], smollm2)
    assert_same(seen, alone_default)


@pytest.fixture
def client(workers, folder, smollm2) -> Iterator[CppClient]:
    """With the sample model on two workers."""
    with CppClient(folder) as started:
        started.ask("connect", endpoints=workers[:2])
        started.ask("load", path=str(smollm2))
        yield started


@pytest.fixture
def theirs(folder, smollm2) -> Iterator[CppClient]:
    """The same, on the CPU alone."""
    with CppClient(folder) as started:
        started.ask("load", path=str(smollm2))
        yield started


def test_several_sequences_of_one_context(client, theirs):
    tokens = client.ask("tokenize", text=TEXT)["tokens"]
    steps = [{"do": "open", "n_ctx": 192, "n_ubatch": 16, "n_seq_max": 3}]
    for sequence in range(3):
        part = tokens[sequence * 7 : sequence * 7 + 30]
        steps += [{"do": "decode", "tokens": part, "sequence": sequence}, {"do": "logits"}]
    # each goes on where it was left
    for sequence in (1, 0, 2):
        part = tokens[:3]
        steps += [{"do": "decode", "tokens": part, "sequence": sequence}, {"do": "logits"}]
        steps += [{"do": "generate", "n": 2, "sequence": sequence, "keep": True}]
    assert told(client, steps) == told(theirs, steps)


@pytest.mark.parametrize("unified", [False, True], ids=["a memory each", "one memory"])
@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_several_sequences_in_one_batch(unified, flash_attn, client, theirs):
    tokens = client.ask("tokenize", text=TEXT)["tokens"]
    options = {"n_seq_max": 3, "kv_unified": unified, "flash_attn": flash_attn}
    steps = [
        {"do": "open", "n_ctx": 192, "n_ubatch": 32, **options},
        {"do": "decode_together", "tokens": [tokens[:20], tokens[5:25], tokens[10:30]]},
        {"do": "decode_together", "tokens": [tokens[:1], tokens[1:2], tokens[2:3]]},
        # lengths that differ
        {"do": "decode_together", "tokens": [tokens[:3], tokens[:9], tokens[:1]]},
        {"do": "copy", "source": 1, "target": 2} if unified else {"do": "clear"},
        {"do": "decode_together", "tokens": [tokens[:2], tokens[2:4], tokens[4:6]]},
    ]
    assert told(client, steps) == told(theirs, steps)


def test_a_sequence_is_copied_to_a_memory_of_its_own(client, theirs):
    tokens = client.ask("tokenize", text=TEXT)["tokens"]
    steps = [
        {"do": "open", "n_ctx": 128, "n_ubatch": 32, "n_seq_max": 2},
        {"do": "decode", "tokens": tokens[:30]},
        {"do": "copy", "source": 0, "target": 1},
        {"do": "decode_together", "tokens": [tokens[30:33], tokens[40:42]]},
    ]
    assert told(client, steps) == told(theirs, steps)


def test_the_beginning_is_forgotten_and_the_rest_moves_up(client, theirs):
    tokens = client.ask("tokenize", text=TEXT)["tokens"]
    steps = shifting(tokens)
    assert told(client, steps) == told(theirs, steps)


def test_a_state_comes_back_in_another_sequence(client, theirs):
    tokens = client.ask("tokenize", text=TEXT)["tokens"]
    steps = [
        {"do": "open", "n_ctx": 128, "n_ubatch": 16, "n_seq_max": 2},
        {"do": "decode", "tokens": tokens[:30]},
        {"do": "save", "name": "30 tokens"},
        {"do": "generate", "n": 3, "keep": True},
        {"do": "restore", "name": "30 tokens", "sequence": 1},
        {"do": "decode", "tokens": tokens[30:35], "sequence": 1},
        {"do": "logits"},
        {"do": "clear"},
        {"do": "restore", "name": "30 tokens"},
        {"do": "decode", "tokens": tokens[30:35]},
        {"do": "logits"},
    ]
    assert told(client, steps) == told(theirs, steps)


def test_a_second_context_comes_and_goes_while_the_first_decodes(client, theirs):
    """The client goes on with a graph that its own server has forgotten with the freed buffers,
    and would be cut off there."""
    tokens = client.ask("tokenize", text=TEXT)["tokens"]
    steps = [
        {"do": "open", "n_ctx": 128, "n_ubatch": 16},
        {"do": "decode", "tokens": tokens[:40]},
        {"do": "generate", "n": 4, "keep": True},
    ]
    for _ in range(2):
        steps += [
            {"do": "open", "context": "other", "n_ctx": 64, "n_ubatch": 8},
            {"do": "close", "context": "other"},
            {"do": "generate", "n": 4, "keep": True},
            {"do": "open", "context": "other", "n_ctx": 64, "n_ubatch": 8},
            {"do": "decode", "context": "other", "tokens": tokens[:20]},
            {"do": "close", "context": "other"},
            {"do": "generate", "n": 4, "keep": True},
        ]
    assert told(client, steps) == told(theirs, steps)
