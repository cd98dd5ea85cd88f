"""How the next token is chosen: the engine's own sampler chain, in llama.cpp's usual order."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caravan import engine
from caravan.errors import UsageError

# The engine chooses a seed of its own for this one.
_NO_SEED = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling values; the defaults are llama-cli's. Raises UsageError for an impossible one.

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

    def __post_init__(self) -> None:
        # both written so that "not a number" fails too
        for name in ("temp", "repeat_penalty"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} {getattr(self, name)} is not a number from 0 up")
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} {getattr(self, name)} is not a number from 0 to 1")
        if self.repeat_penalty == 0:
            raise UsageError("repeat_penalty 0 would divide by 0; 1 switches it off")
        if self.seed is not None and not 0 <= self.seed < _NO_SEED:
            raise UsageError(f"seed {self.seed} is not a number from 0 to {_NO_SEED - 1}")
        for name in ("top_k", "repeat_last_n"):
            if not 0 <= getattr(self, name) < 1 << 31:
                raise UsageError(f"{name} {getattr(self, name)} is not a count")


class Logits(Protocol):
    """What has logits: a Context or a SharedContext."""

    def sample(self, chain: int, i: int) -> int: ...

    def logits(self, i: int) -> NDArray[np.float32]: ...


class Sampler:
    """A sampler chain. Use it as a context manager, or `close` it.

    Attributes:
        seed: of the random choice, also where none was given.
    """

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        self._llama = llama = engine.load().llama
        self.seed = secrets.randbits(31) if params.seed is None else params.seed
        self._history = params.repeat_last_n if params.repeat_penalty != 1.0 else 0
        self._chain: int = llama.sampler_chain_init(llama.sampler_chain_default_params())
        for sampler in self._samplers(params, n_vocab):
            llama.sampler_chain_add(self._chain, sampler)

    def _samplers(self, params: SamplingParams, n_vocab: int) -> list[int]:
        llama = self._llama
        samplers = []
        if self._history:
            samplers.append(
                llama.sampler_init_penalties(
                    n_vocab, self._history, params.repeat_penalty, 0.0, 0.0
                )
            )
        if params.temp == 0:
            return [*samplers, llama.sampler_init_greedy()]
        return [
            *samplers,
            llama.sampler_init_top_k(params.top_k),
            llama.sampler_init_top_p(params.top_p, 1),
            llama.sampler_init_min_p(params.min_p, 1),
            llama.sampler_init_temp(params.temp),
            llama.sampler_init_dist(self.seed),
        ]

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def sample(self, context: Logits, index: int = -1) -> int:
        """The next token after output `index`; the chain takes note of it.

        Waits for the logits; raises DecodeError when there are none, and WorkerLost.
        """
        return context.sample(self._chain, index)

    def accept(self, tokens: Iterable[int]) -> None:
        """Take note of tokens that were not sampled, such as the prompt's."""
        kept = list(tokens)[-self._history :] if self._history else []
        for token in kept:
            self._llama.sampler_accept(self._chain, token)

    def close(self) -> None:
        """Free the chain. Does nothing the second time."""
        chain, self._chain = self._chain, 0
        if chain:
            self._llama.sampler_free(chain)

    def __del__(self) -> None:
        if getattr(self, "_chain", 0) and not sys.is_finalizing():
            self.close()
