"""What requests for text have in common: their fields, and what these ask of a batcher.

Fields that are not known are ignored, as other servers of this API do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from caravan.errors import UsageError
from caravan.llm.grammar import json_grammar, json_schema_grammar
from caravan.llm.sampling import SamplingParams
from caravan.serve.errors import ApiError, of_error

# Seeds of the engine; clients may have larger ones.
_SEEDS = 0xFFFFFFFF
_MOST_STOPS = 64
# Every token is compared with all of them.
_LONGEST_STOP = 256
# The engine keeps that many tokens for each request.
_LONGEST_MEMORY = 1 << 16
_MOST_BIASES = 1 << 16
MOST_CHOICES = 128
MOST_ALTERNATIVES = 20


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None


class JsonSchema(Body):
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Body):
    """`schema` belongs to json_object, as llama-server has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


def require_few(value: Any, most: int, what: str) -> Any:
    """It, if it is nothing that has more than so many items. Raises ValueError."""
    if isinstance(value, list | dict) and len(value) > most:
        raise ValueError(f"more than {most} {what}")
    return value


def named(error: UsageError) -> str | None:
    """The field that an error of the sampling begins with, if it does."""
    word = re.match(r"\w*", str(error))
    return word[0] if word is not None and word[0] in TextFields.model_fields else None


class TextFields(Body):
    """Those of completions and chats. A null is as good as nothing."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=-1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repeat_penalty: float | None = Field(None, gt=0)
    repeat_last_n: int | None = Field(None, ge=0, le=_LONGEST_MEMORY)
    logit_bias: dict[int, float] | list[tuple[int, float | Literal[False]]] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _few_stops(cls, value: Any) -> Any:
        return require_few(value, _MOST_STOPS, "texts")

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_biases(cls, value: Any) -> Any:
        return require_few(value, _MOST_BIASES, "tokens")

    @field_validator("stop")
    @classmethod
    def _short(cls, value: str | list[str] | None) -> str | list[str] | None:
        texts = [value] if isinstance(value, str) else value or []
        if any(len(text) > _LONGEST_STOP for text in texts):
            raise ValueError(f"a text of more than {_LONGEST_STOP} characters")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in texts if text)

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with what it has taken."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, given: SamplingParams, grammar: str = "") -> list[SamplingParams]:
        """One for each of the `n` choices.

        Args:
            given: the server's, for what the request does not say.
            grammar: instead of the request's.

        Raises ApiError, and UsageError for values that do not go together.
        """
        values: dict[str, Any] = {
            "temp": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repeat_penalty": self.repeat_penalty,
            "repeat_last_n": self.repeat_last_n,
            "ignore_eos": self.ignore_eos,
            "logit_bias": self._biases(),
            "grammar": grammar or self._grammar() or None,
            "seed": None if self.seed in (None, -1) else (self.seed or 0) % _SEEDS,
        }
        told = {name: value for name, value in values.items() if value is not None}
        one = replace(given, **told)
        if one.seed is None:
            return [one] * (self.n or 1)
        return [replace(one, seed=(one.seed + i) % _SEEDS) for i in range(self.n or 1)]

    def _biases(self) -> tuple[tuple[int, float], ...] | None:
        pairs = self.logit_bias
        if pairs is None:
            return None
        items = pairs.items() if isinstance(pairs, Mapping) else pairs
        return tuple((token, -100.0 if bias is False else float(bias)) for token, bias in items)

    def _grammar(self) -> str:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return self.grammar or ""
        if self.grammar:
            raise ApiError("grammar and response_format exclude each other", param="grammar")
        schema = wanted.schema_
        if wanted.type == "json_schema":
            schema = wanted.json_schema.schema_ if wanted.json_schema else None
            if schema is None:
                param = "response_format.json_schema.schema"
                raise ApiError(f"{param} is missing", param=param)
        try:
            return json_grammar() if schema is None else json_schema_grammar(schema)
        except UsageError as exc:
            raise of_error(exc, "response_format") from exc
