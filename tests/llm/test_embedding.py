"""Vectors of texts: the engine's own numbers, pooled and of length 1; and what has none is told."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from caravan import engine
from caravan.engine.llama import Batch
from caravan.errors import ContextError, UsageError
from caravan.llm import ContextParams, Embedder, Model, ModelParams
from caravan.llm.params import c_context_params
from e2e.architectures import ENCODERS, make

TEXTS = (
    "The cat sat on the mat.",
    "A kitten lay on the rug.",
    "Shares fell sharply in London on Thursday.",
    "x",
)


def of_the_engine(model: Model, texts: list[list[int]], pooling: str) -> np.ndarray:
    """What the engine computes of these texts in one call, with nothing of ours in between."""
    llama = engine.load().llama
    size = sum(map(len, texts))
    params = ContextParams(
        n_ctx=512, n_seq_max=16, kv_unified=True, embeddings=True, pooling=pooling
    )
    handle = llama.init_from_model(model.handle, c_context_params(params))
    tokens = np.concatenate([np.array(text, np.int32) for text in texts])
    positions = np.concatenate([np.arange(len(text), dtype=np.int32) for text in texts])
    numbers = np.repeat(np.arange(len(texts), dtype=np.int32), [len(text) for text in texts])
    counts, outputs = np.ones(size, np.int32), np.ones(size, np.int8)
    places = numbers.ctypes.data + 4 * np.arange(size, dtype=np.uint64)
    arrays = (tokens, positions, counts, places, outputs)
    token, pos, n_seq_id, seq_id, logits = (array.ctypes.data for array in arrays)
    batch = Batch(
        n_tokens=size, token=token, pos=pos, n_seq_id=n_seq_id, seq_id=seq_id, logits=logits
    )
    try:
        assert llama.decode(handle, batch) == 0
        found = []
        for number in range(len(texts)):
            address = llama.get_embeddings_seq(handle, number)
            found.append(np.array((ctypes.c_float * model.n_embd_out).from_address(address)))
    finally:
        llama.free(handle)
    vectors = np.array(found, np.float64)
    lengths = np.sqrt((vectors * vectors).sum(axis=1, keepdims=True))
    return (vectors / lengths).astype(np.float32)


@pytest.fixture(scope="module")
def texts(model) -> list[list[int]]:
    return [model.tokenize(text) for text in TEXTS]


@pytest.fixture(scope="module")
def embedder(model) -> Iterator[Embedder]:
    with Embedder(model, ContextParams(n_ctx=512, n_ubatch=64)) as embedder:
        yield embedder


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_they_are_the_engines_own(model, texts, pooling):
    with Embedder(model, ContextParams(n_ctx=512), pooling) as embedder:
        assert embedder.pooling == pooling
        vectors = embedder.embed(texts)
        assert vectors.dtype == np.float32 and vectors.shape == (len(texts), model.n_embd)
        np.testing.assert_array_equal(vectors, of_the_engine(model, texts, pooling))


def test_they_have_the_length_one_and_are_near_where_texts_are(embedder, texts):
    vectors = embedder.embed(texts)
    np.testing.assert_allclose((vectors.astype(np.float64) ** 2).sum(axis=1), 1, atol=1e-6)
    near = vectors @ vectors.T
    assert near[0, 1] > near[0, 2] and near[0, 1] > near[1, 3]


@pytest.mark.parametrize(("flash_attn", "near"), [("on", 0.998), ("off", 0.999999)])
def test_what_stands_beside_a_text_changes_no_more_than_its_last_digits(
    model, texts, flash_attn, near
):
    params = ContextParams(n_ctx=256, n_ubatch=64, flash_attn=flash_attn)
    with Embedder(model, params) as embedder:
        # more than go into one call
        together = embedder.embed(texts * 5)
        alone = np.concatenate([embedder.embed([text]) for text in texts] * 5)
    assert ((together * alone).sum(axis=1) > near).all()


def test_the_text_before_leaves_nothing(embedder, texts):
    first = embedder.embed(texts[:1])
    embedder.embed(texts[1:])
    np.testing.assert_array_equal(embedder.embed(texts[:1]), first)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_long_text_is_computed_in_parts(model, pooling):
    tokens = (model.tokenize(" ".join(TEXTS)) * 6)[:100]
    params = ContextParams(n_ctx=256, n_ubatch=256, flash_attn="off")
    with Embedder(model, params, pooling) as whole:
        expected = whole.embed([tokens])
    with Embedder(model, replace(params, n_ubatch=48), pooling) as parts:
        found = parts.embed([[5], tokens, [6]])
    assert (found[1] * expected[0]).sum() > 0.9999


def test_no_texts_have_no_vectors(embedder):
    assert embedder.embed([]).shape == (0, embedder.n_embd)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ([], "text 1 is empty"),
        ([1] * 513, "text 1 has 513 tokens; at most 512"),
        ([-1], "not in the vocabulary"),
        ([49152], "not in the vocabulary"),
    ],
)
def test_a_text_that_has_none_is_told(embedder, text, words):
    with pytest.raises(UsageError, match=words):
        embedder.embed([[1], text])


@pytest.mark.parametrize("pooling", ["none", "rank", "max"])
def test_a_pooling_that_gives_no_vector_is_refused(model, pooling):
    with pytest.raises(UsageError, match=pooling):
        Embedder(model, pooling=pooling)


def test_closed_is_closed(model):
    embedder = Embedder(model, ContextParams(n_ctx=256))
    assert "256 tokens, mean" in repr(embedder)
    embedder.close()
    embedder.close()
    with pytest.raises(ContextError):
        embedder.embed([[1]])
    assert "closed" in repr(embedder)


def test_without_weights_there_are_none(smollm2):
    with (
        Model(smollm2, ModelParams(vocab_only=True)) as words,
        pytest.raises(ContextError, match="vocabulary"),
    ):
        Embedder(words)


def test_threads_take_turns(embedder, texts):
    expected = [embedder.embed([text]) for text in texts]
    found: dict[int, list[np.ndarray]] = {}

    def work(number: int) -> None:
        found[number] = [embedder.embed([text]) for text in texts]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        np.testing.assert_array_equal(found[number], expected)


# other models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("arch", ENCODERS)
def test_encoders_compute_a_text_at_once(folder, arch):
    path = folder / f"{arch}.gguf"
    make(path, arch)
    some = [[1, 2, 3], [4] * 60, [7, 8]]
    with Model(path) as model:
        assert not model.is_causal and model.pooling in ("mean", "cls")
        with Embedder(model) as embedder:
            assert embedder.n_ctx == 256
            assert embedder.pooling == model.pooling
            np.testing.assert_array_equal(
                embedder.embed(some), of_the_engine(model, some, model.pooling)
            )
            assert np.isfinite(embedder.embed([[9] * 256, *some])).all()
            with pytest.raises(UsageError, match="at most 256"):
                embedder.embed([[1] * 257])
        # it knows no place behind those that it was made for
        with Embedder(model, ContextParams(n_ctx=1024)) as embedder:
            assert embedder.n_ctx == 256


@pytest.mark.parametrize("arch", ["mamba", "rwkv7", "lfm2"])
def test_models_with_a_state_take_one_text_after_the_other(folder, arch):
    path = folder / f"{arch}.gguf"
    make(path, arch)
    some = [[1, 2, 3], [4] * 60, [7, 8], [1, 2, 3]]
    with Model(path) as model, Embedder(model, ContextParams(n_ubatch=32)) as embedder:
        vectors = embedder.embed(some)
        np.testing.assert_allclose(vectors[0], vectors[3], atol=1e-5)
        for number, text in enumerate(some):
            np.testing.assert_allclose(embedder.embed([text])[0], vectors[number], atol=1e-3)


def test_a_model_that_ranks_makes_no_vectors(folder):
    path = folder / "rank.gguf"
    make(path, "llama", {"pooling_type": 4})
    with Model(path) as model, pytest.raises(UsageError, match="its pooling 'rank'"):
        Embedder(model)
