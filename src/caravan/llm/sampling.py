"""How the next token is chosen: the engine's own sampler chain, in llama.cpp's usual order.

A grammar is asked as llama.cpp does it: a token is chosen without it, and only if the grammar
refuses that one, another is chosen of those that it allows.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caravan import engine
from caravan.engine.llama import LOGIT_BIAS
from caravan.errors import NothingAllowed, SamplingError, UsageError
from caravan.llm.candidates import Candidates
from caravan.llm.constraint import Constraint
from caravan.llm.model import Model

# The engine chooses a seed of its own for this one.
_NO_SEED = 0xFFFFFFFF
_BAN = -100.0
# More would be no number for the engine, and is more than any logit in any case.
_MOST_BIAS = 1e9


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling values; the defaults are llama-cli's. Raises UsageError for an impossible one.

    Attributes:
        temp: temperature; 0 always takes the most likely token.
        top_k: keep the k most likely tokens; 0: all.
        top_p: keep the most likely tokens whose probabilities sum up to this; 1: all.
        min_p: drop tokens less likely than this share of the most likely one; 0: none.
        repeat_penalty: divide the logits of the last `repeat_last_n` tokens by this; 1: off.
        frequency_penalty: taken from the logit of a token for each time that it is among the last
            `repeat_last_n`, those of the prompt included; -2 to 2; 0: off.
        presence_penalty: the same, but once.
        repeat_last_n: how far the penalties look back.
        seed: of the random choice; None: another one each time.
        logit_bias: pairs of a token and what is added to its logit, before all else; -100 or less
            forbids the token.
        grammar: GBNF with a rule `root` that the text follows; empty: none. `json_grammar` and
            `json_schema_grammar` make some.
        ignore_eos: never choose a token that ends the generation.
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        # all written so that "not a number" fails too
        for name in ("temp", "repeat_penalty"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} {getattr(self, name)} is not a number from 0 up")
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} {getattr(self, name)} is not a number from 0 to 1")
        for name in ("frequency_penalty", "presence_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise UsageError(f"{name} {getattr(self, name)} is not a number from -2 to 2")
        if self.repeat_penalty == 0:
            raise UsageError("repeat_penalty 0 would divide by 0; 1 switches it off")
        if self.seed is not None and not 0 <= self.seed < _NO_SEED:
            raise UsageError(f"seed {self.seed} is not a number from 0 to {_NO_SEED - 1}")
        for name in ("top_k", "repeat_last_n"):
            if not 0 <= getattr(self, name) < 1 << 31:
                raise UsageError(f"{name} {getattr(self, name)} is not a count")
        for token, bias in self.logit_bias:
            if not bias < math.inf:
                raise UsageError(f"logit_bias {bias} of token {token} is not a number")

    @property
    def penalizes(self) -> bool:
        """Whether any penalty is on."""
        values = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty)
        return self.repeat_last_n > 0 and values != (1.0, 0.0, 0.0)


class Logits(Protocol):
    """What has logits: a Context or a SharedContext."""

    def sample(self, chain: int, i: int) -> int: ...

    def logits(self, i: int) -> NDArray[np.float32]: ...


class Sampler:
    """A sampler chain, and a grammar. Use it as a context manager, or `close` it.

    Attributes:
        seed: of the random choice, also where none was given.
    """

    def __init__(self, params: SamplingParams, model: Model) -> None:
        """Raises UsageError for a token that the model does not have, and for a grammar that cannot
        be used."""
        self._llama = llama = engine.load().llama
        self.seed = secrets.randbits(31) if params.seed is None else params.seed
        self._chain = 0
        self._history = params.repeat_last_n if params.penalizes else 0
        bias = list(_bias(params, model))
        self._banned = frozenset(token for token, value in bias if value == -math.inf)
        self._greedy = not (params.temp or params.grammar or bias or self._history)
        self._constraint: Constraint | None = None
        if params.grammar:
            self._constraint = Constraint(params.grammar, model)
            self._candidates = Candidates(model.n_vocab)
        self._chain = llama.sampler_chain_init(llama.sampler_chain_default_params())
        for sampler in self._samplers(params, bias, model.n_vocab):
            llama.sampler_chain_add(self._chain, sampler)

    def _samplers(
        self, params: SamplingParams, bias: list[tuple[int, float]], n_vocab: int
    ) -> Iterator[int]:
        llama = self._llama
        if bias:
            # the engine keeps a copy
            data = np.array(bias, LOGIT_BIAS)
            yield llama.sampler_init_logit_bias(n_vocab, len(data), data.ctypes.data)
        if self._history:
            yield llama.sampler_init_penalties(
                n_vocab,
                self._history,
                params.repeat_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
        if params.temp == 0:
            yield llama.sampler_init_greedy()
            return
        yield llama.sampler_init_top_k(params.top_k)
        yield llama.sampler_init_top_p(params.top_p, 1)
        yield llama.sampler_init_min_p(params.min_p, 1)
        yield llama.sampler_init_temp(params.temp)
        yield llama.sampler_init_dist(self.seed)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def sample(self, context: Logits, index: int = -1) -> int:
        """The next token after output `index`; chain and grammar take note of it.

        Waits for the logits. Raises DecodeError when there are none, WorkerLost, and SamplingError
        where no token is allowed or the logits are not numbers.
        """
        logits = context.logits(index)
        best = int(logits.argmax())
        # one that is not a number counts as the largest
        usable = not math.isnan(logits[best])
        if self._greedy:
            return best if usable else context.sample(self._chain, index)
        if not usable:
            # the engine would sort them, which has no end where nothing is less than anything
            raise SamplingError("the model's logits are not numbers")
        if self._constraint is None:
            token = context.sample(self._chain, index)
            self._require_possible(token not in self._banned)
            return token
        return self._constrained(logits, self._constraint)

    def _constrained(self, logits: NDArray[np.float32], constraint: Constraint) -> int:
        candidates = self._candidates
        candidates.fill(logits)
        candidates.apply(self._chain)
        token = candidates.selected()
        while not constraint.allows(token):
            n_silent = len(constraint.silent)
            candidates.fill(logits, constraint.silent)
            constraint.restrict(candidates)
            candidates.apply(self._chain)
            token = candidates.selected()
            self._require_possible(constraint.allows(token) or len(constraint.silent) > n_silent)
        self._require_possible(token not in self._banned)
        constraint.accept(token)
        self._llama.sampler_accept(self._chain, token)
        return token

    def _require_possible(self, possible: bool) -> None:
        if not possible:
            raise NothingAllowed("no token is left that the grammar and the biases allow")

    def accept(self, tokens: Iterable[int]) -> None:
        """Take note of tokens that were not sampled, such as the prompt's. The grammar does not."""
        kept = list(tokens)[-self._history :] if self._history else []
        for token in kept:
            self._llama.sampler_accept(self._chain, token)

    def close(self) -> None:
        """Free all. Does nothing the second time."""
        chain, self._chain = self._chain, 0
        if chain:
            self._llama.sampler_free(chain)
        if self._constraint is not None:
            self._constraint.close()

    def __del__(self) -> None:
        if getattr(self, "_chain", 0) and not sys.is_finalizing():
            self.close()


def _bias(params: SamplingParams, model: Model) -> Iterator[tuple[int, float]]:
    for token, bias in params.logit_bias:
        if not 0 <= token < model.n_vocab:
            raise UsageError(
                f"logit_bias of token {token}, which is not in the vocabulary of {model.n_vocab}"
            )
        yield token, min(bias, _MOST_BIAS) if bias > _BAN else -math.inf
    if params.ignore_eos:
        for token in model.words.eog:
            yield token, -math.inf
