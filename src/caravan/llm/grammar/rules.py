"""`Rules`: a grammar that is being written: names, bodies, and the JSON that every grammar needs.

All that is written here can be read in one way only, so that the engine never has to follow many;
and what may be repeated without sense, blanks and digits, is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from caravan.errors import UsageError
from caravan.llm.grammar.gbnf import MOST_REPEATS

_NAME = re.compile(r"[^A-Za-z0-9]+")
_LONGEST_NAME = 40
_MOST_SIZE = 200_000

# a line and its indentation, or a blank
_SHARED = {
    "ws": '(" " | "\\n" [ \\t]{0,20})?',
    "char": '[^"\\\\\\x00-\\x1f] | "\\\\" (["\\\\/bfnrt] | "u" unit)',
    # no halves of a pair
    "unit": "[0-9a-cA-CefEF] hex{3} | [dD] [0-7] hex{2}",
    "hex": "[0-9a-fA-F]",
    "string": '"\\"" char* "\\""',
    "integer": '"-"? natural',
    "natural": '"0" | [1-9] [0-9]{0,15}',
    "number": 'integer ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "value": "object | array | string | number | boolean | null",
    "object": '"{" ws (member more-members* ws)? "}"',
    "more-members": '"," ws member',
    "member": 'string ":" ws value',
    "array": '"[" ws (value more-values* ws)? "]"',
    "more-values": '"," ws value',
}
_WORD = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|([a-z][a-z-]*)')


class Rules:
    """See the module."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._size = 0

    def shared(self, name: str) -> str:
        """One of those that every grammar may use; the name is given back."""
        if name not in self._bodies:
            self._put(name, _SHARED[name])
            for word in _WORD.findall(_SHARED[name]):
                if word:
                    self.shared(word)
        return name

    def reserve(self, wanted: str) -> str:
        """A name like this one that no rule has; its rule follows by `define`."""
        base = _NAME.sub("-", wanted).strip("-")[-_LONGEST_NAME:].strip("-") or "rule"
        name, number = base, 2
        while name in self._bodies or name in _SHARED or name == "root":
            name, number = f"{base}-{number}", number + 1
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """The rule of a name that was reserved."""
        self._put(name, body)

    def add(self, wanted: str, body: str) -> str:
        """A rule; the name of one that says the same, if there is one."""
        if body in self._bodies:
            return body
        known = self._names.get(body)
        if known is None:
            known = self._names[body] = self.reserve(wanted)
            self._put(known, body)
        return known

    def _put(self, name: str, body: str) -> None:
        self._bodies[name] = body
        self._size += len(name) + len(body) + 6
        if self._size > _MOST_SIZE:
            raise UsageError(f"schema: its grammar has more than {_MOST_SIZE} characters")

    def text(self, root: str) -> str:
        """GBNF that begins with this."""
        lines = [f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._bodies.items())]
        return "\n".join(lines) + "\n"

    def times(self, name: str, least: int, most: int | None) -> str:
        """A rule several times; `most` None: without end."""
        if most is not None and most - least > MOST_REPEATS:
            # the engine counts no further
            part = MOST_REPEATS
            rest = self.add(f"{name}-more", self.times(name, 0, most - least - part))
            upto = f"{name}{{0,{part - 1}}} | {name}{{{part}}} {rest}"
            return f"{self.times(name, least, least)} ({upto})".strip()
        parts = [f"{name}{{{MOST_REPEATS}}}"] * (least // MOST_REPEATS)
        left = least % MOST_REPEATS
        if most is None:
            parts.append(f"{name}{{{left},}}")
        elif most > least:
            parts += [f"{name}{{{left}}}"] * (left > 0) + [f"{name}{{0,{most - least}}}"]
        elif left:
            parts.append(f"{name}{{{left}}}")
        return " ".join(parts)


def literal(text: str) -> str:
    """The text itself, in GBNF."""
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    if char.isascii() and char.isprintable():
        return char
    return char if char.isprintable() else f"\\U{ord(char):08X}"


def either(choices: Iterable[str]) -> str:
    """One of them, each of which stands for itself; each once."""
    return " | ".join(dict.fromkeys(choices))


def grouped(body: str) -> str:
    """For a place among others."""
    return f"({body})" if "|" in body else body


def chars(ranges: Iterable[tuple[int, int]]) -> str:
    """A class of characters, by their code points."""
    parts = []
    for low, high in ranges:
        parts.append(_in_class(low) + (f"-{_in_class(high)}" if high > low else ""))
    return f"[{''.join(parts)}]"


def _in_class(code: int) -> str:
    char = chr(code)
    if char.isascii() and char.isalnum():
        return char
    return (
        f"\\U{code:08X}" if code > 0xFFFF else f"\\u{code:04X}" if code > 0xFF else f"\\x{code:02X}"
    )
