"""`generate`: a prompt in, text out piece by piece."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from caravan.errors import DecodeError
from caravan.llm.context import Context
from caravan.llm.sampling import Sampler, SamplingParams


@dataclass(slots=True)
class GenerationStats:
    """Filled while `generate` runs.

    Attributes:
        n_prompt, n_gen: tokens.
        prompt_seconds: until the prompt's logits had arrived.
        decode_seconds: for the tokens after the first.
        stopped: why it ended: `eog`, `length`, `context`, `stop`; empty while it runs.
    """

    n_prompt: int = 0
    n_gen: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    stopped: str = ""

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second; 0 when there was none."""
        return self.n_prompt / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Generated tokens a second, the first one apart: it comes with the prompt."""
        steps = self.n_gen - 1
        return steps / self.decode_seconds if steps > 0 and self.decode_seconds else 0.0


def generate(
    context: Context,
    prompt: str | Sequence[int],
    *,
    max_tokens: int = -1,
    sampling: SamplingParams | None = None,
    stop: Sequence[str] = (),
    stats: GenerationStats | None = None,
) -> Iterator[str]:
    """Continue `prompt`, after what the context already holds, and yield the text as it comes.

    Args:
        prompt: text (special tokens in it count), or token ids.
        max_tokens: at most so many; -1: until the model ends or the context is full.
        stop: texts that end the generation; they are not yielded.
        stats: filled meanwhile.

    Raises DecodeError when the prompt does not fit or is empty, WorkerLost when a device fails.
    """
    model = context.model
    stats = stats or GenerationStats()
    tokens = model.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
    if not tokens:
        raise DecodeError("the prompt is empty")
    text = _Text(stop)
    sampler = Sampler(sampling or SamplingParams())
    try:
        for token in _tokens(context, sampler, tokens, max_tokens, stats):
            piece = text.feed(model.piece(token))
            if piece:
                yield piece
            if text.stopped:
                stats.stopped = "stop"
                return
        rest = text.finish()
        if rest:
            yield rest
    finally:
        sampler.close()


def _tokens(
    context: Context, sampler: Sampler, prompt: list[int], max_tokens: int, stats: GenerationStats
) -> Iterator[int]:
    """The generated tokens, the end token left out; times every step."""
    stats.n_prompt = len(prompt)
    started = time.perf_counter()
    context.decode(prompt)
    if max_tokens == 0:
        context.synchronize()
        stats.prompt_seconds = time.perf_counter() - started
        stats.stopped = "length"
        return
    for token in prompt:
        sampler.accept(token)
    token = sampler.sample(context)
    stats.prompt_seconds = time.perf_counter() - started
    while True:
        if context.model.is_eog(token):
            stats.stopped = "eog"
            return
        stats.n_gen += 1
        yield token
        if stats.n_gen == max_tokens:
            stats.stopped = "length"
            return
        if context.n_past >= context.n_ctx:
            stats.stopped = "context"
            return
        started = time.perf_counter()
        context.decode([token])
        token = sampler.sample(context)
        stats.decode_seconds += time.perf_counter() - started


class _Text:
    """Bytes to text: whole characters only, and nothing that may yet become a stop text."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = [text for text in stop if text]
        self._held = ""
        self.stopped = False

    def feed(self, data: bytes) -> str:
        self._held += self._decoder.decode(data)
        at = min((i for i in map(self._held.find, self._stop) if i >= 0), default=-1)
        if at >= 0:
            self.stopped = True
            return self._held[:at]
        keep = max((self._overlap(text) for text in self._stop), default=0)
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(ready) :]
        return ready

    def _overlap(self, stop: str) -> int:
        """How many characters at the end may be the beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def finish(self) -> str:
        return self._held + self._decoder.decode(b"", True)
