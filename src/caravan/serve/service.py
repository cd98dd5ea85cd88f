"""`Service`: what the app serves; `ModelService` has it from a model and a batcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from caravan.llm.sampling import SamplingParams
from caravan.serve.pages import View
from caravan.serve.running import Submits


class Template(Protocol):
    """A ChatTemplate, or what stands for one."""

    @property
    def source(self) -> str: ...

    @property
    def stop(self) -> tuple[str, ...]: ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str: ...


class Call(Protocol):
    """A call of a tool; `arguments` are JSON."""

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> str: ...


class Delta(Protocol):
    @property
    def content(self) -> str: ...

    @property
    def call(self) -> Call | None: ...


class Splits(Protocol):
    """Takes calls of tools out of a text."""

    def feed(self, text: str) -> Sequence[Delta]: ...

    def finish(self) -> Sequence[Delta]: ...


class Service(Protocol):
    """See the module. Any thread may call.

    Attributes:
        model_name: what clients call it.
        created: seconds since 1970 when it was loaded.
        n_ctx: tokens of a slot.
        template: None: the model has none, and no chats.
        sampling: for what a request does not say.
        facts: of the model, for `/props` and `/v1/models`.
        view: what the page shows of the workers; None: nothing.
    """

    @property
    def model_name(self) -> str: ...

    @property
    def created(self) -> int: ...

    @property
    def n_ctx(self) -> int: ...

    @property
    def template(self) -> Template | None: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def batcher(self) -> Submits: ...

    @property
    def facts(self) -> Mapping[str, Any]: ...

    @property
    def view(self) -> View | None: ...

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]: ...

    def piece(self, token: int) -> bytes:
        """Raises UsageError for one that is not in the vocabulary."""
        ...

    def split_calls(self, tools: Sequence[Mapping[str, Any]]) -> Splits:
        """For the text of one answer of a client that has these tools."""
        ...

    def call_grammar(self, tools: Sequence[Mapping[str, Any]], name: str) -> str:
        """The grammar of an answer that calls the tool of that name, or any if it is empty.

        Raises UsageError.
        """
        ...

    def embed(self, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Shape (prompts, n_embd); one call at a time, blocks. Raises UsageError."""
        ...

    def give_up(self) -> None:
        """The server ends: what is still computed is of no use, and nobody may wait for it."""
        ...
