"""`History`: what a context has read, call by call, so that it can be read again in the same way.

Numbers that are computed for several tokens at once may differ in their last bits from those that
are computed one by one; so what was read in one call is read again in one call. Owned by `context`;
costs four bytes a token, and nine a call.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Outputs = Literal["last", "all", "none"]
_WORDS: tuple[Outputs, ...] = ("none", "last", "all")


class Call(NamedTuple):
    """One call of the engine.

    Attributes:
        tokens: all that it read.
        outputs: for which of them logits were computed.
        kept: how many of them the context still holds.
    """

    tokens: Sequence[int]
    outputs: Outputs
    kept: int


class State(NamedTuple):
    """What the calls began with.

    Attributes:
        data: as it was saved; None for an empty context.
        size: tokens in it.
        kept: how many of them the context still holds.
        tokens: these tokens; None if nobody has said.
    """

    data: bytes | None
    size: int
    kept: int
    tokens: Sequence[int] | None


class History:
    """See the module.

    Attributes:
        state: what the calls began with.
        n_past: tokens that a context with this history holds.
    """

    def __init__(self) -> None:
        self.clear()

    def __repr__(self) -> str:
        return f"<History of {self.n_past} tokens in {len(self)} calls>"

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Call]:
        at = 0
        for size, outputs, kept in zip(self._sizes, self._outputs, self._kept, strict=True):
            yield Call(self._tokens[at : at + size], _WORDS[outputs], kept)
            at += size

    @property
    def n_tokens(self) -> int:
        """Tokens to read again."""
        return len(self._tokens)

    def held(self) -> list[int] | None:
        """The tokens that the context holds; None if those of a restored state are not known."""
        if self.state.tokens is None and self.state.kept:
            return None
        tokens = [*(self.state.tokens or ())[: self.state.kept]]
        for call in self:
            tokens += call.tokens[: call.kept]
        return tokens

    def clear(self) -> None:
        """The context is empty."""
        self.restored(None, 0, ())

    def restored(
        self, data: bytes | None, n_past: int, tokens: Sequence[int] | None = None
    ) -> None:
        """It holds what was saved in `data`: these tokens."""
        self.state = State(data, n_past, n_past, tokens)
        self.n_past = n_past
        self._tokens = array("i")
        self._sizes = array("i")
        self._kept = array("i")
        self._outputs = bytearray()

    def add(self, tokens: Sequence[int], outputs: Outputs) -> None:
        """It has read these, in one call."""
        self._tokens.extend(tokens)
        self._sizes.append(len(tokens))
        self._kept.append(len(tokens))
        self._outputs.append(_WORDS.index(outputs))
        self.n_past += len(tokens)

    def rewind(self, n_past: int) -> None:
        """It has forgotten all but the first tokens."""
        while self._sizes and self.n_past - self._kept[-1] >= n_past:
            del self._tokens[len(self._tokens) - self._sizes.pop() :]
            self.n_past -= self._kept.pop()
            self._outputs.pop()
        if not self._sizes:
            self.state = self.state._replace(kept=min(n_past, self.state.kept))
        else:
            self._kept[-1] -= self.n_past - n_past
        self.n_past = n_past
