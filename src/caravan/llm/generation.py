"""`generate`: a prompt in, text out piece by piece.

Owns the order of decoding and sampling, the way from bytes to text, and the reasons to stop.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from caravan.errors import DecodeError, UsageError
from caravan.llm.context import Context
from caravan.llm.resume import Resume, Resumed, policy
from caravan.llm.sampling import Sampler, SamplingParams
from caravan.llm.text import TextStream


@dataclass(slots=True)
class GenerationStats:
    """Filled while `generate` runs.

    Attributes:
        n_prompt, n_gen: tokens.
        prompt_seconds: until the prompt's logits had arrived.
        n_steps, decode_seconds: decodings after the prompt's, and their time; the consumer's time
            is not in it.
        stopped: why it ended: `eog`, `length`, `context`, `stop`; empty while it runs.
        resumes: losses of workers that were got over; their time is in neither of the others.
    """

    n_prompt: int = 0
    n_gen: int = 0
    n_steps: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    stopped: str = ""
    resumes: list[Resumed] = field(default_factory=list)

    @property
    def lost_seconds(self) -> float:
        """What the losses took in all."""
        return sum(resumed.seconds for resumed in self.resumes)

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second; 0 when there was none."""
        return self.n_prompt / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Decodings a second after the prompt's, whose logits gave the first token."""
        return self.n_steps / self.decode_seconds if self.decode_seconds else 0.0


def generate(
    context: Context,
    prompt: str | Sequence[int],
    *,
    max_tokens: int = -1,
    sampling: SamplingParams | None = None,
    stop: Sequence[str] = (),
    stats: GenerationStats | None = None,
    resume: bool | Resume | None = None,
) -> Generator[str, None, None]:
    """Continue `prompt`, after what the context already holds, and yield the text as it comes.

    Args:
        prompt: text (names of special tokens in it count as these), or token ids.
        max_tokens: at most so many; -1: until the model ends or the context is full.
        stop: texts that end the generation; they are not yielded.
        stats: filled meanwhile.
        resume: whether to go on when a worker is lost: wait for it, or do without it, load the
            model again, read all that the context has read in the same way, and continue; what was
            yielded is not yielded again. None: as the context does.

    Raises UsageError or DecodeError at once for an impossible number and when the prompt is empty
    or does not fit; DecodeError, SamplingError and WorkerLost on the way. Whoever stops listening
    early should `close` the iterator.
    """
    model = context.model
    if isinstance(prompt, str):
        # only a beginning is a beginning of a sequence
        tokens = model.tokenize(prompt, add_special=context.n_past == 0)
    else:
        tokens = list(prompt)
    if max_tokens < -1:
        raise UsageError(f"max_tokens {max_tokens} is neither a number of tokens nor -1")
    if not tokens:
        raise UsageError("the prompt is empty")
    if len(tokens) > context.room:
        raise DecodeError(
            f"a prompt of {len(tokens)} tokens does not fit: the context holds {context.n_past} of"
            f" {context.n_ctx}"
        )
    sampler = Sampler(sampling or SamplingParams(), model)
    wanted = context.resume if resume is None else policy(resume)
    stats = stats or GenerationStats()
    return _texts(
        context, sampler, tokens, max_tokens, TextStream(stop), stats, noted(wanted, stats)
    )


def noted(resume: Resume | None, stats: GenerationStats) -> Resume | None:
    """It, with every loss in `stats` too."""
    if resume is None:
        return None

    def on_resume(resumed: Resumed) -> None:
        stats.resumes.append(resumed)
        resume.tell(resumed)

    return replace(resume, on_resume=on_resume)


def _texts(
    context: Context,
    sampler: Sampler,
    prompt: list[int],
    max_tokens: int,
    text: TextStream,
    stats: GenerationStats,
    resume: Resume | None,
) -> Generator[str, None, None]:
    with sampler, context.resuming(resume):
        for token in _tokens(context, sampler, prompt, max_tokens, stats):
            piece = text.feed(context.model.piece(token))
            if piece:
                yield piece
            if text.stopped:
                stats.stopped = "stop"
                return
        rest = text.finish()
        if rest:
            yield rest


def _tokens(
    context: Context, sampler: Sampler, prompt: list[int], max_tokens: int, stats: GenerationStats
) -> Iterator[int]:
    """The generated tokens, the end token left out; times every step."""
    stats.n_prompt = len(prompt)
    held = context.tokens
    lost = stats.lost_seconds
    started = time.perf_counter()
    context.decode(prompt)
    context.synchronize()
    sampler.accept([*(held or ()), *prompt])
    token = sampler.sample(context) if max_tokens else -1
    stats.prompt_seconds = time.perf_counter() - started - (stats.lost_seconds - lost)
    while stats.n_gen != max_tokens:
        if context.model.is_eog(token):
            stats.stopped = "eog"
            return
        stats.n_gen += 1
        yield token
        if stats.n_gen == max_tokens:
            break
        if context.room < 1:
            stats.stopped = "context"
            return
        lost = stats.lost_seconds
        started = time.perf_counter()
        context.decode_one(token)
        token = sampler.sample(context)
        stats.decode_seconds += time.perf_counter() - started - (stats.lost_seconds - lost)
        stats.n_steps += 1
    stats.stopped = "length"
