"""How models write calls of tools: marks around them, and what stands between the marks.

Called by `tools`, which finds the marks in a stream of text. Knows nothing of streams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Block(NamedTuple):
    """Marks around calls. Without a `close` they go on to the end of the answer.

    `sign`: what a template has that writes them, if it is not `open`.
    """

    open: str
    close: str
    sign: str = ""


BLOCKS = (
    Block("<tool_call>", "</tool_call>"),
    Block("<tool_calls>", "</tool_calls>"),
    Block("<TOOLCALL>", "</TOOLCALL>"),
    Block("<minimax:tool_call>", "</minimax:tool_call>"),
    Block("<function=", "</function>"),
    Block("<function name=", "</function>"),
    Block("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜"),
    Block("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "｜DSML｜"),
    Block("<|START_ACTION|>", "<|END_ACTION|>"),
    Block("<|tool_call>", "<tool_call|>"),
    Block("<|function_call|>", ""),
    Block("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    Block("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    Block("<|tool_call|>", ""),
    Block("<|python_tag|>", ""),
    Block("[TOOL_CALLS]", ""),
)
# for templates that say nothing of them
USUAL = (BLOCKS[0], BLOCKS[-1])

_NAME = r"(?:functions\.)?(?P<name>[A-Za-z_][\w.-]{0,127}?)(?::\d+)?"
_BEFORE_JSON = re.compile(
    r"(?:function<｜tool▁sep｜>)?" + _NAME + r"\s*(?:\[CALL_ID\][\w-]*)?"
    r"(?:\[ARGS\]|<｜tool▁sep｜>|<\|tool_call_argument_begin\|>)?\s*(?:```(?:json)?\s*)?(?=\{)"
)
_BETWEEN = re.compile(
    r"(?:\s|;|,|```(?:json)?|\[TOOL_CALLS\]|<｜tool▁calls?▁(?:begin|end)｜>"
    r"|<\|tool_call_(?:begin|end)\|>|<\|/?tool_call\|>|<\|python_tag\|>)*"
)
_FUNCTION = re.compile(r"<function=(?P<name>[^>\s]+)>(?P<body>.*?)(?:</function>|\Z)", re.S)
# names of tags may have something before them
_SPACE = r"(?:｜DSML｜|\w+:)?"
_INVOKE = re.compile(
    rf"<{_SPACE}(?:invoke|function) name=\"(?P<name>[^\"]+)\">(?P<body>.*?)"
    rf"</{_SPACE}(?:invoke|function)>",
    re.S,
)
_PARAMETER = re.compile(
    rf"<{_SPACE}param(?:eter)?(?:=| name=\")(?P<key>[^>\"]+)\"?(?: string=\"(?P<is_text>\w+)\")?>"
    rf"(?P<value>.*?)(?:</{_SPACE}param(?:eter)?>|\Z)",
    re.S,
)
# {key:<|"|>text<|"|>,other:2}
_LOOSE = re.compile(r"call:(?P<name>[\w.-]+)(?P<body>\{.*\})\Z", re.S)
_LOOSE_QUOTE = '<|"|>'
_LOOSE_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")
_PAIRS = re.compile(
    r"(?P<name>[A-Za-z_][\w.-]{0,127})\s*(?P<body>(?:<arg_key>.*?</arg_value>\s*)*)\Z", re.S
)
_PAIR = re.compile(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.S)


@dataclass(frozen=True, slots=True)
class Written:
    """A call as it was written; `arguments` are JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that there are.

    Attributes:
        types: by name and parameter, the JSON Schema type of it.
    """

    types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> Tools:
        """As OpenAI's API has them."""
        types: dict[str, dict[str, Any]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            parameters = function.get("parameters") or {}
            properties = parameters.get("properties") or {}
            types[str(function.get("name"))] = {
                key: schema.get("type") if isinstance(schema, Mapping) else None
                for key, schema in properties.items()
            }
        return cls(types)

    def value(self, name: str, key: str, text: str) -> Any:
        """A value that was written without JSON's quotes."""
        if self.types.get(name, {}).get(key) == "string":
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text


def blocks_of(source: str) -> tuple[Block, ...]:
    """Those that a template writes."""
    return tuple(block for block in BLOCKS if (block.sign or block.open) in source) or USUAL


def parse(text: str, tools: Tools) -> list[Written] | None:
    """The calls between two marks; None if it is anything else."""
    try:
        return [*_parse(text, tools)] or None
    except (ValueError, TypeError, RecursionError):
        return None


def _parse(text: str, tools: Tools) -> Iterator[Written]:
    at = _skip(text, 0)
    tags = _FUNCTION if "<function=" in text[at : at + 10] else _INVOKE
    if tags.match(text, at):
        yield from _tagged(text, at, tags, tools)
    elif (loose := _LOOSE.match(text.rstrip(), at)) is not None:
        yield Written(loose["name"], _arguments(json.loads(_quoted(loose["body"]))))
    elif (pairs := _PAIRS.match(text, at)) and (pairs["body"] or pairs["name"] in tools.types):
        name = pairs["name"]
        yield _written(name, [(p["key"], p["value"]) for p in _PAIR.finditer(pairs["body"])], tools)
    else:
        yield from _json_calls(text, at)


def _skip(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return found.end() if found else at


def _json_calls(text: str, at: int) -> Iterator[Written]:
    """Objects or lists of them, or names with objects after them."""
    decoder = json.JSONDecoder()
    while at < len(text):
        before = _BEFORE_JSON.match(text, at)
        value, at = decoder.raw_decode(text, before.end() if before else at)
        at = _skip(text, at)
        if before:
            yield Written(before["name"], _arguments(value))
        else:
            for one in value if isinstance(value, list) else [value]:
                yield of_json(one)


def of_json(value: Any) -> Written:
    """An object that is a call. Raises ValueError for any other."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise ValueError("no object")
    names = (value.get(key) for key in ("name", "tool_name", "function"))
    name = next((name for name in names if name is not None), None)
    found = [value[key] for key in ("arguments", "parameters") if key in value]
    if not isinstance(name, str) or not name or len(found) > 1:
        raise ValueError("no call")
    return Written(name, _arguments(found[0] if found else {}))


def _arguments(value: Any) -> str:
    if isinstance(value, str):
        # some write JSON into a text
        value = json.loads(value or "{}")
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ValueError("arguments are no object")
    return json.dumps(value, ensure_ascii=False)


def _tagged(text: str, at: int, tags: re.Pattern[str], tools: Tools) -> Iterator[Written]:
    while at < len(text):
        found = tags.match(text, at)
        if found is None:
            raise ValueError("something else")
        at = _skip(text, found.end())
        name, body = found["name"], found["body"].strip()
        if body.startswith("{"):
            yield Written(name, _arguments(json.loads(body)))
            continue
        found_pairs = [*_PARAMETER.finditer(body)]
        if not found_pairs and body:
            raise ValueError("no parameters")
        pairs = [(p["key"], _line(p["value"])) for p in found_pairs]
        texts = {p["key"].strip() for p in found_pairs if p["is_text"] == "true"}
        yield _written(name, pairs, tools, texts)


def _quoted(text: str) -> str:
    """JSON of what has other quotes, and names without any."""
    parts = text.split(_LOOSE_QUOTE)
    parts[::2] = [_LOOSE_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return "".join(parts)


def _line(text: str) -> str:
    """Without the newlines that set a value apart."""
    return text.removeprefix("\n").removesuffix("\n")


def _written(
    name: str, pairs: Sequence[tuple[str, str]], tools: Tools, texts: Collection[str] = ()
) -> Written:
    """`texts`: keys whose values are texts, whatever the schema says."""
    values = {
        key.strip(): text if key.strip() in texts else tools.value(name, key.strip(), text)
        for key, text in pairs
    }
    return Written(name, json.dumps(values, ensure_ascii=False))
