"""`Chat`: messages and a context that follows them: what it holds of a prompt is not read again.

Owns the order of messages; how they become a prompt is the template's, and how a prompt is
continued `generation`'s.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from typing import Any

from caravan.errors import DecodeError, StateError, UsageError
from caravan.llm.asynchronous import on_thread
from caravan.llm.chat import ChatTemplate
from caravan.llm.context import Context
from caravan.llm.generation import GenerationStats, generate
from caravan.llm.model import Model
from caravan.llm.params import ContextParams, usual_n_ctx
from caravan.llm.resume import Resume
from caravan.llm.sampling import SamplingParams
from caravan.llm.statefile import Saved


class Chat:
    """A conversation with a model. Use it as a context manager, or `close` it; a context that was
    given stays open.

    Attributes:
        context: holds what was read. It belongs to this until the end.
        template: how messages become a prompt.
        messages: all of them, with `role` and `content`; they may be changed between two answers.
        sampling, max_tokens, stop: as given; for the answers to come.
        stats: of the newest answer.
    """

    def __init__(
        self,
        where: Context | Model,
        *,
        system: str = "",
        template: ChatTemplate | str | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int = -1,
        stop: Sequence[str] = (),
        params: ContextParams | None = None,
        resume: bool | Resume | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin one.

        Args:
            where: a context, or a model to make one of.
            system: what the first message tells the model to be; empty: there is none, and some
                templates have their own.
            template: another one than the model's: also a file, or its text.
            max_tokens: of an answer; -1: until the model ends or the context is full.
            stop: texts that end an answer.
            params: of the context that is made; by default it has room for 4096 tokens, or as many
                as the model was made for.
            resume: as for a Context that is made.
            variables: others of the template, such as `enable_thinking`.

        Raises UsageError for a model or a template that is none for chats, and what Context raises.
        """
        model = where.model if isinstance(where, Context) else where
        own = template if isinstance(template, ChatTemplate) else ChatTemplate.of(model, template)
        self.template = own
        self._own = isinstance(where, Model)
        if isinstance(where, Model):
            sized = params or ContextParams(n_ctx=usual_n_ctx(where.n_ctx_train))
            where = Context(where, sized, resume=resume)
        self.context = where
        self.messages: list[dict[str, Any]] = []
        self.sampling, self.max_tokens = sampling or SamplingParams(), max_tokens
        self.stop = (*stop,)
        self.stats = GenerationStats()
        self._variables = dict(variables or {})
        self.system = system

    def __repr__(self) -> str:
        return f"<Chat of {len(self.messages)} messages in {self.context!r}>"

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the context, if it was made for this."""
        if self._own:
            self.context.close()

    @property
    def system(self) -> str:
        """The first message, which tells the model what to be; empty: there is none."""
        first = self.messages[:1]
        return str(first[0]["content"]) if first and first[0]["role"] == "system" else ""

    @system.setter
    def system(self, text: str) -> None:
        if self.messages and self.messages[0]["role"] == "system":
            del self.messages[0]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    def say(self, text: str) -> Generator[str, None, None]:
        """Say something, and yield the answer as it comes.

        Both are messages once the answer has begun. One that is given up, by closing the iterator
        or by Ctrl-C, is a message as far as it has come; one that fails leaves the messages as they
        were.

        Raises UsageError at once for what the template refuses, DecodeError for more than the
        context has room for; DecodeError and WorkerLost on the way.
        """
        return self._answer([*self.messages, {"role": "user", "content": text}])

    def asay(self, text: str) -> AsyncGenerator[str, None]:
        """The same for an event loop; see `agenerate`."""
        return on_thread(self.say(text))

    def again(self) -> Generator[str, None, None]:
        """Another answer to what was said last, in place of the one that there is. Raises
        UsageError if nothing was said."""
        asked = [n for n, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise UsageError("nothing was said that could be answered")
        return self._answer(self.messages[: asked[-1] + 1])

    def clear(self) -> None:
        """Forget all but the system's message."""
        self.messages[:] = self.messages[:1] if self.system else []

    def _answer(self, messages: list[dict[str, Any]]) -> Generator[str, None, None]:
        prompt = self.template.render(messages, **self._variables)
        tokens = self.context.model.tokenize(prompt)
        n_ctx = self.context.n_ctx
        if len(tokens) >= n_ctx and not self.context.model.is_recurrent:
            raise DecodeError(
                f"a conversation of {len(tokens)} tokens does not fit: the context holds {n_ctx}"
            )
        return self._pieces(messages, tokens)

    def _pieces(
        self, messages: list[dict[str, Any]], tokens: list[int]
    ) -> Generator[str, None, None]:
        before = [*self.messages]
        answer = {"role": "assistant", "content": ""}
        self.stats = GenerationStats()
        ended = False
        self.messages[:] = [*messages, answer]
        try:
            rest = self._unread(tokens)
            for piece in generate(
                self.context,
                rest,
                max_tokens=self.max_tokens,
                sampling=self.sampling,
                stop=(*self.template.stop, *self.stop),
                stats=self.stats,
            ):
                answer["content"] += piece
                yield piece
            ended = True
        except Exception:
            self.messages[:] = before
            raise
        finally:
            if not ended and not answer["content"]:
                self.messages[:] = before

    def _unread(self, tokens: list[int]) -> list[int]:
        """What of a prompt is to be read; the context then holds what comes before."""
        held = self.context.tokens or []
        same = next(
            (n for n, (one, other) in enumerate(zip(held, tokens, strict=False)) if one != other),
            min(len(held), len(tokens)),
        )
        # the last one is read in any case, for its logits
        same = min(same, len(tokens) - 1)
        try:
            self.context.rewind(same)
        except DecodeError:
            # a model that cannot go back
            self.context.clear()
            same = 0
        return tokens[same:]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Put messages and context into a file; see `Context.save`, which says what is raised."""
        self.context.save(path, {"messages": self.messages})

    def load(self, path: str | os.PathLike[str]) -> bool:
        """Go on with the conversation in a file.

        False when only its messages are of use, because it was held with another model or in other
        formats: then they are read again with the next answer.

        Raises StateError for a file that is damaged, or holds no messages; all is then as before.
        """
        saved = Saved.read(path)
        messages = saved.more.get("messages")
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise StateError(f"{path} holds no messages")
        self.messages[:] = messages
        if not saved.differs(self.context.model, self.context.params):
            try:
                self.context.restore(saved, str(path))
                return True
            except StateError:
                pass
        self.context.clear()
        return False


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )
