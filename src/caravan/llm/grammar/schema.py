"""A JSON Schema's parts: references followed, what stands together put into one.

Knows what the keywords mean for each other, not how texts look. Called by `kinds`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from caravan.errors import UsageError

Schema = dict[str, Any]

KINDS = ("object", "array", "string", "number", "integer", "boolean", "null")
# say nothing about which values are valid
_ANNOTATIONS = {
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
    "$schema", "$id", "$comment", "$defs", "definitions", "contentEncoding",
    "contentMediaType", "contentSchema", "nullable",
}  # fmt: skip
# would have to be heeded, and are not
_UNSUPPORTED = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies",
    "patternProperties", "propertyNames", "minProperties", "maxProperties", "uniqueItems",
    "contains", "minContains", "maxContains", "unevaluatedItems", "$dynamicRef",
    "$recursiveRef", "$anchor",
)  # fmt: skip
# values with which such a keyword says nothing
_EMPTY: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "minProperties": (0,),
    "minContains": (),
    "not": (False,),
    "patternProperties": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "propertyNames": (True, {}),
}
# what cannot be looked at if it is something else
_SHAPES: dict[str, tuple[type, ...]] = {
    "format": (str, type(None)),
    "properties": (Mapping,),
    "required": (list,),
    "anyOf": (list,),
    "oneOf": (list,),
}
_MOST_VISITS = 20_000
# values and names that are put together, in all
_MOST_MERGED = 1_000_000
_LONGEST_POINTER = 1_000
# of a place, and of what is wrong there: both may be the client's
_LONGEST_TOLD = 160
_MOST_FOLLOWED = 50
NOTHING: Schema = {"enum": []}


def fail(path: str, text: str) -> UsageError:
    """What is wrong with the schema at that place, a JSON pointer."""
    return UsageError(f"schema at {path[-_LONGEST_TOLD:]}: {text[:_LONGEST_TOLD]}")


class Document:
    """A whole schema, into which references point."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._visits = self._n_merged = 0

    def checked(self, schema: Any, path: str) -> Schema:
        """As a dict of its own, without what says nothing. Raises UsageError for keywords that are
        not supported."""
        self._visits += 1
        if self._visits > _MOST_VISITS:
            raise fail(path, "it has too many parts")
        if schema is True:
            return {}
        if schema is False:
            return dict(NOTHING)
        if not isinstance(schema, Mapping):
            raise fail(path, "not a schema")
        for keyword in _UNSUPPORTED:
            if keyword in schema and schema[keyword] not in _EMPTY.get(keyword, ()):
                raise fail(path, f"{keyword} is not supported")
        for keyword, shapes in _SHAPES.items():
            if keyword in schema and not isinstance(schema[keyword], shapes):
                raise fail(path, f"{keyword} is not what it should be")
        if isinstance(schema.get("type"), list) and len(schema["type"]) > len(KINDS):
            raise fail(path, "type has a type more than once")
        unevaluated = schema.get("unevaluatedProperties", True)
        if not isinstance(unevaluated, bool):
            raise fail(path, "unevaluatedProperties is not supported")
        found = {
            str(k): v for k, v in schema.items() if k not in _ANNOTATIONS and k not in _UNSUPPORTED
        }
        if found.pop("unevaluatedProperties", True) is False:
            found.setdefault("additionalProperties", False)
        if "oneOf" not in found:
            found.pop("discriminator", None)
        if schema.get("nullable") is True:
            found = _nullable(found)
        return found

    def target(self, schema: Schema, path: str) -> tuple[Any, str]:
        """What its reference points to, and where that is."""
        pointer = schema["$ref"]
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise fail(path, f"$ref {pointer!r} is not one into this schema")
        if len(pointer) > _LONGEST_POINTER:
            raise fail(path, f"$ref has more than {_LONGEST_POINTER} characters")
        found: Any = self.root
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and key in map(str, range(len(found))):
                found = found[int(key)]
            else:
                raise fail(path, f"$ref {pointer!r} points to nothing")
        return found, pointer

    def flat(self, schema: Any, path: str, followed: int = 0) -> Schema:
        """It with its references followed and `allOf` put into one."""
        if followed > _MOST_FOLLOWED:
            raise fail(path, "it refers to itself")
        found = self.checked(schema, path)
        if "$ref" in found:
            target, where = self.target(found, path)
            del found["$ref"]
            found = self.merged(self.flat(target, where, followed + 1), found, path)
        for number, part in enumerate(_list(found.pop("allOf", []), path, "allOf")):
            at = f"{path}/allOf/{number}"
            found = self.merged(found, self.flat(part, at, followed + 1), path)
        return found

    def merged(self, one: Schema, other: Schema, path: str) -> Schema:
        """One that both allow."""
        if not one or not other:
            return one or other
        both = (*one.values(), *other.values())
        self._n_merged += sum(len(value) for value in both if isinstance(value, list | dict))
        if self._n_merged > _MOST_MERGED:
            raise fail(path, "it has too many parts")
        merged = dict(one)
        if "properties" in one or "properties" in other or "additionalProperties" in other:
            merged.update(_merged_objects(one, other))
        for keyword, value in other.items():
            if keyword in ("properties", "additionalProperties"):
                continue
            if keyword not in one or _is_same(keyword, one[keyword], value):
                merged[keyword] = value
            elif keyword in _MERGED:
                try:
                    merged[keyword] = _MERGED[keyword](one[keyword], value)
                except TypeError as exc:
                    raise fail(path, f"{keyword} has a value that it cannot have") from exc
            else:
                raise fail(path, f"two different {keyword} at the same place are not supported")
        return merged


