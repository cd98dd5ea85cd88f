"""Activations at half their size: what that does to the logits, to the bytes, and where nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import caravan
from caravan.bench.fidelity import compare, logits_of, of_wire_dtype
from caravan.llm import Context, ContextParams, Model, ModelParams
from caravan.stream.routes import Path as Way
from caravan.wire.dtypes import WireType

TEXT = "The caravan left the oasis before dawn, and nobody looked back. " * 40
PARAMS = ContextParams(n_ctx=256, n_batch=128, n_ubatch=32, n_threads=1, flash_attn="on")
N_TOKENS = 160


@pytest.fixture(scope="module")
def workers() -> Iterator[caravan.LocalWorkers]:
    with caravan.LocalWorkers(3, threads=1) as started:
        yield started


def read(model: Model) -> np.ndarray:
    with Context(model, PARAMS) as context:
        return logits_of(context, model.tokenize(TEXT)[:N_TOKENS])


@pytest.fixture(scope="module")
def alone(smollm2: Path) -> np.ndarray:
    with Model(smollm2, ModelParams(repack=False)) as model:
        return read(model)


@pytest.mark.parametrize("word", ["f16", "bf16"])
@pytest.mark.parametrize("direct", [True, False])
def test_logits_are_near_and_the_same_on_every_path(word, direct, workers, smollm2, alone):
    with (
        caravan.connect(workers.endpoints[:2], direct_copies=direct, wire_dtype=word) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
    ):
        way = cluster.routes()["RPC0", "RPC1"].path
        assert way is (Way.DIRECT if direct else Way.RELAY)
        found = read(model)
        result = compare(alone, found)
        assert 0 < result.mean_kl < 0.03
        assert result.same_top > 0.9
        # what the relay converts is what a push converts
        for route in (False, True):
            with (
                caravan.connect(
                    workers.endpoints[:2], direct_copies=route, wire_dtype=word
                ) as other,
                Model(smollm2, devices=other.devices) as again,
            ):
                other.routes()
                assert np.array_equal(read(again), found)


def test_the_type_can_be_changed_between_two_decodings(workers, smollm2, alone):
    with (
        caravan.connect(workers.endpoints) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
    ):
        assert np.array_equal(read(model), alone)
        tokens = model.tokenize(TEXT)[:N_TOKENS]
        half = of_wire_dtype(cluster, model, tokens, "f16", PARAMS)
        assert (half.n_tokens, cluster.wire_dtype) == (N_TOKENS, "f32")
        assert half.mean_kl > 0
        cluster.wire_dtype = "bf16"
        assert not np.array_equal(read(model), alone)
        # what was written in another type before is not taken for what it should be
        cluster.wire_dtype = "f32"
        assert np.array_equal(read(model), alone)
        with pytest.raises(caravan.errors.UsageError, match="f8"):
            cluster.wire_dtype = "f8"


@pytest.mark.parametrize("word", ["f16", "bf16"])
def test_within_a_worker_nothing_is_converted(word, workers, smollm2, alone):
    """Two devices of one worker are as one device: the embeddings of the head alone lose digits."""
    with (
        caravan.connect(workers.endpoints[:1], wire_dtype=word) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
    ):
        one = read(model)
    assert not np.array_equal(one, alone)
    with (
        caravan.Worker("CPU:1,CPU:1") as worker,
        caravan.connect([worker.endpoint], wire_dtype=word) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
    ):
        assert np.array_equal(read(model), one)
        cluster.devices[0].wire_type = WireType.F32
        assert np.array_equal(read(model), alone)


def test_llama_servers_get_what_they_understand(workers, smollm2, alone):
    with (
        caravan.connect(workers.endpoints[:2], extension=False, wire_dtype="f16") as cluster,
        Model(smollm2, devices=cluster.devices) as model,
    ):
        assert [note.split(" ", 1)[1] for note in cluster.notes] == [
            "speaks llama.cpp's protocol: f32 travels there"
        ] * 2
        assert np.array_equal(read(model), alone)


def test_without_a_type_there_is_nothing_to_note(workers):
    with caravan.connect(workers.endpoints[:1], extension=False) as cluster:
        assert cluster.notes == []
    with caravan.connect(workers.endpoints[:1], wire_dtype="f16") as cluster:
        assert cluster.notes == []


def test_activations_are_half_as_long(workers, smollm2):
    """Counted on the streams: the embeddings, and the relay both ways."""
    sent: dict[str, list[int]] = {}
    received: dict[str, int] = {}
    with (
        caravan.connect(workers.endpoints[:2], direct_copies=False) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
    ):
        streams = [device.link.stream for device in cluster.devices]
        for word in ("f32", "f16", "bf16"):
            cluster.wire_dtype = word
            with Context(model, PARAMS) as context:
                # the graphs, and what is the same in every step, are there after these
                for token in (1, 2, 3):
                    context.decode([token])
                    context.logits()
                before = [stream.bytes_sent for stream in streams]
                got = streams[0]._reader.received
                context.decode([4])
                context.logits()
                sent[word] = [s.bytes_sent - b for s, b in zip(streams, before, strict=True)]
                received[word] = streams[0]._reader.received - got
    row = 4 * 576
    assert sent["f16"] == sent["bf16"]
    for full, half in zip(sent["f32"], sent["f16"], strict=True):
        # a command of its own costs a few bytes
        assert row // 2 - 64 <= full - half <= row // 2 + 64
    assert received["f32"] - received["f16"] == received["f32"] - received["bf16"] == row // 2


def test_a_cache_of_f32_and_logits_stay_whole(workers, smollm2):
    """On one device nothing but the embeddings travels as an activation."""
    with (
        caravan.connect(workers.endpoints[:1], wire_dtype="f16") as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, ContextParams(n_ctx=64, type_k="f32", type_v="f32", n_threads=1)) as context,
    ):
        context.decode(model.tokenize(TEXT)[:20])
        logits = context.logits()
        assert (logits.astype(np.float16).astype(np.float32) != logits).mean() > 0.9
        state = context.save_state()
        context.decode([5])
        expected = context.logits()
        assert context.restore_state(state)
        context.decode([5])
        assert np.array_equal(context.logits(), expected)
