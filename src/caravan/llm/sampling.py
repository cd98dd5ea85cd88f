"""How the next token is chosen: the engine's own sampler chain, in llama.cpp's usual order."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from caravan import engine
from caravan.llm.context import Context


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling values; the defaults are llama-cli's.

    Attributes:
        temp: temperature; 0 always takes the most likely token.
        top_k: keep the k most likely tokens; 0: all.
        top_p: keep the most likely tokens whose probabilities sum up to this; 1: all.
        min_p: drop tokens less likely than this share of the most likely one; 0: none.
        repeat_penalty: divide the logits of the last `repeat_last_n` tokens by this; 1: off.
        seed: of the random choice; None: another one each time.
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int | None = None


class Sampler:
    """A sampler chain; owns its C object."""

    def __init__(self, params: SamplingParams) -> None:
        self._llama = engine.load().llama
        self._chain = self._llama.sampler_chain_init(self._llama.sampler_chain_default_params())
        llama = self._llama
        if params.repeat_penalty != 1.0:
            self._add(
                llama.sampler_init_penalties(params.repeat_last_n, params.repeat_penalty, 0.0, 0.0)
            )
        if params.temp <= 0:
            self._add(llama.sampler_init_greedy())
            return
        self._add(llama.sampler_init_top_k(params.top_k))
        self._add(llama.sampler_init_top_p(params.top_p, 1))
        self._add(llama.sampler_init_min_p(params.min_p, 1))
        self._add(llama.sampler_init_temp(params.temp))
        seed = secrets.randbits(32) if params.seed is None else params.seed & 0xFFFFFFFF
        self._add(llama.sampler_init_dist(seed))

    def _add(self, sampler: int) -> None:
        self._llama.sampler_chain_add(self._chain, sampler)

    def sample(self, context: Context, index: int = -1) -> int:
        """The next token after output `index`; the chain takes note of it."""
        context.synchronize()
        return int(self._llama.sampler_sample(self._chain, context.handle, index))

    def accept(self, token: int) -> None:
        """Take note of a token of the prompt."""
        self._llama.sampler_accept(self._chain, token)

    def close(self) -> None:
        """Free the chain. Idempotent."""
        chain, self._chain = getattr(self, "_chain", None), None
        if chain:
            self._llama.sampler_free(chain)

    def __del__(self) -> None:
        self.close()
