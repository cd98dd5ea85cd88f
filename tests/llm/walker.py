"""Random texts of a grammar."""

from __future__ import annotations

import random

from caravan.llm.grammar.gbnf import Chars, Ref, parse
from caravan.llm.grammar.plain import plain

_TRIES = 'aZ09 _-é😀\n\t"\\/{}[]:,.'


class Walker:
    """Goes through the rules at random, and straight to an end when it is deep."""

    def __init__(self, grammar: str, rng: random.Random) -> None:
        self._rules = plain(parse(grammar))
        self._rng = rng
        # how deep each rule is at least
        self._depth = dict.fromkeys(self._rules, 1 << 30)
        changed = True
        while changed:
            changed = False
            for name, alternatives in self._rules.items():
                least = min(map(self._least, alternatives))
                if least + 1 < self._depth[name]:
                    self._depth[name], changed = least + 1, True

    def _least(self, items: tuple[Chars | Ref, ...]) -> int:
        return max((self._depth[i.name] for i in items if isinstance(i, Ref)), default=0)

    def text(self, effort: int = 60) -> str:
        parts: list[str] = []
        todo: list[Chars | Ref] = [Ref("root")]
        while todo:
            item = todo.pop()
            if isinstance(item, Chars):
                parts.append(self._char(item))
                continue
            effort -= 1
            choices = self._rules[item.name]
            if effort < 0:
                least = min(map(self._least, choices))
                choices = [c for c in choices if self._least(c) == least]
            todo += reversed(self._rng.choice(choices))
        return "".join(parts)

    def _char(self, item: Chars) -> str:
        def fits(code: int) -> bool:
            return item.negated != any(low <= code <= high for low, high in item.ranges)

        some = [char for char in _TRIES if fits(ord(char))]
        if some and self._rng.random() < 0.7:
            return self._rng.choice(some)
        if item.negated:
            return next(
                c for c in iter(lambda: chr(self._rng.randrange(32, 0xD800)), "") if fits(ord(c))
            )
        low, high = self._rng.choice(item.ranges)
        code = self._rng.randint(low, high)
        return chr(code if not 0xD800 <= code < 0xE000 else low)
