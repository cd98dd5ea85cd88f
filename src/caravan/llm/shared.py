"""`SharedContext`: one llama_context whose memory several conversations share, a slot each.

Tokens of several slots are computed together. Knows what every slot holds, so that after a loss all
of it can be read again. Called by `batching`, on one thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from caravan.errors import DecodeError, NoConversations
from caravan.llm.devices import Mark
from caravan.llm.lasting import LastingLogits
from caravan.llm.model import Model
from caravan.llm.params import ContextParams
from caravan.llm.raw import RawContext, Rows
from caravan.llm.resume import Resume

# Attention of fewer tokens than this (GGML_FA_TILE_Q of ggml's CPU kernels) is summed up in another
# order than that of more; otherwise a token's numbers are the same to the bit, whatever is computed
# with it.
TILE = 64


class Part(NamedTuple):
    """Tokens that a slot reads in one call.

    Attributes:
        output: whether the logits of the last one are computed.
    """

    slot: int
    tokens: Sequence[int]
    output: bool


class SharedContext(LastingLogits):
    """See the module. Use it as a context manager, or `close` it.

    Attributes:
        held: the tokens of each slot.
        n_ubatch: most tokens that are computed at once.
    """

    def __init__(
        self,
        model: Model,
        n_slots: int,
        params: ContextParams | None = None,
        *,
        resume: bool | Resume | None = None,
    ) -> None:
        """Allocate it on all devices of the model; blocks.

        Args:
            params: with the tokens that all slots together can hold.

        Raises NoConversations for a model that keeps nothing of what it reads, ContextError,
        WorkerLost.
        """
        self.held: list[list[int]] = [[] for _ in range(n_slots)]
        # how they were read, as far as it matters: calls of fewer than `TILE`, and others
        self._sizes: list[list[int]] = [[] for _ in range(n_slots)]
        # where the last device is with calls that nobody waits for otherwise
        self._marks: deque[Mark] = deque()
        # the newest call, whose logits may still be asked for
        self._newest: list[Part] = []
        wanted = replace(params or ContextParams(), n_seq_max=n_slots, kv_unified=False)
        super().__init__(model, wanted, resume)
        self.n_ubatch = self._require_raw().n_ubatch
        if not self._require_raw().keeps:
            self.close()
            raise NoConversations(f"{model.path}: this model continues no texts")

    def __repr__(self) -> str:
        state = f"{sum(map(len, self.held))} tokens" if self.handle else "closed"
        return f"<SharedContext of {self.model.path.name}, {len(self.held)} slots: {state}>"

    def __enter__(self) -> SharedContext:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def decode(self, parts: Sequence[Part]) -> list[int]:
        """Read tokens of several slots, each after those that its slot holds.

        May return before the devices have computed. At most `n_batch` tokens in all, and no slot
        twice.

        Returns for each part the number of its logits, for `logits` and `sample`.
        Raises DecodeError, with nothing read, and WorkerLost.
        """
        kept = [len(held) for held in self.held]
        rows = self._rows(parts, kept)
        try:
            self._surviving(lambda: self._read(self._require_raw(), rows))
        except DecodeError:
            for part in parts:
                self._require_raw().rewind(kept[part.slot], part.slot)
            raise
        for part in parts:
            self.held[part.slot].extend(part.tokens)
            join(self._sizes[part.slot], len(part.tokens), self.n_ubatch)
        self._newest = list(parts)
        self._made += 1
        return [int(end) - 1 for end in np.cumsum([len(part.tokens) for part in parts])]

    def _read(self, raw: RawContext, rows: Rows) -> None:
        raw.decode_rows(rows)
        raw.check()

    def _rows(self, parts: Sequence[Part], places: Sequence[int]) -> Rows:
        sizes = [len(part.tokens) for part in parts]
        tokens = np.concatenate([np.asarray(part.tokens, np.int32) for part in parts])
        if not (len(tokens) <= self.n_batch and tokens.min() >= 0):
            raise DecodeError(f"{len(tokens)} tokens at once; n_batch is {self.n_batch}")
        if tokens.max() >= self.model.n_vocab:
            raise DecodeError(f"a token is not in the vocabulary of {self.model.n_vocab}")
        positions = [
            np.arange(places[part.slot], places[part.slot] + size, dtype=np.int32)
            for part, size in zip(parts, sizes, strict=True)
        ]
        outputs = np.zeros(len(tokens), np.int8)
        outputs[np.cumsum(sizes) - 1] = [part.output for part in parts]
        slots = np.repeat(np.array([part.slot for part in parts], np.int32), sizes)
        return Rows(tokens, np.concatenate(positions), slots, outputs)

    def mark(self, most: int) -> None:
        """Wait until the devices have computed all but the newest `most` calls, of those that this
        was called after. Without it whatever is asked for is queued at once, and whoever comes
        then is behind all of it. Raises WorkerLost."""
        if not self.model.devices:
            return

        def wait() -> None:
            while len(self._marks) > most:
                self._marks[0].wait()
                self._marks.popleft()

        mark = self.model.devices[-1].mark()
        if mark is not None:
            self._marks.append(mark)
        self._surviving(wait)

    def keep(self, slot: int, n: int) -> int:
        """Have a slot forget all but its first `n` tokens; how many it holds then: 0 where the
        model cannot go back to that one."""
        if n < len(self.held[slot]):
            if not self._surviving(lambda: self._require_raw().rewind(n, slot)):
                n = 0
                self._surviving(lambda: self._require_raw().rewind(0, slot))
            del self.held[slot][n:]
            cut(self._sizes[slot], n)
            # its logits are of no use to anybody
            self._newest = [part for part in self._newest if part.slot != slot]
        return len(self.held[slot])

    # after a loss

    def _n_replayed(self) -> int:
        return sum(map(len, self.held))

    def _replay(self, raw: RawContext) -> None:
        """What the slots hold, the newest call as it was: its logits may be wanted yet."""
        self._marks.clear()
        last = {part.slot: len(part.tokens) for part in self._newest}
        places = [0] * len(self.held)
        for slot, held in enumerate(self.held):
            sizes = list(self._sizes[slot])
            cut(sizes, len(held) - last.get(slot, 0))
            for size in sizes:
                part = held[places[slot] : places[slot] + size]
                raw.decode_rows(self._rows([Part(slot, part, False)], places))
                places[slot] += size
                raw.check()
        if self._newest:
            raw.decode_rows(self._rows(self._newest, places))
            raw.check()


def join(sizes: list[int], size: int, most: int) -> None:
    """Add a call to those that have read a slot; some may be repeated as one."""
    if sizes and (sizes[-1] < TILE) == (size < TILE):
        together = sizes[-1] + size
        if together <= (TILE - 1 if size < TILE else most):
            sizes[-1] = together
            return
    sizes.append(size)


def cut(sizes: list[int], n: int) -> None:
    """Forget what has come after the first `n` tokens."""
    left = sum(sizes) - n
    while left > 0:
        if sizes[-1] > left:
            sizes[-1] -= left
            return
        left -= sizes.pop()
