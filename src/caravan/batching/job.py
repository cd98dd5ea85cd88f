"""`Job`: one request on its way through a batcher: what it has come to, and what it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Protocol

from caravan.batching.request import Chunk, Request, Token, Usage
from caravan.errors import CaravanError, SamplingError
from caravan.llm.logprobs import token_logprobs
from caravan.llm.model import Model
from caravan.llm.sampling import Sampler
from caravan.llm.shared import SharedContext
from caravan.llm.text import TextStream

Sink = Callable[[Chunk], None]


class Owner(Protocol):
    def cancelled(self, job: Job) -> None: ...


class Job:
    """A request that was submitted. `cancel` may be called from any thread.

    Attributes:
        request: as given.
        is_cancelled: nobody wants the rest.
        ended: the last chunk has been given.
        n_cached, n_gen: as in Usage.
    """

    def __init__(self, request: Request, sink: Sink, model: Model, owner: Owner) -> None:
        """Raises UsageError for sampling that the engine refuses."""
        self.request = request
        self.is_cancelled = False
        self.ended = False
        self.n_cached = self.n_gen = 0
        self._sink = sink
        self._model = model
        self._owner = owner
        self._sampler = Sampler(request.sampling, model)
        self._sampler.accept(request.prompt)
        self._text = TextStream(request.stop)
        # those that are asked for, until their text is told: a stop text may come of them
        self._untold: list[Token] = []
        self._ending = threading.Lock()
        self._submitted = time.monotonic()
        self._began = self._first = 0.0

    def __repr__(self) -> str:
        state = "ended" if self.ended else f"{self.n_gen} tokens"
        return f"<Job of {len(self.request.prompt)} prompt tokens: {state}>"

    def cancel(self) -> None:
        """It ends at the next step, with a chunk that says so. Idempotent."""
        self.is_cancelled = True
        self._owner.cancelled(self)

    @property
    def begun(self) -> bool:
        return self._began > 0

    def drop(self) -> None:
        """It was not taken: nothing is told of it."""
        self.ended = True
        self._sampler.close()

    def begin(self, n_cached: int) -> None:
        """It has a slot, which holds that much of the prompt."""
        self._began = time.monotonic()
        self.n_cached = n_cached

    def sample(self, context: SharedContext, index: int, room: int) -> int | None:
        """Choose the next token by the logits of `index`, and tell of it; None at the end.

        Args:
            room: how many more tokens the slot can hold.

        Raises WorkerLost.
        """
        try:
            finish, token = self._choose(context, index)
        except SamplingError as exc:
            # the others in the lane have theirs
            self.end("error", exc)
            return None
        if not finish and room <= 0:
            finish = "context"
        if finish:
            self.end(finish)
            return None
        return token

    def _choose(self, context: SharedContext, index: int) -> tuple[str, int]:
        """Why it ends, and the token."""
        if self.n_gen == self.request.max_tokens:
            return "length", -1
        token = self._sampler.sample(context, index)
        if not self._first:
            # only now the prompt has been computed: what was asked for before is waited for there
            self._first = time.monotonic()
        if self._model.is_eog(token):
            return "eog", token
        self.n_gen += 1
        piece = self._model.piece(token)
        self._untold += self._logprobs(context, index, token, piece)
        text = self._text.feed(piece)
        if text:
            self._give(Chunk(text, self._told(text)))
        if self._text.stopped:
            return "stop", token
        return "length" if self.n_gen == self.request.max_tokens else "", token

    def _told(self, text: str) -> tuple[Token, ...]:
        """The tokens of a text, which may end where a stop text begins: with its own first token,
        or within one that is told of whole."""
        tokens, self._untold = tuple(self._untold), []
        if not self._text.stopped:
            return tokens
        left = len(text.encode())
        starts = accumulate((len(token.piece) for token in tokens), initial=0)
        return tuple(token for token, start in zip(tokens, starts, strict=False) if start < left)

    def _logprobs(
        self, context: SharedContext, index: int, token: int, piece: bytes
    ) -> Iterator[Token]:
        wanted = self.request.logprobs
        if wanted is not None:
            own, top = token_logprobs(context.logits(index), token, wanted)
            others = ((i, self._model.piece(i, special=True), logprob) for i, logprob in top)
            yield Token(token, piece, own, tuple(others))

    def end(self, finish: str, error: CaravanError | None = None) -> None:
        """Give the last chunk, unless it was given."""
        with self._ending:
            if self.ended:
                return
            self.ended = True
        rest, tokens = "", tuple[Token, ...]()
        if finish not in ("stop", "cancelled", "error"):
            rest, tokens = self._text.finish(), tuple(self._untold)
        self._sampler.close()
        self._give(Chunk(rest, tokens, finish, self._usage(), error))

    def _usage(self) -> Usage:
        now = time.monotonic()
        began, first = self._began or now, self._first or now
        return Usage(
            len(self.request.prompt),
            self.n_cached,
            self.n_gen,
            began - self._submitted,
            first - began,
            now - first,
        )

    def _give(self, chunk: Chunk) -> None:
        try:
            self._sink(chunk)
        except Exception:
            # whoever cannot take the answer wants no more of it
            self.is_cancelled = True
