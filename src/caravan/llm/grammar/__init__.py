"""Grammars in GBNF: written for JSON and for JSON Schemas, read before the engine reads them.

Texts in, texts and values out; knows neither models nor the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from caravan.errors import UsageError
from caravan.llm.grammar.gbnf import parse
from caravan.llm.grammar.kinds import Kinds
from caravan.llm.grammar.plain import plain
from caravan.llm.grammar.rules import Rules
from caravan.llm.grammar.safety import require_safe
from caravan.llm.grammar.schema import Document, fail

__all__ = ["json_grammar", "json_schema_grammar"]


def json_grammar() -> str:
    """The GBNF of any JSON object, with bounded blanks between its parts."""
    rules = Rules()
    return rules.text(rules.shared("object"))


def json_schema_grammar(schema: Mapping[str, Any]) -> str:
    """The GBNF of JSON that a JSON Schema allows, for SamplingParams.grammar.

    Properties come in the order of the schema. Where it says nothing of other properties, there
    are none, unless it names none at all.

    Raises UsageError, with the place and the keyword, for what is not supported and changes which
    values are valid, and for a schema that allows nothing.
    """
    rules = Rules()
    if not isinstance(schema, Mapping) and not isinstance(schema, bool):
        raise fail("#", "not a schema")
    kinds = Kinds(Document(schema), rules)
    root = kinds.rule({"$ref": "#"}, "#")
    kinds.finish()
    text = rules.text(root)
    try:
        require_safe(plain(parse(text)))
    except UsageError as exc:
        raise UsageError(f"schema: {exc}") from exc
    return text
