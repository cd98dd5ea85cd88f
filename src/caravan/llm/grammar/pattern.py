"""Regular expressions to automata: what of ECMA 262 a language model's texts are asked to match.

Literals, classes, groups, alternatives, repetitions, and anchors at the ends. Called by `strings`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from caravan.errors import UsageError

_MOST_NODES = 4_000
_MOST_NESTED = 50

Ranges = tuple[tuple[int, int], ...]

# What can stand in a JSON text: no halves of pairs, of the control characters those with a letter.
CONTROLS = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r"}
ANY: Ranges = ((8, 10), (12, 13), (0x20, 0xD7FF), (0xE000, 0x10FFFF))
_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = (
    (9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_LETTERS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_HEX = {"x": 2, "u": 4}


def normal(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """In order, without overlaps."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def without(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All other characters."""
    found, at = [], 0
    for low, high in normal(ranges):
        if low > at:
            found.append((at, low - 1))
        at = high + 1
    return (*found, (at, 0x10FFFF)) if at <= 0x10FFFF else tuple(found)


@dataclass
class Automaton:
    """Nondeterministic: steps by a character, and by none.

    Attributes:
        steps: of each state, the characters and the state they lead to.
        free: of each state, those that it may become without a character.
    """

    steps: list[list[tuple[Ranges, int]]] = field(default_factory=list)
    free: list[list[int]] = field(default_factory=list)
    begin: int = 0
    end: int = 0

    def state(self) -> int:
        if len(self.steps) == _MOST_NODES:
            raise UsageError("the pattern is too large")
        self.steps.append([])
        self.free.append([])
        return len(self.steps) - 1


@dataclass(frozen=True)
class _Node:
    """Of a parsed pattern: a character, a sequence, a choice, or a repetition.

    Attributes:
        ranges: of a character.
        parts: of the others.
        kind: `char`, `sequence`, `choice`, `repeat`, `begin` or `end`.
    """

    kind: str
    parts: tuple[_Node, ...] = ()
    ranges: Ranges = ()
    least: int = 1
    most: int | None = 1


def automaton(pattern: str) -> Automaton:
    """That of all texts in which it is found. Raises UsageError for what is not supported."""
    tree = _Parser(pattern).parse()
    found = Automaton()
    found.begin, found.end = found.state(), found.state()
    for choice in tree.parts if tree.kind == "choice" else (tree,):
        _add_whole(found, choice)
    return found


def _add_whole(into: Automaton, tree: _Node) -> None:
    """One that may begin and end anywhere, unless it says otherwise."""
    parts = list(tree.parts) if tree.kind == "sequence" else [tree]
    anywhere = _Node("repeat", (_Node("char", ranges=ANY),), least=0, most=None)
    if parts and parts[0].kind == "begin":
        del parts[0]
    else:
        parts.insert(0, anywhere)
    if parts and parts[-1].kind == "end":
        del parts[-1]
    else:
        parts.append(anywhere)
    _build(into, _Node("sequence", tuple(parts)), into.begin, into.end)


def _build(into: Automaton, node: _Node, begin: int, end: int) -> None:
    if node.kind == "char":
        into.steps[begin].append((node.ranges, end))
    elif node.kind == "choice":
        for part in node.parts:
            _build(into, part, begin, end)
    elif node.kind == "sequence":
        for part in node.parts[:-1]:
            after = into.state()
            _build(into, part, begin, after)
            begin = after
        if node.parts:
            _build(into, node.parts[-1], begin, end)
        else:
            into.free[begin].append(end)
    elif node.kind == "repeat":
        _build_repeat(into, node, begin, end)
    else:
        raise UsageError("an anchor is supported only at the beginning or the end")


