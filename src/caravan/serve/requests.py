"""The bodies of requests that are not the fields that all texts have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from caravan.serve.fields import MOST_ALTERNATIVES, MOST_CHOICES, Body, TextFields, require_few

# What is checked item by item keeps all others waiting meanwhile: so it is counted first.
MOST_TEXTS = 2048
_MOST_TOKENS = 1 << 21
_MOST_PARTS = 1 << 14
_MOST_TOOLS = 1 << 12
_MOST_CHARACTERS = 1 << 20

Tokens = list[Annotated[int, Field(ge=0, lt=1 << 31)]]


def require_prompts(value: Any, most: int) -> Any:
    """It, if it is not a list of too many texts or tokens. Raises ValueError."""
    if isinstance(value, list):
        if not _are_tokens(value):
            require_few(value, most, "texts")
        count = 0
        for tokens in [value] if _are_tokens(value) else filter(_are_tokens, value):
            count += len(tokens)
            if count > _MOST_TOKENS:
                raise ValueError(f"more than {_MOST_TOKENS} tokens")
            if not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens):
                raise ValueError("tokens are whole numbers from 0 up")
    return value


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and type(value[0]) is int


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

    @field_validator("messages", mode="before")
    @classmethod
    def _few_messages(cls, value: Any) -> Any:
        if isinstance(value, list):
            parts = [m["content"] for m in value if isinstance(m, dict) and "content" in m]
            count = len(value) + sum(len(part) for part in parts if isinstance(part, list))
            if count > _MOST_PARTS:
                raise ValueError(f"more than {_MOST_PARTS} messages and parts")
        return value

    @field_validator("tools", mode="before")
    @classmethod
    def _few_tools(cls, value: Any) -> Any:
        return require_few(value, _MOST_TOOLS, "tools")

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

    @field_validator("prompt", mode="before")
    @classmethod
    def _few_prompts(cls, value: Any) -> Any:
        return require_prompts(value, MOST_CHOICES)


class EmbeddingRequest(Body):
    model: str | None = None
    input: str | list[str] | Tokens | list[Tokens]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _few_texts(cls, value: Any) -> Any:
        return require_prompts(value, MOST_TEXTS)


class TokenizeRequest(Body):
    content: str
    add_special: bool = False
    with_pieces: bool = False

    @field_validator("content")
    @classmethod
    def _short(cls, value: str) -> str:
        # a Field's own bound refuses half characters
        if len(value) > _MOST_CHARACTERS:
            raise ValueError(f"more than {_MOST_CHARACTERS} characters")
        return value


class DetokenizeRequest(Body):
    tokens: Tokens

    @field_validator("tokens", mode="before")
    @classmethod
    def _few_tokens(cls, value: Any) -> Any:
        return require_prompts(value, 1)
