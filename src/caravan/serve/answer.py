"""`Answer`: what comes back for one request, as events of a stream or as a whole.

Text of a stream is put between parts of JSON that are made once: this is on the way of every token.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from typing import Any

from caravan.batching import Chunk, Token, Usage

DONE = b"data: [DONE]\n\n"
# What stands in a choice that is not at its end.
GOES_ON = ',"logprobs":null,"finish_reason":null'
# The API's number for what has no logarithm.
_NEVER = -9999.0
_FINISHES = {"eog": "stop", "stop": "stop", "length": "length", "context": "length"}

dumps = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class Answer(ABC):
    """See the module.

    Args:
        kind: `chat.completion` or the like.
        prefix: of the id.
        n_choices: of each of the `n_prompts` prompts.
        with_usage: a stream ends with what it has taken.
    """

    def __init__(
        self, kind: str, prefix: str, model: str, n_prompts: int, n_choices: int, with_usage: bool
    ) -> None:
        self._model = model
        self._id = f"{prefix}{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._n_choices = n_choices
        self._usages: dict[int, Usage] = {}
        self._with_usage = with_usage
        self.count = n_prompts * n_choices
        self._kind = kind
        self._plain_tail = '}],"usage":null}\n\n' if with_usage else "}]}\n\n"

    def _fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }

    def _head(self, kind: str, choice: str) -> str:
        """The JSON of an event before what the one choice that it has begins with, and that."""
        return f'data: {dumps(self._fields(kind))[:-1]},"choices":[{{{choice}'

    def _tail(self, chunk: Chunk | None = None) -> str:
        """What follows the choice; with timings beside it after its last part, as llama-server has
        them."""
        if chunk is None or chunk.usage is None:
            return self._plain_tail
        return f'}}],"timings":{dumps(timings(chunk.usage))}{self._plain_tail[2:]}'

    @abstractmethod
    def begin(self) -> bytes:
        """The first events, before anything has come."""

    @abstractmethod
    def event(self, index: int, chunk: Chunk) -> bytes:
        """The events of a part of choice `index`."""

    def end(self) -> bytes:
        """The last events."""
        if not self._with_usage:
            return DONE
        fields = {**self._fields(self._stream_kind()), "choices": [], "usage": self._usage()}
        return f"data: {dumps(fields)}\n\n".encode() + DONE

    @abstractmethod
    def add(self, index: int, chunk: Chunk) -> None:
        """A part of choice `index`, for `whole`."""

    @abstractmethod
    def _choice(self, index: int) -> dict[str, Any]: ...

    @abstractmethod
    def _stream_kind(self) -> str: ...

    def whole(self) -> dict[str, Any]:
        """All that was added."""
        fields = self._fields(self._kind)
        fields["choices"] = [self._choice(index) for index in range(self.count)]
        fields["usage"] = self._usage()
        if self.count == 1:
            fields["timings"] = timings(self._usages[0])
        return fields

    def _ended(self, index: int, chunk: Chunk) -> str:
        """The API's word for why it has."""
        if chunk.usage is not None:
            self._usages[index] = chunk.usage
        return _FINISHES[chunk.finish]

    def _usage(self) -> dict[str, Any]:
        """Several choices share a prompt, which counts once."""
        prompts = [use for i, use in self._usages.items() if i % self._n_choices == 0]
        n_prompt = sum(use.n_prompt for use in prompts)
        n_gen = sum(use.n_gen for use in self._usages.values())
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_gen,
            "total_tokens": n_prompt + n_gen,
            "prompt_tokens_details": {"cached_tokens": sum(use.n_cached for use in prompts)},
        }


def timings(use: Usage) -> dict[str, Any]:
    """As llama-server tells them."""
    n_read = use.n_prompt - use.n_cached
    values: dict[str, Any] = {"cache_n": use.n_cached}
    for name, count, seconds in (
        ("prompt", n_read, use.prompt_seconds),
        ("predicted", use.n_gen, use.decode_seconds),
    ):
        values[f"{name}_n"] = count
        values[f"{name}_ms"] = round(1e3 * seconds, 3)
        values[f"{name}_per_token_ms"] = round(1e3 * seconds / count, 3) if count else None
        values[f"{name}_per_second"] = round(count / seconds, 3) if seconds else None
    return values


def shown(piece: bytes) -> str:
    """A token as text; it may be part of a character."""
    return piece.decode("utf-8", "replace")


def finite(logprob: float) -> float:
    return max(logprob, _NEVER)


def token_fields(token: Token) -> dict[str, Any]:
    """A token as chats tell of it."""
    top = [_one(piece, logprob) for _, piece, logprob in token.top]
    return {**_one(token.piece, token.logprob), "top_logprobs": top}


def _one(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": shown(piece), "logprob": finite(logprob), "bytes": list(piece)}
