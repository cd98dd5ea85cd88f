"""JSON Schemas as grammars: what they allow is valid, and what must be allowed is."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from caravan.errors import UsageError
from caravan.llm import GenerationStats, Model, SamplingParams, generate
from caravan.llm.constraint import Constraint
from caravan.llm.grammar import json_grammar, json_schema_grammar
from llm.schemas import CASES, REFUSED, UNLIKE_PYTHON
from llm.test_grammars import fits
from llm.walker import Walker

CHECKER = jsonschema.FormatChecker()


def is_valid(value: Any, schema: Any) -> bool:
    return jsonschema.Draft202012Validator(schema, format_checker=CHECKER).is_valid(value)


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@pytest.fixture(scope="module")
def grammars() -> dict[str, str]:
    return {name: json_schema_grammar(schema) for name, (schema, _, _) in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_all_that_a_grammar_allows_is_valid(grammars, name):
    schema = CASES[name][0]
    walker = Walker(grammars[name], random.Random(name))
    for _ in range(10 if name == "long" else 100):
        value = json.loads(walker.text())
        assert name in UNLIKE_PYTHON or is_valid(value, schema), value


@pytest.mark.parametrize("name", CASES)
def test_the_engine_allows_what_it_should_and_nothing_that_it_should_not(model, grammars, name):
    schema, good, bad = CASES[name]
    for value in good:
        assert name in UNLIKE_PYTHON or is_valid(value, schema), value
        assert fits(model, grammars[name], dumps(value)), value
    for value in bad:
        assert not fits(model, grammars[name], dumps(value)), value
    walker = Walker(grammars[name], random.Random(name))
    for _ in range(2):
        text = walker.text()
        assert fits(model, grammars[name], text), text


def test_blanks_may_stand_between_but_not_for_ever(model, grammars):
    grammar = grammars["optional"]
    for text in ('{"a":1,"b":2}', '{ "a": 1, "b": 2 }', json.dumps({"a": 1, "b": 2}, indent=4)):
        assert fits(model, grammar, text), text
    for text in ('{  "b":2}', '{"b" :2}', ' {"b":2}', '{"b":2}\n', '{\n\n"b":2}', "{\n" + " " * 21):
        assert not fits(model, grammar, text), text


def test_properties_come_in_the_order_of_the_schema(model, grammars):
    assert not fits(model, grammars["optional"], '{"b":1,"a":2}')


def test_any_object(model):
    grammar = json_grammar()
    walker = Walker(grammar, random.Random(1))
    for _ in range(300):
        assert isinstance(json.loads(walker.text(100)), dict)
    assert fits(model, grammar, '{"a": [1, {"b": null}, "\\u00e9\\n"], "c": -1.5e-3}')
    for text in ("[]", '"a"', "{", '{"a": 01}', '{"a": "\\ud800"}', '{"a": "\n"}', "{'a': 1}"):
        assert not fits(model, grammar, text), text


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_not_supported_is_told_with_its_place(schema, words):
    with pytest.raises(UsageError, match="schema") as caught:
        json_schema_grammar(schema)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_model_follows_a_schema_whatever_it_would_say(context):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "mood": {"enum": ["happy", "sad"]},
            "age": {"type": "integer", "minimum": 1, "maximum": 30},
            "friends": {
                "type": "array",
                "items": {"type": "string", "maxLength": 8},
                "maxItems": 2,
            },
        },
        "required": ["name", "mood", "age", "friends"],
        "additionalProperties": False,
    }
    grammar = json_schema_grammar(schema)
    for seed in range(3):
        context.clear()
        sampling = SamplingParams(temp=1.2, seed=seed, grammar=grammar)
        stats = GenerationStats()
        text = "".join(generate(context, "My cat:", sampling=sampling, stats=stats))
        assert stats.stopped == "eog"
        assert is_valid(json.loads(text), schema)


def test_a_schema_of_many_parts_is_refused():
    defs: dict[str, Any] = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(20)
    }
    defs["d20"] = {"type": "string"}
    with pytest.raises(UsageError, match="too many parts"):
        json_schema_grammar({"$ref": "#/$defs/d0", "$defs": defs})


def test_a_deep_schema_is_refused():
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UsageError, match="nested too deeply"):
        json_schema_grammar(schema)


def test_what_is_merged_is_not_compared_value_by_value():
    """Each with each would take hours."""
    names = [[f"{letter}{n}" for n in range(100_000)] for letter in "ab"]
    for keyword in ("required", "enum"):
        with pytest.raises(UsageError, match="schema"):
            json_schema_grammar({"allOf": [{keyword: part} for part in names]})
    with pytest.raises(UsageError, match="both 0 and 1"):
        json_schema_grammar({"oneOf": [{"enum": names[0]}, {"enum": [*names[1], "a99999"]}]})
    parts = [{"properties": {f"{n}-{i}": {} for i in range(40)}} for n in range(5_000)]
    with pytest.raises(UsageError, match="too many parts"):
        json_schema_grammar({"allOf": parts})


def test_true_is_not_one():
    with pytest.raises(UsageError, match="no value"):
        json_schema_grammar({"allOf": [{"enum": [True]}, {"enum": [1]}]})


def test_many_definitions_that_lead_to_each_other(model: Model):
    defs: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}}]}
        for i in range(200)
    }
    defs["d200"] = {"type": "null"}
    grammar = json_schema_grammar({"$ref": "#/$defs/d0", "$defs": defs})
    assert fits(model, grammar, "[" * 200 + "null" + "]" * 200)


def test_long_arrays_of_long_arrays(model: Model):
    row = {"type": "array", "items": {"type": "integer"}, "maxItems": 2000}
    grammar = json_schema_grammar({"type": "array", "items": row, "maxItems": 2000})
    assert fits(model, grammar, "[[1, 2], [], [3]]")


def test_a_large_object(model: Model):
    schema = {
        "type": "object",
        "properties": {
            f"field-{i}": {"type": ["string", "null"], "maxLength": 9} for i in range(200)
        },
        "required": [f"field-{i}" for i in range(0, 200, 2)],
        "additionalProperties": {"type": "integer"},
    }
    grammar = json_schema_grammar(schema)
    Constraint(grammar, model).close()
    walker = Walker(grammar, random.Random(5))
    for _ in range(5):
        assert is_valid(json.loads(walker.text(5000)), schema)


# any schema


def _schema(rng: random.Random, depth: int) -> Any:
    simple = ["integer", "number", "string", "boolean", "enum"]
    kind = rng.choice(simple + ["object", "array", "any", "types"] * (depth > 0))
    if kind in ("integer", "number"):
        scale = rng.choice([1, 3, 20, 1000, 123456])
        digits = rng.randrange(3) if kind == "number" else None
        low, high = sorted(round(rng.uniform(-scale, scale), digits) for _ in range(2))
        bounds = {
            rng.choice(["minimum", "exclusiveMinimum"]): low,
            rng.choice(["maximum", "exclusiveMaximum"]): high + 2,
        }
        return {"type": kind, **dict(rng.sample(list(bounds.items()), rng.randrange(3)))}
    if kind == "string":
        least = rng.randrange(4)
        more = {"minLength": least, "maxLength": least + rng.randrange(4)}
        patterns = [{}, {"pattern": rng.choice(["a", "^[a-c]*$", "^.b?", "x$|^y", "^(ab|c)*$"])}]
        return {"type": "string", **rng.choice([{}, more, *patterns])}
    if kind == "boolean":
        return {"type": "boolean", "title": "b"}
    if kind == "enum":
        return {"enum": rng.sample(["a", "ab", 1, 1.5, None, True, [1], {"k": "v"}], 3)}
    if kind == "object":
        names = rng.sample(["a", "ab", "b", "é", 'q"', "x y"], rng.randrange(4))
        found: dict[str, Any] = {
            "type": "object",
            "properties": {n: _schema(rng, depth - 1) for n in names},
        }
        found["required"] = [n for n in names if rng.random() < 0.5]
        if rng.random() < 0.5:
            found["additionalProperties"] = rng.choice([True, False, {"type": "null"}])
        return found
    if kind == "array":
        least = rng.randrange(3)
        found = {"type": "array", "minItems": least}
        if rng.random() < 0.5:
            found["maxItems"] = least + rng.randrange(3)
        if rng.random() < 0.7:
            found["items"] = _schema(rng, depth - 1)
        if rng.random() < 0.3:
            found["prefixItems"] = [_schema(rng, depth - 1) for _ in range(rng.randrange(3))]
        return found
    if kind == "any":
        return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
    return {"type": rng.sample(["string", "null", "integer", "array", "object"], 2), "minLength": 1}


@pytest.mark.parametrize("seed", range(4))
def test_any_schema(model, seed):
    rng = random.Random(seed)
    for number in range(100):
        schema = _schema(rng, 3)
        grammar = json_schema_grammar(schema)
        walker = Walker(grammar, rng)
        for _ in range(20):
            text = walker.text()
            assert is_valid(json.loads(text), schema), (schema, text)
        if number % 10 == 0:
            assert fits(model, grammar, text), (schema, text)
