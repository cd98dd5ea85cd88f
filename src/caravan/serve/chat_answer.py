"""`ChatAnswer`: the answer to a chat, with the calls of tools that are in its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from caravan.batching import Chunk, Token
from caravan.serve.answer import GOES_ON, Answer, dumps, token_fields
from caravan.serve.service import Call, Delta, Splits

_KIND = "chat.completion"


@dataclass(slots=True)
class _Choice:
    """What has come of one so far.

    Attributes:
        splits: None where the client has no tools.
    """

    splits: Splits | None
    head: str
    text: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    finish: str = ""

    def deltas(self, chunk: Chunk) -> list[tuple[str, Call | None]]:
        """Texts and calls that a part has."""
        if self.splits is None:
            return [(chunk.text, None)] if chunk.text else []
        found: list[Delta] = [*self.splits.feed(chunk.text)] if chunk.text else []
        if chunk.finish:
            found += self.splits.finish()
        return [(delta.content, delta.call) for delta in found]


class ChatAnswer(Answer):
    """See the module.

    Args:
        splits: one for each choice; none where the client has no tools.
        parallel: more than one call of a tool is welcome.
        logprobs: they are told.
    """

    def __init__(
        self,
        model: str,
        n_choices: int,
        *,
        splits: Sequence[Splits] = (),
        parallel: bool = True,
        logprobs: bool = False,
        with_usage: bool = False,
    ) -> None:
        super().__init__(_KIND, "chatcmpl-", model, 1, n_choices, with_usage)
        self._parallel = parallel
        self._logprobs = logprobs
        self._choices = []
        for index in range(n_choices):
            head = self._head(self._stream_kind(), f'"index":{index},"delta":')
            self._choices.append(_Choice(splits[index] if splits else None, head))

    def _stream_kind(self) -> str:
        return "chat.completion.chunk"

    def begin(self) -> bytes:
        delta = '{"role":"assistant","content":""}'
        return "".join(self._event(choice, delta) for choice in self._choices).encode()

    def _event(self, choice: _Choice, delta: str, middle: str = GOES_ON) -> str:
        return f"{choice.head}{delta}{middle}{self._plain_tail}"

    def event(self, index: int, chunk: Chunk) -> bytes:
        choice = self._choices[index]
        if choice.splits is None and not chunk.tokens and not chunk.finish:
            return self._event(choice, f'{{"content":{dumps(chunk.text)}}}').encode()
        deltas = self._deltas(choice, chunk)
        events = []
        if chunk.tokens:
            # with the first text that there is: a token may have none, or none yet
            first = deltas.pop(0) if deltas and "content" in deltas[0] else {"content": ""}
            told = dumps(self._told(chunk.tokens))
            middle = f',"logprobs":{told},"finish_reason":null'
            events.append(self._event(choice, dumps(first), middle))
        events += [self._event(choice, dumps(delta)) for delta in deltas]
        if chunk.finish:
            finish = self._finish(choice, index, chunk)
            middle = f',"logprobs":null,"finish_reason":"{finish}"'
            events.append(f"{choice.head}{{}}{middle}{self._tail(chunk)}")
        return "".join(events).encode()

    def _deltas(self, choice: _Choice, chunk: Chunk) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for text, call in choice.deltas(chunk):
            if text:
                found.append({"content": text})
            if call is not None and self._takes(choice, call):
                index = len(choice.calls) - 1
                found.append({"tool_calls": [{"index": index, **_call_fields(call)}]})
        return found

    def _takes(self, choice: _Choice, call: Call) -> bool:
        if choice.calls and not self._parallel:
            return False
        choice.calls.append(call)
        return True

    def _finish(self, choice: _Choice, index: int, chunk: Chunk) -> str:
        finish = self._ended(index, chunk)
        return "tool_calls" if choice.calls and finish == "stop" else finish

    def _told(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {"content": [token_fields(token) for token in tokens], "refusal": None}

    def add(self, index: int, chunk: Chunk) -> None:
        choice = self._choices[index]
        choice.tokens += chunk.tokens
        for text, call in choice.deltas(chunk):
            choice.text.append(text)
            if call is not None:
                self._takes(choice, call)
        if chunk.finish:
            choice.finish = self._finish(choice, index, chunk)

    def _choice(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        text = "".join(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [_call_fields(call) for call in choice.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._told(choice.tokens) if self._logprobs else None,
            "finish_reason": choice.finish,
        }


def _call_fields(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
