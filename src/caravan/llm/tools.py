"""`ToolCalls`: a stream of text taken apart into content and calls of tools.

What may yet become a call is held back; what turns out to be none comes as content, and nothing is
lost. Called by the server, one for each answer.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caravan.errors import UsageError
from caravan.llm.callforms import Tools, Written, blocks_of, parse

_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 24
_ANYTHING: Mapping[str, Any] = {"type": "object"}
# how an object begins that may be a call
_KEYS = (
    *("name", "tool_name", "type", "function"),
    *("id", "tool_call_id", "arguments", "parameters"),
)
# what stands between a name and its arguments where the name comes first, whole and in part
_TO_ARGUMENTS = re.compile(r"\s*(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{)")
_PERHAPS_TO_ARGUMENTS = re.compile(
    r"\s*(?:\[[A-Z_]*|\[CALL_ID\][\w-]*(?:\[[A-Z]*)?|.*\[ARGS\]\s*)?"
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        id: as OpenAI's API has them.
        arguments: JSON of an object.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """The next part of an answer: text, or a call."""

    content: str = ""
    call: ToolCall | None = None


class ToolCalls:
    """See the module.

    Args:
        source: of the template, which shows how the model was taught to write calls.
        tools: that there are, as in OpenAI's API. An answer that is nothing but JSON is a call if
            it names one of them.
    """

    def __init__(self, source: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._blocks = blocks_of(source)
        self._tools = Tools.of(tools)
        self._names_first = "[TOOL_CALLS]" in source
        self._held = ""
        self._mode: Callable[[bool], Iterator[Delta]] = self._at_start
        self._json = _Json(0)
        self._block = self._blocks[0]
        # where what is held has the inside of the block, what follows its mark, and what is new
        self._inside = self._past = self._seen = 0
        self._after_call = False

    def feed(self, text: str) -> list[Delta]:
        """What is certain now; may be nothing."""
        self._held += text
        return self._run(False)

    def finish(self) -> list[Delta]:
        """The rest."""
        return self._run(True)

    def _run(self, ended: bool) -> list[Delta]:
        found: list[Delta] = []
        while True:
            mode = self._mode
            found += mode(ended)
            if self._mode == mode:
                return _joined(found)

    # the beginning, where a call may stand without marks

    def _at_start(self, ended: bool) -> Iterator[Delta]:
        text = self._held.lstrip()
        begins = _begins_call(text)
        at = len(self._held) - len(text)
        if begins is False and self._names_first:
            begins, length = self._begins_with_name(text)
            at += length
        if begins:
            self._json, self._mode = _Json(at), self._bare
        elif begins is False or ended:
            self._mode = self._in_text
        yield from ()

    def _begins_with_name(self, text: str) -> tuple[bool | None, int]:
        """Whether it is a call of a tool, None for perhaps, and where its arguments are then."""
        begins: bool | None = False
        for name in self._tools.types:
            if name.startswith(text):
                begins = None
            elif text.startswith(name):
                rest = text[len(name) :]
                if (found := _TO_ARGUMENTS.match(rest)) is not None:
                    return True, len(name) + found.end()
                if _PERHAPS_TO_ARGUMENTS.fullmatch(rest):
                    begins = None
        return begins, 0

    def _bare(self, ended: bool) -> Iterator[Delta]:
        end = self._json.end(self._held)
        if end is None and not ended:
            return
        calls = parse(self._held[:end], self._tools)
        if calls and all(call.name in self._tools.types for call in calls):
            yield from self._called(calls, len(self._held) if end is None else end)
            self._mode = self._between_bare
        else:
            self._mode = self._in_text

    def _between_bare(self, ended: bool) -> Iterator[Delta]:
        """After a call: another one, or anything."""
        text = self._held.lstrip("; \t\r\n")
        if text.startswith("{"):
            self._held, self._mode = text, self._at_start
        elif text or ended:
            self._mode = self._in_text
        yield from ()

    # text, and marks in it

    def _in_text(self, ended: bool) -> Iterator[Delta]:
        if self._after_call:
            self._held = self._held.lstrip()
        places = [(self._held.find(block.open), block) for block in self._blocks]
        at, block = min((p for p in places if p[0] >= 0), default=(-1, self._block))
        if at >= 0:
            # white space before a call is its own, if it is one
            cut = len(self._held[:at].rstrip())
            yield from self._content(cut)
            self._block, self._mode = block, self._in_block
            self._past = self._seen = at - cut + len(block.open)
            # a mark with the beginning of a name is part of the inside
            self._inside = at - cut if block.open.endswith("=") else self._past
        elif ended:
            yield from self._content(len(self._held))
        else:
            keep = max(_overlap(self._held, block.open) for block in self._blocks)
            yield from self._content(len(self._held[: len(self._held) - keep].rstrip()))

    def _content(self, count: int) -> Iterator[Delta]:
        text, self._held = self._held[:count], self._held[count:]
        if text:
            self._after_call = False
            yield Delta(text)

    def _in_block(self, ended: bool) -> Iterator[Delta]:
        while True:
            end = self._end_of_block()
            if end is None and not ended:
                return
            inside, past = end or (len(self._held), len(self._held))
            text = self._held[self._inside : inside]
            calls = parse(text, self._tools)
            if calls:
                yield from self._called(calls, past)
            elif end is not None and _Json(0).is_inside_of_text(text):
                # the mark stands in the arguments
                self._seen = past
                continue
            else:
                yield from self._content(self._past if end is None else past)
            self._mode = self._in_text
            return

    def _end_of_block(self) -> tuple[int, int] | None:
        """Where the inside ends, and where what follows begins."""
        close = self._block.close
        at = self._held.find(close, self._seen) if close else -1
        if at < 0:
            self._seen = max(self._seen, len(self._held) - len(close) + 1)
            return None
        past = at + len(close)
        return (past if self._inside < self._past else at), past

    def _called(self, calls: Sequence[Written], end: int) -> Iterator[Delta]:
        self._held = self._held[end:]
        self._after_call = True
        for call in calls:
            yield Delta(call=ToolCall(new_id(), call.name, call.arguments))


class _Json:
    """Looks for the end of an object or a list that begins at a place, further each time."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._depth = 0
        self._quoted = self._escaped = False

    def end(self, text: str) -> int | None:
        """Where it ends, if that has come."""
        for at in range(self._at, len(text)):
            one = text[at]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = one == "\\", one != '"'
            elif one == '"':
                self._quoted = self._depth > 0
            elif one in "{[":
                self._depth += 1
            elif one in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._at = at
                    return at + 1
        self._at = max(self._at, len(text))
        return None

    def is_inside_of_text(self, text: str) -> bool:
        """Whether a text of it is open at the end."""
        return self.end(text) is None and self._quoted


