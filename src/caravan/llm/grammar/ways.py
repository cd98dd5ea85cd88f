"""`Ways`: in how many ways a grammar can have come to a text, counted as the engine follows them.

The engine follows each of them, and gets ever slower and larger where a grammar is ambiguous; this
one knows when to stop. Called by `constraint`, before the engine gets the same text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from caravan.errors import NothingAllowed
from caravan.llm.grammar.gbnf import Chars
from caravan.llm.grammar.plain import Plain

_MOST = 2_000
# Within one token the engine does not notice that two ways have met.
_MOST_PATHS = 50_000
_EMPTY = 0


class Ways:
    """See the module.

    A way is a stack of what is still to come, and a stack is a number: of its top, an alternative
    of a rule and a place in it, and of the stack below.
    """

    def __init__(self, rules: Plain) -> None:
        self._rules = rules
        self._stacks: list[tuple[tuple[Chars | str, ...], int, int]] = [((), 0, _EMPTY)]
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._unfolded: dict[int, tuple[int, ...]] = {_EMPTY: (_EMPTY,)}
        # one object for each alternative, which then has an address
        self._alternatives = {
            name: [
                tuple(item if isinstance(item, Chars) else item.name for item in items)
                for items in alternatives
            ]
            for name, alternatives in rules.items()
        }
        # where no text of `require_few` has too many
        self._few: set[frozenset[int]] = set()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._now = {
            way
            for items in self._alternatives["root"]
            for way in self._unfold(self._push(items, 0, _EMPTY))
        }

    def __len__(self) -> int:
        return len(self._now)

    def read(self, data: bytes) -> None:
        """Go on with a text that fits. Raises SamplingError if the ways become too many."""
        for char in self._decoder.decode(data):
            code = ord(char)
            found: set[int] = set()
            for way in self._now:
                items, at, below = self._stacks[way]
                if way != _EMPTY and _matches(items[at], code):
                    found.update(self._unfold(self._push(items, at + 1, below)))
                if len(found) > _MOST:
                    raise _ambiguous()
            self._now = found

    def require_few(self, texts: Sequence[str]) -> None:
        """Raises SamplingError if there are too many for one of these texts, which may come next.

        They are always the same ones.
        """
        now = frozenset(self._now)
        if now not in self._few:
            for text in texts:
                self.require_few_for(text)
            self._few.add(now)

    def require_few_for(self, text: str) -> None:
        """Raises SamplingError if there are too many for this text, which need not fit."""
        paths = dict.fromkeys(self._now, 1)
        for char in text:
            code = ord(char)
            found: dict[int, int] = {}
            for way, count in paths.items():
                items, at, below = self._stacks[way]
                if way != _EMPTY and _matches(items[at], code):
                    for new in self._unfold(self._push(items, at + 1, below)):
                        found[new] = found.get(new, 0) + count
            paths = found
            if not paths:
                return
            if sum(paths.values()) > _MOST_PATHS or len(paths) > _MOST:
                raise _ambiguous()

    def _push(self, items: tuple[Chars | str, ...], at: int, below: int) -> int:
        if at == len(items):
            return below
        key = (id(items), at, below)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._stacks)
            self._stacks.append((items, at, below))
        return number

    def _unfold(self, stack: int) -> tuple[int, ...]:
        """The stacks with a character on top, or empty, that it may become."""
        known = self._unfolded.get(stack)
        if known is not None:
            return known
        seen, todo = {stack}, [stack]
        found: list[int] = []
        while todo:
            way = todo.pop()
            items, at, below = self._stacks[way]
            top = items[at] if way != _EMPTY else None
            if not isinstance(top, str):
                found.append(way)
                continue
            rest = self._push(items, at + 1, below)
            for alternative in self._alternatives[top]:
                new = self._push(alternative, 0, rest)
                if new not in seen:
                    seen.add(new)
                    todo.append(new)
        self._unfolded[stack] = tuple(found)
        return self._unfolded[stack]


def _ambiguous() -> NothingAllowed:
    return NothingAllowed("the grammar has too many ways to read the text: it is ambiguous")


def _matches(item: Chars | str, code: int) -> bool:
    assert isinstance(item, Chars)
    return item.negated != any(low <= code <= high for low, high in item.ranges)
