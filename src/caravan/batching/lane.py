"""`Lane`: a context of several slots and the thread that computes them, step by step.

Requests join and leave between steps. A step reads what the policy allows of prompts, each in a
call of the engine, and one token of every slot that generates, together in one call. While one lane
waits for the last device, another one uses the first: so a batcher has as many lanes as the
pipeline has stages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from caravan.batching.job import Job
from caravan.batching.policy import Pace, Prompt, plan
from caravan.errors import CaravanError, DecodeError
from caravan.llm.shared import TILE, Part, SharedContext

# How long a step may be made by prompts while others generate.
STEP_SECONDS = 0.2
# Fewer tokens at the beginning that a slot holds already are read again: it costs nothing, and what
# is read in one part has the same numbers as alone.
WORTH = 16


class Slot:
    """A conversation's place in a lane.

    Attributes:
        number: within the lane.
        job: whose it is; None: free.
        token: generated, and to be read next; None while the prompt is read.
        used: when it was given away last, of time.monotonic.
        start: tokens of the prompt that it held already.
        served: the last step in which some of the prompt were read.
    """

    def __init__(self, lane: Lane, number: int) -> None:
        self.lane = lane
        self.number = number
        self.job: Job | None = None
        self.token: int | None = None
        self.used = 0.0
        self.start = 0
        self.served = -1

    @property
    def held(self) -> list[int]:
        return self.lane.context.held[self.number]

    @property
    def prompt(self) -> tuple[int, ...]:
        """What is to be read; empty for one that generates, is free, or was given away just now."""
        job = self.job
        return job.request.prompt if job is not None and job.begun and self.token is None else ()


class Lane:
    """See the module.

    Args:
        context: is used by this lane's thread alone, and closed by it.
        n_ctx: tokens that a slot may hold.
        on_free: told, on the lane's thread, that a slot has become free.

    Attributes:
        slots: `job` is set by whoever gives a slot away, and None again when the lane is done.
        error: why it computes no more.
        n_steps, n_prompt, n_gen: steps, and tokens of prompts and answers, since it began.
        busy_seconds: spent in steps.
    """

    def __init__(
        self, number: int, context: SharedContext, n_ctx: int, on_free: Callable[[Lane], None]
    ) -> None:
        self.context = context
        self.n_ctx = n_ctx
        self.slots = [Slot(self, slot) for slot in range(len(context.held))]
        self.error: CaravanError | None = None
        self.n_steps = self.n_prompt = self.n_gen = 0
        self.busy_seconds = 0.0
        self._on_free = on_free
        self._pace = Pace(STEP_SECONDS, TILE, context.n_ubatch)
        self._news = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"caravan-lane-{number}")

    def start(self) -> None:
        self._thread.start()

    @property
    def n_busy(self) -> int:
        return sum(slot.job is not None for slot in self.slots)

    def give(self, slot: Slot, job: Job) -> None:
        """A free slot to a job."""
        slot.used = time.monotonic()
        with self._news:
            slot.job = job
            self._news.notify()

    def close(self) -> None:
        """End after the step that is computed; what is not ready is cancelled. Blocks."""
        with self._news:
            self._closing = True
            self._news.notify()
        if self._thread.is_alive():
            self._thread.join()

    # the lane's thread

    def _run(self) -> None:
        try:
            while self._wait():
                self._guarded_step()
        finally:
            self._end_all("cancelled", None)
            self.context.close()

    def _wait(self) -> bool:
        """Until there is something to do; False at the end."""
        with self._news:
            while not self._closing and not self.n_busy:
                self._news.wait()
            return not self._closing

    def _guarded_step(self) -> None:
        began = time.monotonic()
        try:
            self._step()
        except Exception as exc:
            self.error = exc if isinstance(exc, CaravanError) else CaravanError(repr(exc))
            self._end_all("error", self.error)
        self.busy_seconds += time.monotonic() - began

    def _step(self) -> None:
        self._begin_and_cancel()
        generating = [
            Part(slot.number, (slot.token,), True) for slot in self.slots if slot.token is not None
        ]
        prompts = [
            Prompt(
                slot.number, len(slot.held) - slot.start, len(slot.prompt) - slot.start, slot.served
            )
            for slot in self.slots
            if slot.prompt
        ]
        began = time.monotonic()
        self.n_steps += 1
        most = self.context.n_ubatch
        parts = plan(prompts, self._pace.budget if generating else most, most)
        for number, count in parts:
            self._read(self.slots[number], count)
        if generating:
            self._compute(generating)
        if generating and parts:
            self._pace.note(sum(count for _, count in parts), time.monotonic() - began)

    def _read(self, slot: Slot, count: int) -> None:
        """The next tokens of a prompt, in a call of their own."""
        slot.served = self.n_steps
        at = len(slot.held)
        tokens = slot.prompt[at : at + count]
        self.n_prompt += count
        if at + count == len(slot.prompt):
            self._compute([Part(slot.number, tokens, True)])
        else:
            self._compute([Part(slot.number, tokens, False)])
            # a micro-batch for each stage: the next one comes when the last stage is through
            self.context.mark(max(2, len(self.context.model.devices)))

    def _compute(self, parts: list[Part]) -> None:
        """One call of the engine, and a token for each part with an output."""
        try:
            indices = self.context.decode(parts)
        except DecodeError as exc:
            for part in parts:
                self._end(self.slots[part.slot], "error", exc)
            return
        for part, index in zip(parts, indices, strict=True):
            if part.output:
                self._sample(self.slots[part.slot], index)

    def _begin_and_cancel(self) -> None:
        for slot in self.slots:
            # who comes next may be cancelled, too
            while slot.job is not None and slot.job.is_cancelled:
                self._end(slot, "cancelled", None)
            if slot.job is not None and not slot.job.begun:
                self._begin(slot, slot.job)

    def _begin(self, slot: Slot, job: Job) -> None:
        slot.token = None
        same = common(slot.held, job.request.prompt)
        if same < WORTH:
            same = 0
        # the last token is read again, for its logits
        slot.start = self.context.keep(slot.number, min(same, len(job.request.prompt) - 1))
        slot.served = -1
        job.begin(slot.start)

    def _sample(self, slot: Slot, index: int) -> None:
        job = slot.job
        assert job is not None
        slot.token = job.sample(self.context, index, self.n_ctx - len(slot.held))
        self.n_gen += 1
        if slot.token is None:
            self._free(slot)

    def _end_all(self, finish: str, error: CaravanError | None) -> None:
        for slot in self.slots:
            self._end(slot, finish, error)

    def _end(self, slot: Slot, finish: str, error: CaravanError | None) -> None:
        if slot.job is not None:
            slot.job.end(finish, error)
            self._free(slot)

    def _free(self, slot: Slot) -> None:
        slot.job, slot.token = None, None
        self._on_free(self)


def common(one: list[int], other: tuple[int, ...]) -> int:
    """How many tokens at the beginning are the same."""
    most = min(len(one), len(other))
    if tuple(one[:most]) == other[:most]:
        return most
    return next(n for n in range(most) if one[n] != other[n])