def _begins_call(text: str) -> bool | None:
    """Whether it is the beginning of an object that may be a call, or of a list of them; None for
    perhaps."""
    for open in ("[", "{"):
        if not text:
            return None
        if text[0] == open:
            text = text[1:].lstrip()
        elif open == "{":
            return False
    keys = [f'"{key}"' for key in _KEYS]
    if any(text.startswith(key) for key in keys):
        return True
    return None if any(key.startswith(text) for key in keys) else False


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end may be the beginning of a mark."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def _joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Texts that follow each other as one."""
    found: list[Delta] = []
    for delta in deltas:
        if delta.call is None and found and found[-1].call is None:
            found[-1] = Delta(found[-1].content + delta.content)
        else:
            found.append(delta)
    return found


def new_id() -> str:
    return "call_" + "".join(secrets.choice(_LETTERS) for _ in range(_ID_LENGTH))


def call_schema(source: str, tools: Sequence[Mapping[str, Any]], name: str = "") -> dict[str, Any]:
    """JSON Schema of an answer that is one call of a tool, which `ToolCalls` takes for one.

    Args:
        source: of the template.
        tools: as in OpenAI's API.
        name: of the one that is to be called; empty: any.

    Raises UsageError when there is no such tool.
    """
    functions = {str(f["name"]): f for f in (tool.get("function", tool) for tool in tools)}
    wanted = [name] if name else [*functions]
    if not wanted or wanted[0] not in functions:
        raise UsageError(f"there is no tool {name!r}" if name else "there are no tools")
    key = "parameters" if "python_tag" in source else "arguments"
    # each in a place of its own, so that what a schema refers to in itself is there
    schemas = {
        str(n): functions[one].get("parameters") or _ANYTHING for n, one in enumerate(wanted)
    }
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": one}, key: {"$ref": f"#/$defs/{number}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for number, one in enumerate(wanted)
    ]
    defined = {number: _moved(schema, f"#/$defs/{number}") for number, schema in schemas.items()}
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": defined}


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands in another place of a document than its root."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, place) for key, value in schema.items()}
        target = schema.get("$ref")
        if isinstance(target, str) and target.startswith("#"):
            moved["$ref"] = place + target[1:]
        return moved
    return [_moved(one, place) for one in schema] if isinstance(schema, list) else schema
