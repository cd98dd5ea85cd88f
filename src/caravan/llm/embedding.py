"""`Embedder`: texts to vectors, with the pooling that the model says, or the mean.

Several short texts are computed together; a long one is computed part by part, if the model is
causal. Nothing is kept between the texts, so that after a loss the newest call is made again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from caravan import interrupt
from caravan.errors import UsageError
from caravan.llm.lasting import Lasting
from caravan.llm.model import Model
from caravan.llm.params import USUAL_CTX, ContextParams, usual_n_ctx
from caravan.llm.raw import RawContext, Rows
from caravan.llm.resume import Resume

# Texts in one call.
_MOST_TEXTS = 16
_POOLINGS = ("mean", "cls", "last")

Tokens = NDArray[np.int32]


class Embedder(Lasting):
    """See the module. Use it as a context manager, or `close` it. Any thread may call `embed`.

    Attributes:
        pooling: `mean`, `cls` (the embedding of the first token) or `last`.
        n_ctx: tokens that a text may have.
        n_embd: numbers of a vector.
    """

    def __init__(
        self,
        model: Model,
        params: ContextParams | None = None,
        pooling: str = "",
        *,
        resume: bool | Resume | None = None,
    ) -> None:
        """Allocate it on all devices of the model; blocks.

        Args:
            params: `n_ctx` is the most tokens of a text, by default 4096, or as many as the model
                was made for. Of a causal model `n_ubatch` are computed at once.
            pooling: empty: as the model says, or `mean`.
            resume: as for a Context.

        Raises UsageError for a pooling that gives no vector of the text, and for a model that gives
        none; ContextError, WorkerLost.
        """
        self.pooling = _pooling(model, pooling)
        self._one_at_a_time = threading.Lock()
        super().__init__(model, _sized(model, params, self.pooling), resume)
        raw = self._require_raw()
        if raw.keeps and model.has_encoder:
            self.close()
            raise UsageError(
                f"{model.path}: this model reads texts to answer them, not for vectors"
            )
        self.n_ctx = raw.n_ctx
        if raw.whole:
            self.n_ctx = min(raw.n_batch, model.n_ctx_train or raw.n_batch)
        self.n_embd = model.n_embd_out

    def __repr__(self) -> str:
        state = f"{self.n_ctx} tokens, {self.pooling}" if self.handle else "closed"
        return f"<Embedder of {self.model.path.name}: {state}>"

    def __enter__(self) -> Embedder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def embed(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """The vectors of texts, given by their tokens, with what the model wants around them.

        Returns an array of a row each, whose squares sum up to 1. Raises UsageError for a text that
        is empty or too long, WorkerLost and, after Ctrl-C, KeyboardInterrupt.
        """
        lists = [self._checked(text, number) for number, text in enumerate(texts)]
        vectors = np.zeros((len(lists), self.n_embd), np.float64)
        with self._one_at_a_time:
            for group in self._groups(lists):
                found = self._surviving(partial(self._compute, [lists[i] for i in group]))
                self._made += 1
                self._computed = self._made
                vectors[group] = found
        lengths = np.sqrt((vectors * vectors).sum(axis=1, keepdims=True))
        return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)

    def _checked(self, text: Sequence[int], number: int) -> Tokens:
        tokens = np.asarray(text, np.int64)
        if not len(tokens):
            raise UsageError(f"text {number} is empty")
        if len(tokens) > self.n_ctx:
            raise UsageError(
                f"text {number} has {len(tokens)} tokens; at most {self.n_ctx} are possible"
            )
        if not (tokens.min() >= 0 and tokens.max() < self.model.n_vocab):
            raise UsageError(f"text {number}: a token is not in the vocabulary")
        return tokens.astype(np.int32)

    def _groups(self, texts: list[Tokens]) -> Iterator[list[int]]:
        """The numbers of texts that are computed in one call; a long one is alone."""
        group: list[int] = []
        size = 0
        for number, tokens in enumerate(texts):
            if group and (len(group) == self.params.n_seq_max or size + len(tokens) > self.n_batch):
                yield group
                group, size = [], 0
            group.append(number)
            size += len(tokens)
        if group:
            yield group

    def _compute(self, texts: list[Tokens]) -> NDArray[np.float64]:
        raw = self._require_raw()
        raw.clear()
        if len(texts[0]) > self.n_batch:
            return self._compute_long(raw, texts[0])
        positions = [np.arange(len(tokens), dtype=np.int32) for tokens in texts]
        sequences = np.repeat(np.arange(len(texts), dtype=np.int32), [len(t) for t in texts])
        self._read(raw, np.concatenate(texts), np.concatenate(positions), sequences)
        return np.array([raw.embedding(number) for number in range(len(texts))], np.float64)

    def _compute_long(self, raw: RawContext, tokens: Tokens) -> NDArray[np.float64]:
        """Of a causal model, which remembers the parts before: each call gives what it has pooled
        of its part."""
        sizes, found = [], []
        for at in range(0, len(tokens), self.n_batch):
            part = tokens[at : at + self.n_batch]
            positions = np.arange(at, at + len(part), dtype=np.int32)
            self._read(raw, part, positions, np.zeros(len(part), np.int32))
            sizes.append(len(part))
            found.append(raw.embedding(0).astype(np.float64))
        if self.pooling == "mean":
            return np.average(found, axis=0, weights=sizes)[None]
        return found[0 if self.pooling == "cls" else -1][None]

    def _read(self, raw: RawContext, tokens: Tokens, positions: Tokens, sequences: Tokens) -> None:
        with interrupt.deferred():
            # the engine wants the outputs of all
            raw.decode_rows(Rows(tokens, positions, sequences, np.ones(len(tokens), np.int8)))
        raw.check()

    def _replay(self, raw: RawContext) -> None:
        """Nothing is kept."""

    def _n_replayed(self) -> int:
        return 0


def _pooling(model: Model, wanted: str) -> str:
    own = model.pooling if model.pooling != "none" else ""
    pooling = wanted or own or "mean"
    if pooling not in _POOLINGS:
        whose = "pooling" if wanted else f"{model.path}: its pooling"
        raise UsageError(
            f"{whose} {pooling!r} gives no vector of a text: {', '.join(_POOLINGS)} do"
        )
    return pooling


def _sized(model: Model, params: ContextParams | None, pooling: str) -> ContextParams:
    """Every call fits into one ubatch, because the engine pools no more than one at once."""
    wanted = params or ContextParams(n_ctx=usual_n_ctx(model.n_ctx_train))
    n_ctx = wanted.n_ctx or model.n_ctx_train or USUAL_CTX
    n_ubatch = min(wanted.n_ubatch, n_ctx) if model.is_causal else n_ctx
    return replace(
        wanted,
        n_ctx=n_ctx,
        n_batch=n_ubatch,
        n_ubatch=n_ubatch,
        # a recurrent model has a state of its size for each
        n_seq_max=1 if model.is_recurrent else _MOST_TEXTS,
        kv_unified=True,
        embeddings=True,
        pooling=pooling,
    )
