"""Objects of a JSON Schema: properties in the order of the schema, then others.

Called by `kinds`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from caravan.llm.grammar.pattern import ANY, normal, without
from caravan.llm.grammar.rules import Rules, literal
from caravan.llm.grammar.schema import Schema, fail
from caravan.llm.grammar.strings import one_of


class Values(Protocol):
    @property
    def rules(self) -> Rules: ...

    def rule(self, schema: Any, path: str) -> str: ...


def object_body(kinds: Values, schema: Schema, path: str) -> str:
    """What an object that the schema allows looks like."""
    if not {"properties", "required", "additionalProperties"} & schema.keys():
        return kinds.rules.shared("object")
    properties = _properties(schema, path)
    # what is not said is allowed, and so may be left out
    rest = schema.get("additionalProperties", not properties)
    required = schema.get("required", [])
    members: list[tuple[str, bool]] = []
    for name, value in properties.items():
        if value is False and name not in required:
            continue
        rule = kinds.rule(value, f"{path}/properties/{_pointer(name)}")
        key = literal(json.dumps(name, ensure_ascii=False))
        members.append((f'{key} ":" {kinds.rules.shared("ws")} {rule}', name in required))
    other = ""
    if rest is not False:
        value = kinds.rule(rest, f"{path}/additionalProperties")
        key = _other_key(kinds.rules, list(properties), path)
        other = kinds.rules.add(f"{path}-other", f'{key} ":" {kinds.rules.shared("ws")} {value}')
    return _body(kinds.rules, members, other, path)


def _pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _properties(schema: Schema, path: str) -> dict[str, Any]:
    """Those that are named, also if nothing is said but that they are required."""
    found = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(found, Mapping):
        raise fail(path, "properties is not a mapping")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise fail(path, "required is not a list of names")
    rest = schema.get("additionalProperties", True)
    properties = dict(found)
    for name in required:
        if name not in properties:
            if rest is False:
                raise fail(path, f"required property {name!r} is not allowed")
            properties[name] = rest
    return properties


def _body(rules: Rules, members: list[tuple[str, bool]], other: str, path: str) -> str:
    """Members that must or may be there, in this order, then others."""
    ws = rules.shared("ws")
    after = ws
    if other:
        more = rules.add(f"{path}-more", f'"," {ws} {other}')
        after = f"{more}* {ws}"
    # `after` follows a member; `first` is what may be there when there was none yet
    first = f"({other} {after})?" if other else ""
    n_required = max((n + 1 for n, (_, required) in enumerate(members) if required), default=0)
    for number in range(len(members) - 1, -1, -1):
        member, required = members[number]
        if required:
            first, after = f"{member} {after}", f'"," {ws} {member} {after}'
            continue
        # a rule each, or what follows would be written down again and again
        follows = rules.add(f"{path}-after", after)
        begins = f"{member} {follows}"
        if number < n_required or first:
            then = rules.add(f"{path}-first", first)
            first = f"{begins} | {then}"
        else:
            first = f"({begins})?"
        first = rules.add(f"{path}-first", first)
        after = f'("," {ws} {member} {follows} | {follows})'
    return f'"{{" {ws} {first} "}}"'.replace("  ", " ")


def _other_key(rules: Rules, names: list[str], path: str) -> str:
    """A string that is none of the names."""
    if not names:
        return rules.shared("string")
    free = rules.add("any-text", f"({one_of(ANY)})*")
    return rules.add(f"{path}-key", f'"\\"" {_unlike(rules, names, free, path)}')


def _unlike(rules: Rules, names: list[str], free: str, path: str) -> str:
    """A text with its closing quote that is none of these, character by character."""
    heads: dict[str, list[str]] = {}
    for name in names:
        if name:
            heads.setdefault(name[0], []).append(name[1:])
    choices = [] if "" in names else ['"\\""']
    for head, tails in heads.items():
        code = ord(head)
        choices.append(f"({one_of(((code, code),))}) {_unlike(rules, tails, free, path)}")
    used = [(ord(head), ord(head)) for head in heads]
    others = normal(_within(without(used)))
    choices.append(f'({one_of(others)}) {free} "\\""')
    return rules.add(f"{path}-unlike", " | ".join(choices))


def _within(ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    return [
        (max(low, least), min(high, most))
        for low, high in ranges
        for least, most in ANY
        if low <= most and least <= high
    ]
