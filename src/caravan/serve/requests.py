"""The bodies of requests that are not the fields that all texts have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from caravan.serve.fields import MOST_ALTERNATIVES, Body, TextFields

Tokens = list[Annotated[int, Field(ge=0, lt=1 << 31)]]


class Part(Body):
    """Of a message's content; only texts can be read."""

    type: str
    text: str | None = None


class Message(Body):
    """Other fields are the template's."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None

    @field_validator("content")
    @classmethod
    def _texts(cls, value: str | list[Part] | None) -> str | None:
        """All parts as one text."""
        if not isinstance(value, list):
            return value
        for part in value:
            if part.type != "text" or part.text is None:
                raise ValueError(f"has a part of type {part.type!r}; only texts can be read")
        return "\n".join(part.text or "" for part in value)


class Function(Body):
    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"]
    function: ChosenFunction


class TemplateFields(Body):
    """What a template is given."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def told_messages(self) -> list[dict[str, Any]]:
        return [message.model_dump(exclude_unset=True) for message in self.messages]

    def told_tools(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]


class ChatRequest(TextFields, TemplateFields):
    max_completion_tokens: int | None = Field(None, ge=-1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(TextFields):
    prompt: str | list[str] | Tokens | list[Tokens]
    logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class EmbeddingRequest(Body):
    model: str | None = None
    input: str | list[str] | Tokens | list[Tokens]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class TokenizeRequest(Body):
    content: str
    add_special: bool = False
    with_pieces: bool = False


class DetokenizeRequest(Body):
    tokens: Tokens
