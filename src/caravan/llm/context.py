"""`Context`: the memory of one conversation with a model, and the decoding of tokens into it.

Knows what it has read, so that after a loss another llama_context can read it once more. One thread
at a time; several contexts may run on several threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from caravan import interrupt
from caravan.errors import ContextError, DecodeError, UsageError, WorkerLost
from caravan.llm.history import History, Outputs
from caravan.llm.model import Model
from caravan.llm.params import ContextParams
from caravan.llm.raw import RawContext
from caravan.llm.recovery import Back, lacks_memory
from caravan.llm.resume import Losses, Resume, Resumed, delays, is_refusal, policy

_T = TypeVar("_T")


class Context:
    """A conversation. Use it as a context manager, or `close` it; closing its model does so too.

    Attributes:
        model, params: as given.
        resume: what is done when a device is lost; None: WorkerLost is raised.
        n_ctx: tokens it can hold.
        n_batch: most tokens the engine takes in one call; `decode` splits longer ones itself.
        n_past: tokens it holds.
        handle: address of the llama_context; 0 once closed. Another one after a loss.
    """

    def __init__(
        self,
        model: Model,
        params: ContextParams | None = None,
        *,
        resume: bool | Resume | None = None,
    ) -> None:
        """Allocate it on all devices of the model; blocks.

        Args:
            resume: whether to go on when a worker is lost, here and in all that is called later;
                None: as the model does.

        Raises DoesNotFit and other ContextErrors (most often a device has no room for it), and
        WorkerLost.
        """
        self.model = model
        self.params = params or ContextParams()
        self.resume = model.resume if resume is None else policy(resume)
        self.n_past = 0
        self._history = History()
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
        self.n_ctx = self._require_raw().n_ctx
        self.n_batch = self._require_raw().n_batch

    def __repr__(self) -> str:
        state = f"{self.n_past} of {self.n_ctx} tokens" if self.handle else "closed"
        return f"<Context of {self.model.path.name}: {state}>"

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

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

    @property
    def room(self) -> int:
        """How many more tokens it can hold."""
        # a recurrent model keeps a state of one size, whatever it has read
        return (1 << 31) - 1 if self.model.is_recurrent else self.n_ctx - self.n_past

    def decode(
        self, tokens: Sequence[int], *, pos0: int | None = None, logits: Outputs = "last"
    ) -> None:
        """Read tokens, after those it holds already.

        With workers it may return before they have computed all; `synchronize`, or the call that
        reads the logits, waits.

        Args:
            tokens: of any number.
            pos0: how many of the tokens it holds are to be kept; None for all.
            logits: for which of these tokens to compute logits; `all` only up to `n_batch` tokens.

        Raises DecodeError and, after Ctrl-C, KeyboardInterrupt; `n_past` then tells what was kept.
        Raises WorkerLost when a device fails: without `resume` the context is then of no use.
        """
        self._require_raw()
        if pos0 is not None:
            self.rewind(pos0)
        left = self._checked(tokens, logits).tolist()

        def read() -> None:
            raw = self._require_raw()
            # "all" is one call: each call of the engine forgets the logits of the one before
            step = raw.n_batch if logits == "all" else raw.step
            with interrupt.deferred():
                # `deferred` raises
                while left and not interrupt.pending():
                    part = left[:step]
                    self._read(raw, part, logits if len(part) == len(left) else "none")
                    del left[:step]
                    raw.check()

        self._surviving(read)

    def decode_one(self, token: int) -> None:
        """Read one token, and compute its logits."""
        self.decode((token,))

    def _checked(self, tokens: Sequence[int], logits: Outputs) -> NDArray[np.int64]:
        values = np.asarray(tokens, np.int64)
        count = len(values)
        if logits == "all" and count > self.n_batch:
            raise UsageError(f"logits of {count} tokens at once; n_batch is {self.n_batch}")
        if count and not (values.min() >= 0 and values.max() < self.model.n_vocab):
            raise DecodeError(f"a token is not in the vocabulary of {self.model.n_vocab}")
        if count > self.room:
            raise DecodeError(
                f"{count} more tokens do not fit: the context holds {self.n_past} of {self.n_ctx}"
            )
        if not self._require_raw().keeps and count > self.n_batch:
            raise DecodeError(f"this model reads at most {self.n_batch} tokens (n_ubatch)")
        return values

    def _read(self, raw: RawContext, part: list[int], outputs: Outputs) -> None:
        """One call of the engine, which is remembered."""
        history = self._history
        try:
            raw.decode(part, self.n_past, outputs)
        except DecodeError:
            n_past = raw.positions()
            if n_past > self.n_past:
                history.add(part[: n_past - self.n_past], "none")
            elif n_past < self.n_past:
                history.rewind(n_past)
            self.n_past = n_past
            raise
        if raw.keeps:
            self.n_past += len(part)
        else:
            history.clear()
        history.add(part, outputs)
        self._made += 1

    def rewind(self, n_past: int) -> None:
        """Forget all but the first `n_past` tokens.

        Raises DecodeError when it holds fewer, or when the model cannot go back that far.
        """
        self._require_raw()
        if not 0 <= n_past <= self.n_past:
            raise DecodeError(f"cannot go to token {n_past}: the context holds {self.n_past}")
        if n_past == self.n_past:
            return
        if not self._surviving(lambda: self._require_raw().rewind(n_past)):
            raise DecodeError(f"this model cannot go back to token {n_past}")
        self._history.rewind(n_past)
        self.n_past = n_past

    def clear(self) -> None:
        """Forget everything."""
        self._require_raw()
        self._history.clear()
        self.n_past = 0
        self._surviving(lambda: self._require_raw().clear())

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

    def save_state(self) -> bytes:
        """All that it holds, for `restore_state` of a context of the same model and formats."""
        return self._surviving(lambda: self._require_raw().save_state())

    def restore_state(self, state: bytes) -> bool:
        """Hold what was saved; False, and empty, where the engine does not accept it."""
        if not self._surviving(lambda: self._require_raw().restore_state(state)):
            self.clear()
            return False
        self.n_past = self._surviving(lambda: self._require_raw().positions())
        self._history.restored(state, self.n_past)
        return True

    # losses

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
        return Resumed.of(lost, back.lost, back.gone, names, seconds, self._history.n_tokens)

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

    def _replay(self, raw: RawContext) -> None:
        history = self._history
        at = history.state.kept
        if history.state.data is not None:
            if not raw.restore_state(history.state.data):
                raise DecodeError("what was restored cannot be restored again")
            if at < history.state.size:
                raw.rewind(at)
        last = len(history) - 1
        with interrupt.deferred():
            for number, call in enumerate(history):
                if interrupt.pending():
                    return  # `deferred` raises
                # of all logits only the newest are still there to be asked for
                raw.decode(call.tokens, at, call.outputs if number == last else "none")
                at += call.kept
                if call.kept < len(call.tokens):
                    raw.rewind(at)
                raw.check()
