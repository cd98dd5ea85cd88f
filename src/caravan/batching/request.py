"""What is asked of a `Batcher`, and what comes of it. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from caravan.errors import CaravanError, UsageError
from caravan.llm.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to be continued. Raises UsageError for an impossible one.

    Attributes:
        prompt: token ids.
        max_tokens: at most so many; -1: until the model ends or the slot is full.
        stop: texts that end it; they are not part of the answer.
        logprobs: None: none; else so many alternatives to each token.
    """

    prompt: tuple[int, ...]
    max_tokens: int = -1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UsageError("the prompt is empty")
        if self.max_tokens < -1:
            raise UsageError(f"max_tokens {self.max_tokens} is neither a number of tokens nor -1")
        if self.logprobs is not None and self.logprobs < 0:
            raise UsageError(f"logprobs {self.logprobs} is not a number of alternatives")


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token.

    Attributes:
        piece: its bytes, which may be part of a character.
        logprob: natural logarithm of its probability before any sampler.
        top: the most likely tokens there: id, bytes, logprob.
    """

    id: int
    piece: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request has taken.

    Attributes:
        n_prompt: tokens of the prompt, n_cached of which a slot held already.
        n_gen: tokens generated.
        queue_seconds: before it had a slot; prompt_seconds: until its first token then;
            decode_seconds: from there to the end.
    """

    n_prompt: int = 0
    n_cached: int = 0
    n_gen: int = 0
    queue_seconds: float = 0.0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of an answer.

    Attributes:
        text: whole characters.
        tokens: those of the text, where logprobs were asked for. They come with it, so those of a
            stop text never do.
        finish: empty while it goes on; at the end `eog`, `stop` (a text of `stop`), `length`
            (max_tokens), `context` (the slot is full), `cancelled` or `error`.
        usage: at the end.
        error: what went wrong.
    """

    text: str = ""
    tokens: tuple[Token, ...] = ()
    finish: str = ""
    usage: Usage | None = None
    error: CaravanError | None = None
