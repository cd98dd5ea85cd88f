"""JSON Schemas: with values that a grammar of them allows and does not, and those that have none."""
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from typing import Any

STRICT = {
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "explanation": {"type": "string", "description": "why"},
                    "output": {"type": "string"},
                },
                "required": ["explanation", "output"],
                "additionalProperties": False,
            },
        },
        "final_answer": {"type": "string"},
    },
    "required": ["steps", "final_answer"],
    "additionalProperties": False,
}
UI = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["div", "button", "header"]},
        "label": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#"}},
        "attributes": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "value": {"type": "string"}},
                "required": ["name", "value"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["type", "label", "children", "attributes"],
    "additionalProperties": False,
}
LINKED = {
    "type": "object",
    "properties": {"list": {"$ref": "#/$defs/node"}},
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "additionalProperties": False,
            "required": ["next", "value"],
        }
    },
    "additionalProperties": False,
    "required": ["list"],
}
PETS = {
    "oneOf": [{"$ref": "#/definitions/cat"}, {"$ref": "#/definitions/dog"}],
    "discriminator": {"propertyName": "kind"},
    "definitions": {
        "cat": {
            "type": "object",
            "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
            "required": ["kind", "lives"],
        },
        "dog": {
            "title": "Dog",
            "type": "object",
            "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}},
            "required": ["kind"],
        },
    },
}
TAGGED = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}},
        {"type": "object", "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}}},
    ],
    "discriminator": {"propertyName": "kind", "mapping": {}},
}
OPTIONAL = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in "abcd"},
    "required": ["b"],
}
NAMES = {
    "type": "object",
    "properties": {"na": {"type": "integer"}, "name": {"type": "integer"}, '"q\\\n': {}},
    "additionalProperties": {"type": "boolean"},
}

