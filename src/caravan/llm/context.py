"""`Context`: the memory of one conversation with a model, and the decoding of tokens into it.

Knows what it has read, so that after a loss another llama_context can read it once more. One thread
at a time; several contexts may run on several threads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caravan import interrupt
from caravan.errors import DecodeError, StateError, UsageError
from caravan.llm.history import History, Outputs
from caravan.llm.lasting import LastingLogits
from caravan.llm.model import Model
from caravan.llm.params import ContextParams
from caravan.llm.raw import RawContext
from caravan.llm.resume import Resume
from caravan.llm.statefile import Saved


class Context(LastingLogits):
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
        self.n_past = 0
        self._history = History()
        super().__init__(model, params or ContextParams(), resume)
        self.n_ctx = self._require_raw().n_ctx

    def __repr__(self) -> str:
        state = f"{self.n_past} of {self.n_ctx} tokens" if self.handle else "closed"
        return f"<Context of {self.model.path.name}: {state}>"

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def room(self) -> int:
        """How many more tokens it can hold."""
        # a recurrent model keeps a state of one size, whatever it has read
        return (1 << 31) - 1 if self.model.is_recurrent else self.n_ctx - self.n_past

    @property
    def tokens(self) -> list[int] | None:
        """Those that it holds; None when those of a state that was restored are not known."""
        return self._history.held() if self.n_past else []

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

        def go_back() -> bool:
            # one step for Ctrl-C: what is known here is what the engine holds
            with interrupt.deferred():
                if not self._require_raw().rewind(n_past):
                    return False
                self._history.rewind(n_past)
                self.n_past = n_past
                return True

        if not self._surviving(go_back):
            raise DecodeError(f"this model cannot go back to token {n_past}")

    def clear(self) -> None:
        """Forget everything."""
        self._require_raw()

        def forget() -> None:
            with interrupt.deferred():
                self._history.clear()
                self.n_past = 0
                self._require_raw().clear()

        self._surviving(forget)

    def save_state(self) -> bytes:
        """All that it holds, for `restore_state` of a context of the same model and formats."""
        return self._surviving(lambda: self._require_raw().save_state())

    def restore_state(self, state: bytes, tokens: Sequence[int] | None = None) -> bool:
        """Hold what was saved; False, and empty, where the engine does not accept it.

        `tokens`: those that it holds then, for `tokens`.
        """

        def restore() -> bool:
            with interrupt.deferred():
                raw = self._require_raw()
                if not raw.restore_state(state):
                    return False
                self.n_past = raw.positions()
                self._history.restored(state, self.n_past, tokens)
                return True

        if not self._surviving(restore):
            self.clear()
            return False
        return True

    def save(self, path: str | os.PathLike[str], more: Mapping[str, Any] | None = None) -> None:
        """Put all that it holds into a file, for `load`. A file that is there is replaced at once,
        or stays as it is.

        `more`: what else is to be kept with it, as JSON can have it.

        Raises StateError, and WorkerLost.
        """
        tokens = self.tokens
        if tokens is None:
            raise StateError("what this context holds was restored without its tokens")
        state = self.save_state() if tokens else b""
        Saved.of(self.model, self.params, tokens, state, dict(more or {})).write(path)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Hold what `save` has put into a file; what was to be kept with it.

        Raises StateError for a file of another model or of other formats, for one that is damaged,
        and for more tokens than it can hold; it holds then what it held before, or nothing when
        only the engine has refused it.
        """
        saved = Saved.read(path)
        why = saved.differs(self.model, self.params)
        if why:
            raise StateError(f"{path} is not for this context: {why}")
        self.restore(saved, str(path))
        return saved.more

    def restore(self, saved: Saved, name: str) -> None:
        """Hold what was read from the file `name`; see `load`."""
        count = len(saved.tokens)
        if count > self.n_ctx and not self.model.is_recurrent:
            raise StateError(f"{name} holds {count} tokens; this context has room for {self.n_ctx}")
        if not count:
            self.clear()
        elif not self.restore_state(saved.state, saved.tokens):
            raise StateError(f"{name}: the engine refuses it (saved by ggml {saved.engine})")

    def _n_replayed(self) -> int:
        return self._history.n_tokens

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
