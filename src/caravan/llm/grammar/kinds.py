"""JSON Schema to rules, one kind of value after the other.

What the rules allow the schema allows too; where it allows a value in many spellings (order of
properties, blanks, leading zeros of an exponent), they allow some of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from caravan.llm.grammar import numbers
from caravan.llm.grammar.objects import object_body
from caravan.llm.grammar.rules import Rules, either, grouped, literal
from caravan.llm.grammar.schema import Document, Schema, count, fail, kinds, values
from caravan.llm.grammar.strings import string_body
from caravan.llm.grammar.unions import require_distinct

_MOST_NESTED = 60
_MOST_ITEMS = 2_000
# of multipleOf: whole numbers, and digits behind the point
_MOST_UNIT = 100
_DECIMALS = {0.1: 1, 0.01: 2, 0.001: 3, 0.0001: 4}
# a number's own words for its size, which say nothing about JSON
_NUMBER_FORMATS = {"int32", "int64", "uint32", "uint64", "float", "double", "decimal"}


class Kinds:
    """See the module."""

    def __init__(self, document: Document, rules: Rules) -> None:
        self.document = document
        self.rules = rules
        self._references: dict[str, str] = {}
        # what is referred to, and has no rule yet
        self._todo: list[tuple[str, Any, str]] = []
        self._depth = 0

    def rule(self, schema: Any, path: str) -> str:
        """The name of the rule for it."""
        checked = self.document.checked(schema, path)
        if checked.keys() == {"$ref"}:
            target, where = self.document.target(checked, path)
            if where not in self._references:
                # made later, because it may refer to itself
                self._references[where] = name = self.rules.reserve(where)
                self._todo.append((name, target, where))
            return self._references[where]
        return self.rules.add(path, self._body(schema, path))

    def finish(self) -> None:
        """Make the rules of all that is referred to."""
        while self._todo:
            name, target, where = self._todo.pop()
            self.rules.define(name, self._body(target, where))

    def _body(self, schema: Any, path: str) -> str:
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise fail(path, "it is nested too deeply")
        try:
            body = self._of(self.document.flat(schema, path), path)
        except RecursionError:
            raise fail(path, "it is nested too deeply") from None
        self._depth -= 1
        return body

    def _of(self, schema: Schema, path: str) -> str:
        found = values(schema, path)
        if found is not None and not {"anyOf", "oneOf"} & schema.keys():
            return self._literals(schema, found, path)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._union(schema, keyword, path)
        wanted = kinds(schema, path)
        if not schema:
            return self.rules.shared("value")
        if "number" in wanted:
            wanted = [kind for kind in wanted if kind != "integer"]
        if not wanted:
            raise fail(path, "no value is allowed")
        return either(self._kind(kind, schema, path) for kind in wanted)

    def _literals(self, schema: Schema, found: list[Any], path: str) -> str:
        more = schema.keys() - {"enum", "const", "type"}
        if more and found:
            raise fail(path, f"{sorted(more)[0]} beside enum or const is not supported")
        if not found:
            raise fail(path, "no value is allowed")
        try:
            texts = [json.dumps(value, ensure_ascii=False, allow_nan=False) for value in found]
            return either(map(literal, texts))
        except (ValueError, TypeError) as exc:
            raise fail(path, f"a value is not JSON: {exc}") from exc

    def _union(self, schema: Schema, keyword: str, path: str) -> str:
        choices = schema[keyword]
        if not isinstance(choices, list) or not choices:
            raise fail(path, f"{keyword} is not a list of schemas")
        rest = {k: v for k, v in schema.items() if k not in (keyword, "discriminator")}
        tag = schema.get("discriminator")
        if isinstance(tag, Mapping) and isinstance(tag.get("propertyName"), str):
            # where it may be left out, it is not: nothing else tells which of them it is
            rest = self.document.merged(rest, {"required": [tag["propertyName"]]}, path)
        if rest:
            flat = self.document.flat
            choices = [
                self.document.merged(flat(choice, f"{path}/{keyword}/{number}"), rest, path)
                for number, choice in enumerate(choices)
            ]
        if keyword == "oneOf":
            require_distinct(self.document, choices, path)
        found = []
        for number, choice in enumerate(choices):
            if choice is not False:
                found.append(self.rule(choice, f"{path}/{keyword}/{number}"))
        if not found:
            raise fail(path, "no value is allowed")
        return either(found)

    def _kind(self, kind: str, schema: Schema, path: str) -> str:
        if kind == "object":
            return object_body(self, schema, path)
        if kind == "array":
            return self._array(schema, path)
        if kind == "string":
            return string_body(self.rules, schema, path)
        if kind in ("integer", "number"):
            return self._number(kind, schema, path)
        return self.rules.shared(kind)

    def _number(self, kind: str, schema: Schema, path: str) -> str:
        low, without_low = _bound(schema, "minimum", "exclusiveMinimum", max, path)
        high, without_high = _bound(schema, "maximum", "exclusiveMaximum", min, path)
        form = schema.get("format")
        if form is not None and form not in _NUMBER_FORMATS:
            raise fail(path, f"format {form!r} of a number is not supported")
        if "multipleOf" in schema:
            if high is not None or low not in (None, 0) or without_low:
                raise fail(path, "multipleOf beside bounds other than minimum 0 is not supported")
            return self._multiple(schema["multipleOf"], kind, "" if low == 0 else '"-"? ', path)
        if low is None and high is None:
            return self.rules.shared(kind)
        if kind == "integer":
            least = None if low is None else math.floor(low) + 1 if without_low else math.ceil(low)
            most = (
                None if high is None else math.ceil(high) - 1 if without_high else math.floor(high)
            )
            found = numbers.integers(least, most)
        else:
            found = numbers.decimals(low, high, without_low, without_high)
        if not found:
            raise fail(path, "no number is allowed")
        return self.rules.add(f"{path}-{kind}", either(found))

    def _multiple(self, unit: Any, kind: str, sign: str, path: str) -> str:
        if isinstance(unit, bool) or not isinstance(unit, int | float) or not unit > 0:
            raise fail(path, f"multipleOf {unit!r} is not a number above 0")
        if unit in _DECIMALS and kind == "number":
            more = f'("." [0-9]{{1,{_DECIMALS[unit]}}})?'
            return self.rules.add(
                f"{path}-multiple", f"{sign}{self.rules.shared('natural')} {more}"
            )
        if unit % 1 or unit > _MOST_UNIT:
            raise fail(path, f"multipleOf {unit!r} is not supported")
        states = [self.rules.reserve(f"{path}-rest") for _ in range(int(unit))]
        for rest, name in enumerate(states):
            self.rules.define(name, either(numbers.after_rest(rest, states)))
        first = either(numbers.after_rest(0, states, first=True))
        return self.rules.add(f"{path}-multiple", f"{sign}({first})")

    def _array(self, schema: Schema, path: str) -> str:
        least = count(schema, "minItems", path, _MOST_ITEMS) or 0
        most = count(schema, "maxItems", path, _MOST_ITEMS)
        if "items" not in schema and "prefixItems" not in schema and not least and most is None:
            return self.rules.shared("array")
        first = schema.get("prefixItems", [])
        if not isinstance(first, list):
            raise fail(path, "prefixItems is not a list")
        rest = schema.get("items", True)
        if isinstance(rest, list):
            raise fail(path, "items as a list is not supported: prefixItems is")
        if rest is False:
            most = min(len(first), most if most is not None else len(first))
        if most is not None and least > most:
            raise fail(path, "no array is allowed")
        names = [self.rule(item, f"{path}/prefixItems/{n}") for n, item in enumerate(first[:most])]
        ws = self.rules.shared("ws")
        inner = "".join(self._items(names, rest, least, most, path))
        if not inner:
            return f'"[" {ws} "]"'
        # a rule of its own: the engine counts what is repeated inside for the outside too
        body = self.rules.add(f"{path}-list", f"{inner} {ws}")
        return f'"[" {ws} {body}{"?" if least == 0 else ""} "]"'

    def _items(
        self, names: list[str], rest: Any, least: int, most: int | None, path: str
    ) -> Iterator[str]:
        """Of an array that is not empty: the first item, and what follows it."""
        if most == 0:
            return
        ws = self.rules.shared("ws")
        n = len(names)
        more = ""
        if rest is not False and (most is None or most > n):
            item = self.rule(rest, f"{path}/items")
            if not names:
                names, n = [item], 1
            following = self.rules.add(f"{path}-more", f'"," {ws} {item}')
            more = self.rules.times(
                following, max(least - n, 0), None if most is None else most - n
            )
        # each of them, and all that may follow it
        for number in range(n - 1, 0, -1):
            tail = f'"," {ws} {names[number]} {grouped(more)}'.strip()
            more = tail if least > number else self.rules.add(f"{path}-rest", tail) + "?"
        yield f"{names[0]} {more}".strip()


def _bound(
    schema: Schema, keyword: str, exclusive: str, nearest: Any, path: str
) -> tuple[Decimal | None, bool]:
    """A number's bound, and whether it does not belong to them."""
    found: list[tuple[Decimal, bool]] = []
    for name, without in ((keyword, schema.get(exclusive) is True), (exclusive, True)):
        value = schema.get(name)
        if value is None or isinstance(value, bool):
            continue
        if not isinstance(value, int | float) or not abs(value) <= 1e15:
            raise fail(path, f"{name} {value!r} is not supported")
        found.append((Decimal(str(value)), without))
    if not found:
        return None, False
    edge = nearest(value for value, _ in found)
    return edge, any(without for value, without in found if value == edge)
