"""Strings of a JSON Schema: lengths, formats, patterns. Called by `kinds`."""

from __future__ import annotations

from functools import cache

from caravan.errors import UsageError
from caravan.llm.grammar.formats import FORMATS
from caravan.llm.grammar.gbnf import Chars, parse
from caravan.llm.grammar.pattern import CONTROLS, Ranges, automaton
from caravan.llm.grammar.plain import plain
from caravan.llm.grammar.rules import Rules, chars, grouped
from caravan.llm.grammar.schema import Schema, count, fail
from caravan.llm.grammar.states import States, states

_MOST_LENGTH = 10_000
_MOST_STATES = 1_500
_LONGEST_PATTERN = 20_000
_QUOTED = {ord('"'): '\\"', ord("\\"): "\\\\"}
# are no text of a particular form
_LOOSE = {"password", "binary"}


def string_body(rules: Rules, schema: Schema, path: str) -> str:
    """What a string that the schema allows looks like, with its quotes."""
    least = count(schema, "minLength", path, _MOST_LENGTH) or 0
    most = count(schema, "maxLength", path, _MOST_LENGTH)
    form, pattern = schema.get("format"), schema.get("pattern")
    if most is not None and least > most:
        raise fail(path, "no text is allowed")
    if form is not None and form not in _LOOSE:
        if form not in FORMATS:
            raise fail(path, f"format {form!r} is not supported")
        shortest, longest = _lengths(form)
        if pattern is not None or least > shortest or (most is not None and most < longest):
            raise fail(path, "format beside a pattern or another length is not supported")
        name = rules.add(f"format-{form}", FORMATS[form])
        return rules.add(f"text-{form}", f'"\\"" {name} "\\""')
    if pattern is not None:
        if not isinstance(pattern, str):
            raise fail(path, "pattern is not a text")
        if len(pattern) > _LONGEST_PATTERN:
            raise fail(path, f"pattern has more than {_LONGEST_PATTERN} characters")
        try:
            found = states(automaton(pattern), least, most, _MOST_STATES)
        except UsageError as exc:
            raise fail(path, f"pattern: {exc}") from exc
        return rules.add(f"{path}-text", f'"\\"" {_automaton(rules, found, path)} "\\""')
    if not least and most is None:
        return rules.shared("string")
    inner = rules.times(rules.shared("char"), least, most)
    return rules.add(f"{path}-text", f'"\\"" {inner} "\\""'.replace("  ", " "))


@cache
def _lengths(form: str) -> tuple[int, int]:
    """The least and the most characters of a format."""
    rules = plain(parse(f"root ::= {FORMATS[form]}"))

    def of(name: str) -> tuple[int, int]:
        found = []
        for items in rules[name]:
            sizes = [(1, 1) if isinstance(item, Chars) else of(item.name) for item in items]
            found.append((sum(low for low, _ in sizes), sum(high for _, high in sizes)))
        return min(low for low, _ in found), max(high for _, high in found)

    return of("root")


def _automaton(rules: Rules, found: States, path: str) -> str:
    """A rule for each state; the name of the first."""
    names = [rules.reserve(f"{path}-state") for _ in found.steps]
    for name, steps, end in zip(names, found.steps, found.ends, strict=True):
        choices = [f"{grouped(one_of(ranges))} {names[to]}" for ranges, to in steps]
        rules.define(name, " | ".join([*choices, *(['""'] if end else [])]))
    return names[0]


def one_of(ranges: Ranges) -> str:
    """One of these characters, as JSON spells it in the shortest way."""
    plain: list[tuple[int, int]] = []
    escaped: list[str] = []
    for low, high in ranges:
        at = low
        for code in sorted([*CONTROLS, *_QUOTED]):
            if at <= code <= high:
                if code > at:
                    plain.append((at, code - 1))
                escaped.append(_QUOTED[code] if code in _QUOTED else CONTROLS[code])
                at = code + 1
        if at <= high:
            plain.append((at, high))
    choices = [chars(plain)] if plain else []
    if escaped:
        choices.append(f'"\\\\" [{"".join(escaped)}]')
    return " | ".join(choices)
