"""`Lasting`: what a context does about lost devices: another llama_context, and all read again.

The common part of `Context` and `SharedContext`, which know what they have read. One thread at a
time; several contexts of one model may lose it together, and one of them brings it back.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from caravan.errors import ContextError, WorkerLost
from caravan.llm.model import Model
from caravan.llm.params import ContextParams
from caravan.llm.raw import RawContext
from caravan.llm.recovery import Back, lacks_memory
from caravan.llm.resume import Losses, Resume, Resumed, delays, is_refusal, policy

_T = TypeVar("_T")


class Lasting(ABC):
    """See the module.

    Attributes:
        model, params: as given.
        resume: what is done when a device is lost; None: WorkerLost is raised.
        n_batch: most tokens the engine takes in one call.
        handle: address of the llama_context; 0 once closed. Another one after a loss.
    """

    def __init__(self, model: Model, params: ContextParams, resume: bool | Resume | None) -> None:
        """Allocate it on all devices of the model; blocks. Raises ContextError and WorkerLost."""
        self.model = model
        self.params = params
        self.resume = model.resume if resume is None else policy(resume)
        self._losses = Losses()
        # calls so far; how many of them are known to have been computed, now and at the last loss
        self._made = self._computed = 0
        self._computed_then = -1
        self._raw: RawContext | None = None
        self._closed = False
        model.require_open()
        if model.params.vocab_only:
            raise ContextError(f"{model.path}: only the vocabulary was loaded")
        try:
            self._raw = RawContext(model, self.params)
        except WorkerLost as lost:
            self._go_on(lost)
        self.n_batch = self._require_raw().n_batch

    @property
    def handle(self) -> int:
        return self._raw.handle if self._raw is not None else 0

    def close(self) -> None:
        """Free it. Does nothing the second time."""
        self._closed = True
        raw, self._raw = self._raw, None
        if raw is not None:
            raw.close()

    def require_open(self) -> int:
        """The handle; raises ContextError once the context is closed."""
        return self._require_raw().require_open()

    def _require_raw(self) -> RawContext:
        if self._raw is None:
            raise ContextError("the context is closed")
        return self._raw

    @abstractmethod
    def _replay(self, raw: RawContext) -> None:
        """Have an empty llama_context read all that was read so far."""

    @abstractmethod
    def _n_replayed(self) -> int:
        """How many tokens that is."""

    @contextmanager
    def resuming(self, resume: Resume | None) -> Iterator[None]:
        """Inside, this is done when a device is lost."""
        before, self.resume = self.resume, resume
        try:
            yield
        finally:
            self.resume = before

    def _surviving(self, call: Callable[[], _T]) -> _T:
        """What a call gives, also if devices are lost meanwhile and that is to be got over."""
        while True:
            try:
                return call()
            except WorkerLost as lost:
                self._go_on(lost)

    def _go_on(self, lost: WorkerLost) -> None:
        """Be as before the loss; raises it where nobody wants that, or it cannot be."""
        resume = self.resume
        if resume is None or lost.outcome or self._closed or is_refusal(lost):
            raise lost
        began = time.monotonic()
        if self._computed > self._computed_then:
            self._losses = Losses()
        self._computed_then = self._computed
        back = Back((), {})
        newest = lost
        while True:
            self._losses.add(newest, resume)
            try:
                back = back.and_then(self.model.bring_back(newest, resume, self._losses))
                self._read_again(newest, resume)
                break
            except WorkerLost as again:
                if again.outcome:
                    raise
                newest = again
        resume.tell(self._resumed(lost, back, time.monotonic() - began))

    def _resumed(self, lost: WorkerLost, back: Back, seconds: float) -> Resumed:
        names = tuple(device.name for device in self.model.devices)
        return Resumed.of(lost, back.lost, back.gone, names, seconds, self._n_replayed())

    def _read_again(self, lost: WorkerLost, resume: Resume) -> None:
        """All that was read so far, in another llama_context."""
        if self._raw is not None:
            self._raw.close(lost)
        self._raw = raw = self._make_again(lost, resume)
        try:
            self._replay(raw)
            raw.synchronize()
        except BaseException:
            # half of a conversation is none
            raw.close(lost)
            raise
        self._computed = self._made

    def _make_again(self, lost: WorkerLost, resume: Resume) -> RawContext:
        """What a dying session still holds may be missing for a moment."""
        deadline = time.monotonic() + resume.wait
        for delay in delays():
            try:
                return RawContext(self.model, self.params)
            except ContextError as exc:
                if time.monotonic() + delay > deadline or not lacks_memory(exc):
                    raise lost.but(f"a new context failed: {exc}") from exc
            time.sleep(delay)
        raise AssertionError


class LastingLogits(Lasting):
    """One whose logits may be asked for."""

    def synchronize(self) -> None:
        """Wait until everything is computed; raises WorkerLost if a device was lost meanwhile."""
        self._surviving(lambda: self._require_raw().synchronize())
        self._computed = self._made

    def logits(self, i: int = -1) -> NDArray[np.float32]:
        """A copy of the logits of token `i` of the last engine call, or counted from the end of
        those that have logits. Waits; raises DecodeError when there are none, and WorkerLost."""
        values = self._surviving(lambda: self._require_raw().logits(i))
        self._computed = self._made
        return values

    def sample(self, chain: int, i: int = -1) -> int:
        """The token that a sampler chain of the engine takes by the logits of output `i`.

        Args:
            chain: address of the llama_sampler.
            i: as for `logits`, which says what is raised.
        """
        token = self._surviving(lambda: self._require_raw().sample(chain, i))
        self._computed = self._made
        return token
