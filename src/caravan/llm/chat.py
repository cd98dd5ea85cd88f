"""`ChatTemplate`: messages to the prompt that a model was trained to continue.

Owns what is asked of a template beside rendering: where text wants to stand, how earlier calls of
tools are written, what ends an answer. Called by `conversation`, the server and the commands.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caravan.errors import UsageError
from caravan.llm.grammar import json_schema_grammar
from caravan.llm.model import Model
from caravan.llm.tools import ToolCalls, call_schema

if TYPE_CHECKING:
    from jinja2 import Template

    from caravan.llm.jinja import Environment

Message = Mapping[str, Any]
# texts that no template has a use for
_PROBE, _QUESTION = "Zebra-Answer", "Zebra-Question"
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}}
_FUNCTION = {"name": "f", "description": "f", "parameters": {**_PARAMETERS, "required": ["a"]}}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_LONGEST_STOP = 32


class ChatTemplate:
    """See the module. Several threads may render at the same time.

    Attributes:
        source: the template's text.
        tool_source: that of the one for conversations with tools; None: `source` is for all.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        bos: str = "",
        eos: str = "",
        add_bos: bool = False,
        ends: Callable[[str], bool] = lambda text: False,
    ) -> None:
        """Compile it.

        Args:
            bos, eos: the texts of the tokens that begin and end a sequence.
            add_bos: whether tokenizing adds the first of them; then a prompt has it not.
            ends: whether a text begins with a token that ends an answer.

        Raises UsageError for what is no template.
        """
        self.source = source
        self.tool_source = tool_source
        self._bos, self._eos, self._add_bos = bos, eos, add_bos
        self._ends = ends
        self._environment = _environment()
        self._template = self._compiled(source)
        self._tool_template = self._compiled(tool_source) if tool_source else self._template

    @classmethod
    def of(cls, model: Model, override: str | None = None) -> ChatTemplate:
        """The template of a model.

        Args:
            override: another one: a file, or its text.

        Raises UsageError when the model has none, for one that is not Jinja, and for a file that
        cannot be read.
        """
        source = model.chat_template() if override is None else _read(override)
        if source is None or "{" not in source:
            raise UsageError(f"{model.path.name} has no chat template")

        def text(token: int | None) -> str:
            return (
                "" if token is None else model.piece(token, special=True).decode("utf-8", "replace")
            )

        def ends(text: str) -> bool:
            tokens = model.tokenize(text, add_special=False)
            return bool(tokens) and model.is_eog(tokens[0])

        return cls(
            source,
            tool_source=model.chat_template("tool_use") if override is None else None,
            bos=text(model.bos),
            eos=text(model.eos),
            add_bos=model.add_bos,
            ends=ends,
        )

    def __repr__(self) -> str:
        return f"<ChatTemplate of {len(self.source)} characters>"

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt, to be tokenized as any other: what tokenizing adds is not in it.

        Args:
            messages: with `role` and `content`, and whatever else the template reads. Content is a
                text, or a list of parts `{"type": "text", "text": …}`, which are lines of it.
            tools: as in OpenAI's API.
            add_generation_prompt: end with the beginning of an answer.
            variables: others of the template.

        Raises UsageError for messages of another form, and in the template's own words for what it
        refuses.
        """
        given = [dict(_plain(message)) for message in messages]
        if not given:
            raise UsageError("there are no messages")
        if any(message.get("tool_calls") for message in given):
            given = [self._with_arguments(message) for message in given]
        if self._wants_parts:
            given = [_in_parts(message) for message in given]
        if "developer" not in self.source:
            # the newer name of the same
            given = [_renamed(message, "developer", "system") for message in given]
        template = self._tool_template if tools else self._template
        text = self._rendered(
            template,
            given,
            tools=[*tools] or None,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        return text.removeprefix(self._bos) if self._add_bos else text

    @cached_property
    def stop(self) -> tuple[str, ...]:
        """Texts that end an answer beside the tokens that do, where the template ends one with a
        text that is no such token."""
        messages = [
            _message("user", _QUESTION),
            _message("assistant", _PROBE),
            _message("user", _QUESTION),
        ]
        try:
            rest = self._rendered(self._template, messages).partition(_PROBE)[2]
        except UsageError:
            return ()
        end = rest.partition(_QUESTION)[0].lstrip(" ").rstrip()
        # the name of a token ends it, whatever follows
        tag = end.lstrip().partition(">")
        if tag[0].startswith("<") and tag[1]:
            end = tag[0] + tag[1]
        told = (
            self._ends(end) or self._ends(end.lstrip()) or (self._eos and end.startswith(self._eos))
        )
        return () if told or not 2 < len(end) <= _LONGEST_STOP else (end,)

    # calls of tools

    def calls(self, tools: Sequence[Mapping[str, Any]]) -> ToolCalls:
        """What takes the calls of these tools out of one answer."""
        return ToolCalls(self.tool_source or self.source, tools)

    def call_grammar(self, tools: Sequence[Mapping[str, Any]], name: str = "") -> str:
        """The grammar of an answer that is a call of one of them, or of the one of that name.

        Raises UsageError for no such tool, and for parameters that no grammar can be made of.
        """
        return json_schema_grammar(call_schema(self.tool_source or self.source, tools, name))

    # what it wants

    @cached_property
    def _wants_parts(self) -> bool:
        """It shows texts only where they are parts of a list."""
        try:
            if _PROBE in self._rendered(self._template, [_message("user", _PROBE)]):
                return False
        except UsageError:
            pass
        try:
            message = _in_parts(_message("user", _PROBE))
            return _PROBE in self._rendered(self._template, [message])
        except UsageError:
            return False

    @cached_property
    def _wants_objects(self) -> bool:
        """It writes the arguments of calls as JSON itself, from an object."""
        function = {"name": "f", "arguments": {"a": _PROBE}}
        call = {"id": "call00000", "type": "function", "function": function}
        messages = [_message("user", _QUESTION), _message("assistant", "") | {"tool_calls": [call]}]
        for tools in (_TOOLS, None):
            with contextlib.suppress(UsageError):
                text = self._rendered(self._tool_template, messages, tools=tools)
                # an object that was made a text by Python is no JSON
                if _PROBE in text and f"'a': '{_PROBE}'" not in text:
                    return True
        return False

    def _with_arguments(self, message: Message) -> dict[str, Any]:
        calls = message.get("tool_calls")
        if not calls:
            return dict(message)
        if not isinstance(calls, Sequence):
            raise UsageError("a call of a tool in the messages is none: they are no list")
        return {**message, "tool_calls": [self._written(call) for call in calls]}

    def _written(self, call: Any) -> Any:
        try:
            function = dict(call["function"])
            arguments = function.get("arguments", {})
            if isinstance(arguments, str) and self._wants_objects:
                arguments = json.loads(arguments or "{}")
            elif not isinstance(arguments, str) and not self._wants_objects:
                arguments = json.dumps(arguments, ensure_ascii=False)
        except (KeyError, TypeError, ValueError) as exc:
            raise UsageError(f"a call of a tool in the messages is none: {exc}") from exc
        return {**call, "function": {**function, "arguments": arguments}}

    # the engine of templates

    def _compiled(self, source: str) -> Template:
        from caravan.llm.jinja import TemplateError

        try:
            return self._environment.from_string(source)
        except (TemplateError, RecursionError, ArithmeticError, ValueError) as exc:
            raise UsageError(f"the chat template is none: {_words(exc)}") from exc

    def _rendered(
        self, template: Template, messages: list[dict[str, Any]], **variables: Any
    ) -> str:
        values = {
            "bos_token": self._bos,
            "eos_token": self._eos,
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
            **variables,
            "messages": messages,
        }
        try:
            return self._environment.render(template, values)
        except Exception as exc:  # whatever a template can do wrong
            raise UsageError(f"the chat template says: {_words(exc)}") from exc


def _environment() -> Environment:
    from caravan.llm.jinja import Environment

    return Environment()


def _words(exc: BaseException) -> str:
    return " ".join(str(exc).split()) or type(exc).__name__


def _read(override: str) -> str:
    if "{" in override:
        return override
    try:
        return Path(override).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise UsageError(f"cannot read the chat template {override}: {reason}") from exc


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _renamed(message: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {**message, "role": new} if message["role"] == old else message


def _plain(message: Message) -> Message:
    """The message with its content as one text. Raises UsageError."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UsageError("a message is an object with a role and a content")
    content = message.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content = "\n".join(_texts(content))
    return {**message, "content": content}


def _texts(content: Any) -> Iterator[str]:
    if not isinstance(content, Sequence):
        raise UsageError("the content of a message is neither a text nor a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UsageError(f"a part of a message is of the type {kind!r}; only text is supported")
        yield part["text"]


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}