def _nullable(schema: Schema) -> Schema:
    """OpenAPI's way to say that it may be null too."""
    if "type" in schema and not {"enum", "const"} & schema.keys():
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return {**schema, "type": [*kinds, "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _merged_objects(one: Schema, other: Schema) -> Schema:
    properties: dict[str, Any] = {}
    owns, others = one.get("properties", {}), other.get("properties", {})
    for name in [*owns, *(name for name in others if name not in owns)]:
        both = [
            side.get("properties", {}).get(name, side.get("additionalProperties", True))
            for side in (one, other)
        ]
        properties[name] = _both(*both)
    rest = [side.get("additionalProperties", True) for side in (one, other)]
    stated = "additionalProperties" in one or "additionalProperties" in other
    found: Schema = {"properties": properties} if owns or others else {}
    if stated:
        found["additionalProperties"] = _both(*rest)
    return found


def _both(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    parts = [part for part in (one, other) if part is not True]
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True


def _types(one: Any, other: Any) -> Any:
    ones, others = (value if isinstance(value, list) else [value] for value in (one, other))
    # every integer is a number
    wide = {"integer": {"integer", "number"}}
    found = [k for k in ones if wide.get(k, {k}) & set(others)]
    return [*found, *(k for k in others if k == "integer" and "number" in ones and k not in found)]


def _is_same(keyword: str, one: Any, other: Any) -> bool:
    # for Python true is 1
    return bool(one == other) and (keyword not in ("enum", "const") or same(one, other))


def _common(one: list[Any], other: list[Any]) -> list[Any]:
    known = set(map(key, other))
    return [value for value in one if key(value) in known]


_MERGED: dict[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "required": lambda one, other: [*dict.fromkeys([*one, *other])],
    "enum": lambda one, other: _common(one, other),
    "minimum": max,
    "exclusiveMinimum": max,
    "maximum": min,
    "exclusiveMaximum": min,
    "minLength": max,
    "maxLength": min,
    "minItems": max,
    "maxItems": min,
    "items": lambda one, other: {"allOf": [one, other]},
}


def _list(value: Any, path: str, keyword: str) -> list[Any]:
    if not isinstance(value, list):
        raise fail(path, f"{keyword} is not a list")
    return value


def values(schema: Schema, path: str) -> list[Any] | None:
    """Those that `enum` or `const` leave; None where any are possible."""
    if "enum" not in schema and "const" not in schema:
        return None
    found = _list(schema.get("enum", [schema.get("const")]), path, "enum")
    if "const" in schema:
        found = [value for value in found if same(value, schema["const"])]
    if "type" in schema:
        found = [value for value in found if any(is_of(value, k) for k in kinds(schema, path))]
    return found


def kinds(schema: Schema, path: str) -> list[str]:
    """Its types; where it says nothing, those that its keywords are about."""
    wanted = schema.get("type")
    if wanted is not None:
        found = wanted if isinstance(wanted, list) else [wanted]
        for kind in found:
            if kind not in KINDS:
                raise fail(path, f"type {kind!r} is not known")
        return found
    for kind, keywords in KEYWORDS.items():
        if keywords & schema.keys():
            return [kind]
    return [kind for kind in KINDS if kind != "integer"]


KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}


def count(schema: Schema, keyword: str, path: str, most: int) -> int | None:
    """A keyword's number of things; None where it is not there."""
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1:
        raise fail(path, f"{keyword} {value!r} is not a number of things")
    if value > most:
        raise fail(path, f"{keyword} {value!r} is more than {most}")
    return int(value)


def key(value: Any) -> str:
    """What two JSON values have in common if they are one; true is not 1."""
    return json.dumps(value, sort_keys=True)


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are one."""
    return key(one) == key(other)


def is_of(value: Any, kind: str) -> bool:
    """Whether a JSON value is of that type."""
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, int | float):
        whole = isinstance(value, int) or value.is_integer()
        return kind == "number" or (kind == "integer" and whole)
    known = {str: "string", list: "array", dict: "object", type(None): "null"}
    return known.get(type(value)) == kind
