"""`CompletionAnswer`: the continuations of one or several texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from caravan.batching import Chunk, Token
from caravan.serve.answer import GOES_ON, Answer, dumps, finite, shown

_KIND = "text_completion"


class _Choice:
    """What has come of one so far.

    Args:
        echo: what its text begins with.
    """

    def __init__(self, echo: str, head: str) -> None:
        self.head = head
        self.echo = echo
        self.text = [echo]
        self.tokens: list[Token] = []
        self.finish = ""
        # characters before the next token
        self.offset = len(echo)

    def told(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Tokens in the API's older form, columns instead of rows."""
        offsets = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(shown(token.piece))
        return {
            "tokens": [shown(token.piece) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            # the most likely one of those that look the same
            "top_logprobs": [
                {shown(piece): finite(logprob) for _, piece, logprob in reversed(token.top)}
                for token in tokens
            ],
            "text_offset": offsets,
        }


class CompletionAnswer(Answer):
    """See the module.

    Args:
        echoes: what the texts of each prompt's choices begin with.
        logprobs: they are told.
    """

    def __init__(
        self,
        model: str,
        echoes: Sequence[str],
        n_choices: int,
        *,
        logprobs: bool = False,
        with_usage: bool = False,
    ) -> None:
        super().__init__(_KIND, "cmpl-", model, len(echoes), n_choices, with_usage)
        self._logprobs = logprobs
        self._choices = [
            _Choice(echoes[index // n_choices], self._head(_KIND, f'"index":{index},"text":'))
            for index in range(self.count)
        ]

    def _stream_kind(self) -> str:
        return _KIND

    def begin(self) -> bytes:
        return b"".join(self._event(choice, choice.echo) for choice in self._choices if choice.echo)

    def _event(self, choice: _Choice, text: str) -> bytes:
        return f"{choice.head}{dumps(text)}{GOES_ON}{self._plain_tail}".encode()

    def event(self, index: int, chunk: Chunk) -> bytes:
        choice = self._choices[index]
        if not chunk.tokens and not chunk.finish:
            return self._event(choice, chunk.text)
        told = dumps(choice.told(chunk.tokens)) if chunk.tokens else "null"
        finish = f'"{self._ended(index, chunk)}"' if chunk.finish else "null"
        middle = f',"logprobs":{told},"finish_reason":{finish}'
        return f"{choice.head}{dumps(chunk.text)}{middle}{self._tail(chunk)}".encode()

    def add(self, index: int, chunk: Chunk) -> None:
        choice = self._choices[index]
        choice.text.append(chunk.text)
        choice.tokens += chunk.tokens
        if chunk.finish:
            choice.finish = self._ended(index, chunk)

    def _choice(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        return {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": choice.told(choice.tokens) if self._logprobs else None,
            "finish_reason": choice.finish,
        }