# a schema; values that it has to leave possible; values that it must not
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "strict": (
        STRICT,
        [{"steps": [], "final_answer": ""}, {"steps": [{"explanation": "é", "output": "\n"}], "final_answer": "x"}],
        [{"steps": []}, {"steps": [{}], "final_answer": ""}, []],
    ),
    "ui": (
        UI,
        [{"type": "div", "label": "", "children": [{"type": "button", "label": "b", "children": [], "attributes": []}], "attributes": [{"name": "n", "value": "v"}]}],
        [{"type": "span", "label": "", "children": [], "attributes": []}],
    ),
    "linked": (LINKED, [{"list": {"value": 1.5e3, "next": {"value": -1, "next": None}}}], [{}]),
    "pets": (PETS, [{"kind": "cat", "lives": 9}, {"kind": "dog"}], [{"kind": "cow"}, {"kind": "cat"}]),
    "optional": (OPTIONAL, [{"b": 1}, {"a": 1, "b": 2, "d": 3}, {"b": 0, "c": -7}], [{}, {"a": 1}]),
    "other names": (
        NAMES,
        [{}, {"n": True}, {"name": 1}, {"na": 1, "names": False, "": True}, {'"q\\\n': [1], "x": True}],
        [{"name": True}, {"na": False}, {"x": 1}],
    ),
    "any": ({}, [{"a": [1, None, True, "x"]}, [], 1, "s", None], []),
    "true": (True, [1, {"x": {}}], []),
    "any object": ({"type": "object"}, [{}, {"a": 1}], [[], 1]),
    "no properties": ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
    "map": ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1}], [{"a": "1"}]),
    "required alone": ({"type": "object", "required": ["x"]}, [{"x": [1]}], [{}]),
    "any array": ({"type": "array"}, [[], [1, "a"]], [{}]),
    "counted": ({"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 4}, [[None] * 2, [None] * 4], [[None], [None] * 5]),
    "at most": ({"items": {"type": "boolean"}, "maxItems": 1}, [[], [True]], [[True, True]]),
    "at least": ({"items": {"type": "boolean"}, "minItems": 1}, [[True], [False] * 9], [[]]),
    "none": ({"type": "array", "maxItems": 0}, [[]], [[1]]),
    "tuple": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 1},
        [[1], [1, "a"]],
        [[], ["a"], [1, "a", 2]],
    ),
    "tuple and more": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "minItems": 3},
        [[1, "a", "b"], [1, "a", "b", "c"]],
        [[1], [1, "a"], [1, 2, 3]],
    ),
    "tuple of few": (
        {"type": "array", "prefixItems": [{"type": "integer"}] * 3, "maxItems": 2},
        [[], [1], [1, 2]],
        [[1, 2, 3]],
    ),
    "enum": ({"enum": ["a", 1, None, True, 2.5, {"x": [1]}, "é\"\n"]}, ["a", 1, None, True, 2.5, {"x": [1]}, "é\"\n"], ["b", False]),
    "enum of a type": ({"type": "string", "enum": ["a", 1, None]}, ["a"], [1, None]),
    "const": ({"const": {"a": "b"}}, [{"a": "b"}], [{}]),
    "const of enum": ({"enum": [1, True], "const": True}, [True], [1]),
    "nullable": ({"type": "string", "nullable": True}, ["a", None], [1]),
    "nullable enum": ({"type": "string", "enum": ["a"], "nullable": True}, ["a", None], ["b"]),
    "types": ({"type": ["string", "integer", "number", "null"]}, ["a", 1, 1.5, None], [True, []]),
    "anyOf beside": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}],
        [{}],
    ),
    "allOf": (
        {"allOf": [{"$ref": "#/$defs/x"}, {"properties": {"b": {"type": "string"}}, "required": ["b"]}], "$defs": {"x": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}},
        [{"a": 1, "b": "x"}],
        [{"a": 1}, {"b": "x"}],
    ),
    "allOf of one": ({"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "integer"}}, "description": "d"}, [1], ["a"]),
    "allOf narrows": (
        {"allOf": [{"properties": {"a": {"type": "integer", "minimum": 3}}}, {"properties": {"a": {"maximum": 5}}, "required": ["a"]}]},
        [{"a": 3}, {"a": 5}],
        [{"a": 2}, {"a": 6}],
    ),
    "allOf closes": (
        {"allOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}]},
        [{}, {"a": 1}],
        [{"b": 1}],
    ),
    "ref with more": ({"$ref": "#/$defs/x", "maximum": 5, "$defs": {"x": {"type": "integer", "minimum": 4}}}, [4, 5], [3, 6]),
    "escaped ref": ({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"const": 1}}}, [1], [2]),
    "ref into a list": ({"prefixItems": [{"type": "integer"}, {"$ref": "#/prefixItems/0"}], "items": False, "minItems": 2}, [[1, 2]], [[1, "a"]]),
    "length": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é😀\n"], ["a", "abcd"]),
    "long": ({"type": "string", "maxLength": 5000}, ["", "a" * 500], []),
    "at least long": ({"type": "string", "minLength": 3}, ["abc", "a" * 50], ["ab"]),
    "pattern": ({"type": "string", "pattern": "^[A-Z]{2}-\\d+$"}, ["AB-1", "XY-123"], ["A-1", "AB-", "xAB-1"]),
    "pattern anywhere": ({"type": "string", "pattern": "b+c"}, ["abbcd", "bc", "\nbc\""], ["ac", "b"]),
    "pattern of choices": ({"type": "string", "pattern": "^(a|bc?)*$|^x(?:y|z){1,2}"}, ["", "abcb", "xyz", "xy and more"], ["c", "x"]),
    "pattern and length": ({"type": "string", "pattern": "^[ab]+$", "minLength": 3, "maxLength": 4}, ["aba", "abab"], ["ab", "ababa"]),
    "pattern of escapes": ({"type": "string", "pattern": '^[\\\\"\\n/\\]-]+\\.\\x41\\u00e9$'}, ['\\"\n/]-.Aé'], ["x.Aé"]),
    "pattern of classes": ({"type": "string", "pattern": "^\\w\\W\\S[^a\\d]$"}, ["a-bb", "_ é\n"], ["--bb", "a-b1", "a-ba"]),
    "pattern lazy": ({"pattern": "^(?<year>\\d{4}?)-.+?$"}, ["2024-x"], ["2024-"]),
    "integers": ({"type": "integer", "minimum": -12, "maximum": 105}, [-12, -9, 0, 7, 99, 100, 105], [-13, 106, 1000]),
    "exclusive": ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10}, [1, 9], [0, 10]),
    "old exclusive": ({"type": "integer", "minimum": 5, "exclusiveMinimum": 4, "maximum": 1e3}, [5, 1000], [4, 1001]),
    "positive": ({"type": "integer", "minimum": 1}, [1, 10, 12345678], [0, -1]),
    "negative": ({"type": "integer", "maximum": -1}, [-1, -100], [0, 1]),
    "large": ({"type": "integer", "minimum": 1000}, [1000, 99999, 10**12], [999, 1]),
    "fractions": ({"type": "number", "minimum": -0.5, "maximum": 2.25}, [-0.5, -0.25, 0, 1.75, 2, 2.25, 2.2], [-0.51, 2.26, 3, -1]),
    "unit": ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5, 0.001, 0.999], [0, 1, 1.5, -0.5]),
    "percent": ({"type": "number", "minimum": 0, "maximum": 100}, [0, 0.5, 99.99, 100], [-1, 100.5, 101]),
    "small": ({"type": "number", "minimum": 0.125, "maximum": 0.5}, [0.125, 0.3, 0.5], [0.12, 0.51, 0, 1]),
    "half open": ({"type": "number", "exclusiveMinimum": 1.5}, [1.6, 2, 1000.25], [1.5, 1, 0]),
    "below": ({"type": "number", "exclusiveMaximum": -1.5}, [-1.6, -2, -1000.25], [-1.5, -1, 0, 2]),
    "format ignored": ({"type": "integer", "format": "int32"}, [1], ["a"]),
    "multiples": ({"type": "integer", "multipleOf": 7}, [0, 7, -7, 14, 49, 7000, 123459], [1, 8, 15]),
    "multiples from 0": ({"type": "integer", "multipleOf": 5, "minimum": 0}, [0, 5, 100], [1, -5]),
    "whole": ({"type": "number", "multipleOf": 1}, [0, 12, -5], [0.5]),
    "cents": ({"type": "number", "multipleOf": 0.01}, [0, -12, 0.5, 3.25], [0.125]),
    "bool": ({"type": "boolean"}, [True, False], [1, "true"]),
    "date": ({"type": "string", "format": "date"}, ["2024-02-29", "1999-12-31"], ["2023-02-29", "2023-04-31", "1-1-1"]),
    "date-time": ({"type": "string", "format": "date-time"}, ["2024-01-01T23:59:59Z", "2024-01-01T00:00:00.123+02:00"], ["2024-01-01"]),
    "time": ({"format": "time"}, ["12:00:00Z"], ["25:00:00Z"]),
    "uuid": ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
    "email": ({"type": "string", "format": "email"}, ["ada.l@example.org"], ["ada"]),
    "ipv4": ({"type": "string", "format": "ipv4"}, ["192.168.0.1", "255.255.255.255"], ["256.1.1.1"]),
    "ipv6": ({"type": "string", "format": "ipv6"}, ["2001:db8:0:0:0:0:0:1"], ["g::"]),
    "hostname": ({"type": "string", "format": "hostname"}, ["a-b.example.org"], ["-a"]),
    "duration": ({"type": "string", "format": "duration"}, ["P1DT2H3M", "PT5S", "P2W"], ["1D"]),
    "url": ({"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083}, ["http://a.org/"], [""]),
    "tagged": (TAGGED, [{"kind": "cat"}, {"kind": "dog", "name": "x"}], [{}, {"name": "x"}]),
    "uri": ({"type": "string", "format": "uri"}, ["https://example.org/a/b?c=d"], ["example"]),
}

# What the validator of the tests takes for something else: `nullable` is OpenAPI's, classes and
# named groups are ECMA's, a time has a zone, and 0.07 is seven times 0.01.
UNLIKE_PYTHON = {"nullable", "nullable enum", "pattern of classes", "pattern lazy", "time", "cents"}

REFUSED: list[tuple[Any, str]] = [
    ({"type": "date"}, "#: type 'date'"),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "#/properties/a: uniqueItems"),
    ({"type": "integer", "multipleOf": 5, "maximum": 100}, "multipleOf beside"),
    ({"type": "integer", "multipleOf": 0}, "multipleOf 0"),
    ({"type": "number", "multipleOf": 0.3}, "multipleOf 0.3"),
    ({"type": "integer", "multipleOf": 101}, "multipleOf 101"),
    ({"not": {"type": "string"}}, "not"),
    ({"if": {}, "then": {}}, "if"),
    ({"patternProperties": {"^a": {}}}, "patternProperties"),
    ({"type": "array", "contains": {"const": 1}}, "contains"),
    ({"type": "object", "minProperties": 1}, "minProperties"),
    ({"type": "array", "items": [{}]}, "items as a list"),
    ({"type": "string", "format": "color"}, "format 'color'"),
    ({"type": "string", "format": "date", "minLength": 30}, "format beside"),
    ({"type": "string", "pattern": "(?=a)b"}, "looking ahead"),
    ({"type": "string", "pattern": "(?<=a)b"}, "looking back"),
    ({"type": "string", "pattern": "\\bword"}, "escape"),
    ({"type": "string", "pattern": "(a)\\1"}, "escape"),
    ({"type": "string", "pattern": "a^b"}, "anchor"),
    ({"type": "string", "pattern": "(a"}, "closing parenthesis"),
    ({"type": "string", "pattern": "a)"}, "a parenthesis too many"),
    ({"type": "string", "pattern": "[a"}, "class has no end"),
    ({"type": "string", "pattern": "[z-a]"}, "range"),
    ({"type": "string", "pattern": "*"}, "nothing to repeat"),
    ({"type": "string", "pattern": "a**"}, "repetition"),
    ({"type": "string", "pattern": "a{3,1}"}, "fewer"),
    ({"type": "string", "pattern": "(a|b)*a(a|b){12}"}, "too many states"),
    ({"type": "string", "pattern": "((a{99}){99}){99}"}, "too large"),
    ({"type": "string", "pattern": "(" * 99 + "a" + ")" * 99}, "nested too deeply"),
    ({"type": "string", "pattern": "^a$", "minLength": 2}, "no text matches"),
    ({"type": "string", "pattern": 5}, "pattern is not a text"),
    ({"type": "string", "maxLength": -1}, "maxLength -1"),
    ({"type": "string", "maxLength": "9"}, "maxLength '9'"),
    ({"type": "string", "maxLength": 20_000}, "maxLength 20000"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "no text"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "no array"),
    ({"type": "array", "maxItems": 5000}, "maxItems 5000"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "no number"),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "no number"),
    ({"type": "number", "exclusiveMinimum": 3, "maximum": 3}, "no number"),
    ({"type": "number", "minimum": "3"}, "minimum '3'"),
    ({"type": "number", "minimum": 1e300}, "minimum 1e"),
    ({"enum": []}, "no value"),
    ({"enum": "abc"}, "enum is not a list"),
    ({"type": "integer", "enum": ["a"]}, "no value"),
    ({"enum": ["a"], "minLength": 3}, "minLength beside enum"),
    ({"const": float("nan")}, "not JSON"),
    (False, "no value"),
    ({"anyOf": []}, "anyOf"),
    ({"anyOf": [False]}, "no value"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf: a value may be of both 0 and 1"),
    ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "oneOf"),
    ({"oneOf": [{"minLength": 3}, {"minimum": 2}]}, "oneOf"),
    ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, "oneOf"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "two different pattern"),
    ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "no value"),
    ({"allOf": {}}, "allOf is not a list"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "property 'a' is not allowed"),
    ({"type": "object", "required": "a"}, "required is not"),
    ({"type": "object", "properties": []}, "properties is not"),
    ({"type": "object", "properties": {"a": 1}}, "#/properties/a: not a schema"),
    ({"$ref": "#/nowhere"}, "points to nothing"),
    ({"$ref": "https://example.org/x"}, "not one into this schema"),
    ({"$ref": 5}, "not one into this schema"),
    ({"$ref": "#"}, "refers to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "nothing fulfils"),
    ({"allOf": [{"$ref": "#"}, {"type": "object"}]}, "refers to itself"),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "nothing fulfils"),
    ({"enum": ["x" * 1000 + str(i) for i in range(300)]}, "characters"),
    ("text", "not a schema"),
]
