"""Logits that a test has written, for samplers: no context, no computing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from caravan import engine
from caravan.errors import DecodeError
from caravan.llm import Model
from caravan.llm.candidates import Candidates


class Scripted:
    """The same logits each time. All are 0 but those that are named."""

    def __init__(self, model: Model, values: Mapping[int, float] = {}) -> None:
        self.model = model
        self.values = np.zeros(model.n_vocab, np.float32)
        for token, value in values.items():
            self.values[token] = value

    def logits(self, i: int) -> np.ndarray:
        if i != -1:
            raise DecodeError(f"no logits of token {i}")
        return self.values.copy()

    def sample(self, chain: int, i: int) -> int:
        """As llama_sampler_sample does."""
        candidates = Candidates(len(self.values))
        candidates.fill(self.logits(i))
        candidates.apply(chain)
        token = candidates.selected()
        engine.load().llama.sampler_accept(chain, token)
        return token
