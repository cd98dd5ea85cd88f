"""`Constraint`: what a grammar allows next, after what it has accepted.

The engine's grammar sampler, kept from what ends the process: a token that it does not allow is
never given to it, and grammars that it would not survive are refused. Called by `sampling`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from caravan import engine
from caravan.errors import UsageError
from caravan.llm.candidates import Candidates
from caravan.llm.grammar.gbnf import parse
from caravan.llm.grammar.plain import plain
from caravan.llm.grammar.safety import require_safe
from caravan.llm.grammar.ways import Ways
from caravan.llm.model import Model
from caravan.llm.refusal import reason


class Constraint:
    """See the module. One thread at a time; `close` it.

    Raises UsageError for a grammar (GBNF, its root rule is `root`) that cannot be used.
    """

    def __init__(self, grammar: str, model: Model) -> None:
        self._llama = engine.load().llama
        self._handle = self._made_of = 0
        rules = plain(parse(grammar))
        require_safe(rules)
        self._ways = Ways(rules)
        self._grammar = grammar.encode()
        self._words = model.words
        self._accepted = array("i")
        self._one = Candidates(1)
        # tokens without a text of their own, as far as they were met
        self._silent: set[int] = set()
        with self._words.held() as vocab:
            self._renew(vocab)

    def _renew(self, vocab: int) -> None:
        """The sampler belongs to a vocabulary, which is another one after a loss."""
        if vocab == self._made_of:
            return
        self.close()
        engine.forget_errors()
        self._handle = self._llama.sampler_init_grammar(vocab, self._grammar, b"root") or 0
        if not self._handle:
            raise UsageError(f"grammar: {reason('the engine refuses it')}")
        self._made_of = vocab
        for token in self._accepted:
            self._llama.sampler_accept(self._handle, token)

    def allows(self, token: int) -> bool:
        """Whether the token may come next. Raises SamplingError for an ambiguous grammar, which has
        too many ways to read it."""
        if self._is_silent(token):
            return False
        self._ways.require_few_for(self._words.piece(token, False).decode("utf-8", "ignore"))
        return self._matches(token)

    def _is_silent(self, token: int) -> bool:
        """The engine takes the name of a control token for its text; but nobody will see that."""
        if token not in self._silent:
            if self._words.piece(token, False) or self._words.is_eog(token):
                return False
            self._silent.add(token)
        return True

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Inside, the sampler may be called."""
        with self._words.held() as vocab:
            self._renew(vocab)
            yield

    def _matches(self, token: int) -> bool:
        with self._ready():
            self._one.fill_one(token)
            self._one.apply(self._handle)
            return self._one.first_is_possible

    def restrict(self, candidates: Candidates) -> None:
        """Leave no chance to tokens that do not match; but to some that `allows` refuses yet.

        Raises SamplingError as `allows` does.
        """
        self._ways.require_few(self._words.probes)
        with self._ready():
            candidates.apply(self._handle)

    @property
    def silent(self) -> set[int]:
        """Tokens that were refused because nobody would see them."""
        return self._silent

    def accept(self, token: int) -> None:
        """It has come. `allows` must have said yes: the engine would end the process.

        Raises SamplingError as `allows` does, for all of the text.
        """
        if not self._words.is_eog(token):
            self._ways.read(self._words.piece(token, False))
        with self._ready():
            self._llama.sampler_accept(self._handle, token)
        self._accepted.append(token)

    def close(self) -> None:
        """Free the sampler. Does nothing the second time."""
        handle, self._handle, self._made_of = self._handle, 0, 0
        if handle:
            self._llama.sampler_free(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", 0) and not sys.is_finalizing():
            self.close()
