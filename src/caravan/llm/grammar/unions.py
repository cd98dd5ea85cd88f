"""Whether no value is of two schemas, as `oneOf` wants it. Called by `kinds`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from caravan.llm.grammar.schema import Document, Schema, fail, key, kinds, values

_MOST_NESTED = 8
# each is compared with all others
_MOST_CHOICES = 200


def require_distinct(document: Document, choices: Sequence[Any], path: str) -> None:
    """Raises UsageError where a value that one allows may be allowed by another one too."""
    if len(choices) > _MOST_CHOICES:
        raise fail(path, f"oneOf has more than {_MOST_CHOICES} choices; anyOf may")
    flat = [document.flat(c, f"{path}/oneOf/{n}") for n, c in enumerate(choices)]
    for number, one in enumerate(flat):
        for earlier, other in enumerate(flat[:number]):
            if not _are_distinct(document, one, other, path, 0):
                raise fail(
                    path,
                    f"oneOf: a value may be of both {earlier} and {number}; anyOf allows that",
                )


def _are_distinct(document: Document, one: Schema, other: Schema, path: str, depth: int) -> bool:
    if depth > _MOST_NESTED:
        return False
    for union in ("anyOf", "oneOf"):
        for first, second in ((one, other), (other, one)):
            if union in first:
                parts = [document.flat(part, path) for part in first[union]]
                return all(_are_distinct(document, p, second, path, depth + 1) for p in parts)
    ones, others = values(one, path), values(other, path)
    if ones is not None and others is not None:
        return set(map(key, ones)).isdisjoint(map(key, others))
    if not _kinds(one, ones, path) & _kinds(other, others, path):
        return True
    return _kinds(one, ones, path) & _kinds(other, others, path) == {"object"} and any(
        name in one.get("properties", {})
        and name in other.get("properties", {})
        and name in one.get("required", [])
        and name in other.get("required", [])
        and _are_distinct(
            document,
            document.flat(one["properties"][name], path),
            document.flat(other["properties"][name], path),
            path,
            depth + 1,
        )
        for name in one.get("properties", {})
    )


def _kinds(schema: Schema, among: list[Any] | None, path: str) -> set[str]:
    """Where it says nothing, all: a text may follow rules that are not about texts."""
    if among is not None:
        names = {str: "string", bool: "boolean", list: "array", dict: "object", int: "number"}
        return {"null" if v is None else names.get(type(v), "number") for v in among}
    if "type" not in schema:
        return {"object", "array", "string", "number", "boolean", "null"}
    return {"number" if kind == "integer" else kind for kind in kinds(schema, path)}
