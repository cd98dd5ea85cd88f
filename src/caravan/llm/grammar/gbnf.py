"""Reads a grammar in GBNF as the engine does, and refuses what the engine would not survive.

The engine's own parser prints its complaints where nobody reads them, and what passes it may still
never end, take all memory, or end the process: rules that begin with themselves behind an empty
one, rules that nothing fulfils, tokens in place of text. Called by `constraint`.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import hexdigits

from caravan.errors import UsageError

MOST_REPEATS = 2000  # of the engine; from there on it counts no more
_MOST_TEXT = 1 << 18
_MOST_ELEMENTS = 1 << 18
_MOST_NESTED = 64
_BLANK, _NEWLINE = " \t", "\r\n"
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{char: char for char in '\\"[]-'}}
_HEX = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class Chars:
    """One character: of the ranges of code points, or of none of them."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Ref:
    """What another rule says."""

    name: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """Something several times; `most` None: without end."""

    unit: tuple[Item, ...]
    least: int
    most: int | None


Item = Chars | Ref | Repeat
Rules = dict[str, list[tuple[Item, ...]]]


def parse(text: str) -> Rules:
    """The alternatives of each rule by its name; groups are rules with names of their own.

    Raises UsageError.
    """
    if len(text) > _MOST_TEXT:
        raise UsageError(f"grammar: {len(text)} characters are more than {_MOST_TEXT}")
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise UsageError("grammar: a character in it cannot be encoded")
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._rules: Rules = {}
        # as the engine numbers them, for its limit on repeated groups
        self._symbols: set[str] = set()
        self._elements = 0

    def parse(self) -> Rules:
        self._space(True)
        while self._at < len(self._text):
            self._rule()
        # names that were made here have a line in them, which no other name can have
        for name in sorted(self._symbols - self._rules.keys()):
            if "_" not in name:
                raise UsageError(f"grammar: rule {name} is not defined")
        if "root" not in self._rules:
            raise UsageError("grammar: there is no rule named root")
        return self._rules

    def _fail(self, text: str) -> UsageError:
        line = self._text.count("\n", 0, self._at) + 1
        near = self._text[self._at : self._at + 20].split("\n")[0]
        return UsageError(f"grammar, line {line}: {text} at {near!r}")

    def _peek(self, offset: int = 0) -> str:
        at = self._at + offset
        return self._text[at] if at < len(self._text) else ""

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _space(self, newlines: bool) -> None:
        while (char := self._peek()) and char in _BLANK + "#" + (_NEWLINE if newlines else ""):
            self._at += 1
            if char == "#":
                while self._peek() and self._peek() not in _NEWLINE:
                    self._at += 1

    def _name(self) -> str:
        began = self._at
        while (char := self._peek()) and char.isascii() and (char.isalnum() or char == "-"):
            self._at += 1
        return self._text[began : self._at]

    def _number(self) -> int:
        began = self._at
        while (char := self._peek()) and char.isascii() and char.isdigit():
            self._at += 1
        if not 0 < self._at - began < 10:
            raise self._fail("a number of repetitions is expected")
        return int(self._text[began : self._at])

    def _rule(self) -> None:
        name = self._name()
        if not name:
            raise self._fail("the name of a rule is expected")
        if name in self._rules:
            raise self._fail(f"rule {name} is defined a second time")
        self._symbols.add(name)
        self._space(False)
        if not self._take("::="):
            raise self._fail("::= is expected")
        self._space(True)
        self._rules[name] = self._alternatives(name, 0)
        if self._peek() and not (self._take("\r\n") or self._take("\r") or self._take("\n")):
            raise self._fail("the end of the line is expected")
        self._space(True)

    def _alternatives(self, name: str, depth: int) -> list[tuple[Item, ...]]:
        found = [self._sequence(name, depth)]
        while self._take("|"):
            self._space(True)
            found.append(self._sequence(name, depth))
        return found

    def _sequence(self, name: str, depth: int) -> tuple[Item, ...]:
        items: list[Item] = []
        unit: tuple[Item, ...] = ()
        weight = 1
        while char := self._peek():
            if char in "*+?{":
                if not unit:
                    raise self._fail("there is nothing to repeat")
                if isinstance(unit[0], Repeat):
                    raise self._fail("a repetition is repeated: put it into parentheses")
                repeat, weight = self._repeat(name, unit, weight, depth)
                del items[len(items) - len(unit) :]
                unit = (repeat,) if repeat.most != 0 else ()
            elif char == "(":
                unit, weight = self._group(name, depth)
            else:
                symbol = self._symbol(char)
                if symbol is None:
                    break
                unit, weight = symbol, 1
            items.extend(unit)
            self._space(depth > 0)
        return tuple(items)

    def _symbol(self, char: str) -> tuple[Item, ...] | None:
        if char == '"':
            found: tuple[Item, ...] = tuple(self._literal())
        elif char == "[":
            found = (self._class(),)
        elif char == ".":
            self._at += 1
            found = (Chars((), negated=True),)
        elif char in "<!":
            raise self._fail("tokens in place of text are not supported")
        elif name := self._name():
            self._symbols.add(name)
            found = (Ref(name),)
        else:
            return None
        self._add(len(found))
        return found

    def _add(self, elements: int) -> None:
        self._elements += elements
        if self._elements > _MOST_ELEMENTS:
            raise self._fail("it is too large")

    def _literal(self) -> list[Item]:
        self._at += 1
        chars: list[Item] = []
        while not self._take('"'):
            code = self._char()
            chars.append(Chars(((code, code),)))
        return chars

    def _class(self) -> Chars:
        self._at += 1
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            low = high = self._char()
            if self._peek() == "-" and self._peek(1) != "]":
                self._at += 1
                high = self._char()
            if high < low:
                raise self._fail("a range of characters ends before it begins")
            ranges.append((low, high))
        if not ranges:
            raise self._fail("a class of no characters")
        self._add(2 * len(ranges))
        return Chars(tuple(ranges), negated)

    def _char(self) -> int:
        char = self._peek()
        if not char:
            raise self._fail("unexpected end")
        self._at += 1
        if char != "\\":
            return ord(char)
        kind = self._peek()
        if kind in _ESCAPES and kind:
            self._at += 1
            return ord(_ESCAPES[kind])
        digits = self._text[self._at + 1 : self._at + 1 + _HEX.get(kind, 0)]
        if not digits or len(digits) < _HEX[kind] or not set(digits) <= set(hexdigits):
            raise self._fail("an escape that is not known")
        self._at += 1 + len(digits)
        code = int(digits, 16)
        if code > 0x10FFFF:
            raise self._fail("a character beyond Unicode")
        return code

    def _group(self, name: str, depth: int) -> tuple[tuple[Item, ...], int]:
        if depth == _MOST_NESTED:
            raise self._fail("parentheses are nested too deeply")
        self._at += 1
        self._space(True)
        before = len(self._symbols)
        own = self._generate(name)
        self._rules[own] = self._alternatives(name, depth + 1)
        if not self._take(")"):
            raise self._fail("a closing parenthesis is expected")
        self._add(1)
        return (Ref(own),), max(1, len(self._symbols) - before)

    def _generate(self, name: str) -> str:
        own = f"{name}_{len(self._symbols)}"
        self._symbols.add(own)
        return own

    def _repeat(
        self, name: str, unit: tuple[Item, ...], weight: int, depth: int
    ) -> tuple[Repeat, int]:
        least, most = self._bounds(depth)
        if max(least, most or 0) > MOST_REPEATS:
            raise self._fail(f"more than {MOST_REPEATS} repetitions")
        if most is not None and most < least:
            raise self._fail("at most fewer than at least")
        weight *= most or least or 1
        if weight > MOST_REPEATS:
            raise self._fail("repetitions of repetitions are too many")
        optional = 1 if most is None else most - least
        self._add((_size(unit) + 3) * (least + optional))
        for _ in range(optional):
            self._generate(name)
        return Repeat(unit, least, most), weight

    def _bounds(self, depth: int) -> tuple[int, int | None]:
        for char, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(char):
                return bounds
        self._at += 1
        self._space(depth > 0)
        least = most = self._number()
        unbounded = False
        self._space(depth > 0)
        if self._take(","):
            self._space(depth > 0)
            unbounded = self._peek() == "}"
            most = least if unbounded else self._number()
            self._space(depth > 0)
        if not self._take("}"):
            raise self._fail("a closing brace is expected")
        return least, None if unbounded else most


def _size(unit: tuple[Item, ...]) -> int:
    """Elements that the engine makes of it."""
    return sum(2 * len(item.ranges) if isinstance(item, Chars) else 1 for item in unit)