def _build_repeat(into: Automaton, node: _Node, begin: int, end: int) -> None:
    (part,) = node.parts
    # states of its own, so that nothing else goes round with it
    at = into.state()
    into.free[begin].append(at)
    for _ in range(node.least):
        after = into.state()
        _build(into, part, at, after)
        at = after
    if node.most is None:
        back = into.state()
        _build(into, part, at, back)
        into.free[back].append(at)
    else:
        for _ in range(node.most - node.least):
            into.free[at].append(end)
            after = into.state()
            _build(into, part, at, after)
            at = after
    into.free[at].append(end)


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0

    def parse(self) -> _Node:
        tree = self._choice()
        if self._at < len(self._text):
            raise self._fail("a parenthesis too many")
        return tree

    def _fail(self, text: str) -> UsageError:
        return UsageError(f"{text} at {self._text[self._at : self._at + 10]!r}")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _choice(self) -> _Node:
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise self._fail("parentheses are nested too deeply")
        choices = [self._sequence()]
        while self._take("|"):
            choices.append(self._sequence())
        self._depth -= 1
        return choices[0] if len(choices) == 1 else _Node("choice", tuple(choices))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._peek() and self._peek() not in "|)":
            part = self._part()
            bounds = self._bounds()
            if bounds is not None:
                if part.kind in ("begin", "end"):
                    raise self._fail("a repeated anchor")
                part = _Node("repeat", (part,), least=bounds[0], most=bounds[1])
            parts.append(part)
        return _Node("sequence", tuple(parts))

    def _part(self) -> _Node:
        if self._take("^"):
            return _Node("begin")
        if self._take("$"):
            return _Node("end")
        if self._take("("):
            return self._group()
        if self._take("["):
            return _Node("char", ranges=self._class())
        if self._take("."):
            return _Node("char", ranges=without(_LINE_ENDS))
        if self._peek() in "*+?":
            raise self._fail("there is nothing to repeat")
        return _Node("char", ranges=normal(self._char(in_class=False)))

    def _group(self) -> _Node:
        if self._take("?<") and self._peek() not in ("=", "!", ""):
            while self._peek() and not self._take(">"):
                self._at += 1
        elif self._text.startswith("?", self._at) and not self._take("?:"):
            raise self._fail("looking ahead is not supported")
        elif self._text[self._at - 2 : self._at] == "?<":
            raise self._fail("looking back is not supported")
        tree = self._choice()
        if not self._take(")"):
            raise self._fail("a closing parenthesis is missing")
        return tree

    def _bounds(self) -> tuple[int, int | None] | None:
        bounds: tuple[int, int | None] | None = None
        for char, known in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(char):
                bounds = known
                break
        else:
            if self._take("{"):
                bounds = self._counted()
        if bounds is not None:
            # as few as possible, or as many: that is the same text in the end
            self._take("?")
            if self._peek() and self._peek() in "*+?{":
                raise self._fail("a repetition is repeated")
        return bounds

    def _counted(self) -> tuple[int, int | None]:
        text, found, rest = self._text[self._at :].partition("}")
        low, comma, high = text.partition(",")
        numbers = [number for number in (low, high) if number]
        if not found or not low or any(not n.isascii() or not n.isdigit() for n in numbers):
            raise self._fail("a number of repetitions is expected")
        if any(len(number) > 4 for number in numbers):
            raise self._fail("too many repetitions")
        self._at = len(self._text) - len(rest)
        least = int(low)
        most = (int(high) if high else None) if comma else least
        if most is not None and most < least:
            raise self._fail("at most fewer than at least")
        return least, most

    def _class(self) -> Ranges:
        negated = self._take("^")
        found: list[tuple[int, int]] = []
        while not self._take("]"):
            if not self._peek():
                raise self._fail("a class has no end")
            one = self._char(in_class=True)
            if (
                self._text.startswith("-", self._at)
                and self._text[self._at + 1 : self._at + 2] != "]"
            ):
                self._at += 1
                other = self._char(in_class=True)
                if len(one) > 1 or len(other) > 1 or one[0][0] != one[0][1] or one[0] > other[0]:
                    raise self._fail("a range of characters that is none")
                one = ((one[0][0], other[0][1]),)
            found.extend(one)
        return without(found) if negated else normal(found)

    def _char(self, in_class: bool) -> Ranges:
        char = self._peek()
        if not char:
            raise self._fail("unexpected end")
        self._at += 1
        if char != "\\":
            return ((ord(char), ord(char)),)
        kind = self._peek()
        self._at += 1
        if kind.lower() in _CLASSES and kind:
            ranges = _CLASSES[kind.lower()]
            return ranges if kind.islower() else without(ranges)
        if kind in _LETTERS or (in_class and kind == "b"):
            code = _LETTERS.get(kind, 8)
        elif kind in _HEX:
            code = self._hex(_HEX[kind])
        elif kind and (not kind.isascii() or not kind.isalnum()):
            code = ord(kind)
        else:
            self._at -= 2
            raise self._fail("an escape that is not supported")
        return ((code, code),)

    def _hex(self, count: int) -> int:
        digits = self._text[self._at : self._at + count]
        self._at += count
        try:
            if len(digits) < count:
                raise ValueError
            return int(digits, 16)
        except ValueError:
            raise self._fail("an escape that is not supported") from None
