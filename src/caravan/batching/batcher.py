"""`Batcher`: many requests on one model at the same time: slots, lanes, and a queue before them."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, replace
from pathlib import Path

from caravan.batching.job import Job, Sink
from caravan.batching.lane import WORTH, Lane, Slot, common
from caravan.batching.request import Chunk, Request
from caravan.errors import CaravanError, ContextError, NoConversations, QueueFull, UsageError
from caravan.llm.model import Model
from caravan.llm.params import ContextParams, usual_n_ctx
from caravan.llm.resume import Resume, Resumed, policy
from caravan.llm.shared import SharedContext
from caravan.models.ledger import known_header

_CTX_STEP = 256
_SHORTEST_RETRY, _LONGEST_RETRY = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot at some moment.

    Attributes:
        busy: a request has it.
        n_held: tokens in it.
        n_gen: tokens that its request has generated.
        reading: it reads its prompt.
    """

    lane: int
    busy: bool
    n_held: int
    n_gen: int
    reading: bool


@dataclass(frozen=True, slots=True)
class BatcherState:
    """A batcher at some moment.

    Attributes:
        queued: requests without a slot.
        finished: requests by how they have ended, as in Chunk.
        refused: requests that met a full queue.
        n_prompt, n_cached, n_gen: tokens that were read, that a slot held already, and generated,
            in all.
        busy_seconds: spent computing, over all lanes.
        error: why nothing is computed any more.
    """

    n_ctx: int
    slots: tuple[SlotState, ...]
    queued: int
    finished: dict[str, int]
    refused: int
    n_steps: int
    n_prompt: int
    n_cached: int
    n_gen: int
    busy_seconds: float
    error: CaravanError | None


class Batcher:
    """See the module. Use it as a context manager, or `close` it.

    Attributes:
        model: as given.
        n_ctx: tokens of prompt and answer that a request can have.
        lanes: contexts, each with its slots.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_slots: int = 4,
        n_ctx: int = 0,
        n_lanes: int = 0,
        queue: int = 64,
        params: ContextParams | None = None,
        resume: bool | Resume | None = None,
    ) -> None:
        """Make the contexts; blocks.

        Args:
            n_slots: requests that are computed at the same time.
            n_ctx: tokens of a slot; 0: 4096, or as many as the model was made for.
            n_lanes: contexts that the slots are divided among; 0: one a device of the model, as
                far as there are slots and memory.
            queue: requests that may wait for a slot.
            params: of the contexts; its `n_ctx` is not used.
            resume: as for a Context.

        Raises UsageError, NoConversations, ContextError and WorkerLost.
        """
        if n_slots < 1 or n_ctx < 0 or n_lanes < 0 or queue < 0:
            raise UsageError("slots, context, lanes and queue are numbers from 1, 0, 0 and 0 up")
        if model.has_encoder:
            raise NoConversations(f"{model.path}: this model, with an encoder, continues no texts")
        if not model.words.has_texts:
            raise UsageError(f"{model.path}: the model has no vocabulary")
        self.model = model
        self.n_ctx = slot_size(n_ctx, model.n_ctx_train)
        self._lock = threading.Lock()
        self._queue: deque[Job] = deque()
        self._most = queue
        self._finished: Counter[str] = Counter()
        self._refused = self._n_cached = 0
        self._mean_seconds = 0.0
        self._closed = False
        self.lanes: list[Lane] = []
        self._n_loads = model.n_loads
        n_lanes = min(n_lanes or max(1, len(model.devices)), n_slots)
        wanted = self._once(model.resume if resume is None else policy(resume))
        contexts = self._contexts(params or ContextParams(), n_slots, n_lanes, wanted)
        self.lanes += [
            Lane(number, context, self.n_ctx, self._on_free)
            for number, context in enumerate(contexts)
        ]
        for lane in self.lanes:
            lane.start()

    def _contexts(
        self, params: ContextParams, n_slots: int, n_lanes: int, resume: Resume | None
    ) -> list[SharedContext]:
        """As many as there is memory for, at least one."""
        while True:
            contexts: list[SharedContext] = []
            try:
                for lane in range(n_lanes):
                    slots = n_slots // n_lanes + (lane < n_slots % n_lanes)
                    own = replace(params, n_ctx=self.n_ctx * slots)
                    contexts.append(SharedContext(self.model, slots, own, resume=resume or False))
                return contexts
            except BaseException as exc:
                for context in contexts:
                    context.close()
                if n_lanes == 1 or not isinstance(exc, ContextError):
                    raise
                n_lanes -= 1

    def _once(self, resume: Resume | None) -> Resume | None:
        """It, told once of a loss that all lanes get over."""
        if resume is None:
            return None

        def on_resume(resumed: Resumed) -> None:
            with self._lock:
                known, self._n_loads = self._n_loads, self.model.n_loads
                new = self._n_loads > known
            if new:
                resume.tell(replace(resumed, n_tokens=sum(len(slot.held) for slot in self._slots)))

        return replace(resume, on_resume=on_resume)

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def submit(self, request: Request, sink: Sink) -> Job:
        """Have a request computed as soon as there is a slot; any thread.

        Args:
            sink: called with each part of the answer, on a thread of the batcher, or of who
                cancels; it must not block.

        Raises UsageError for a prompt that does not fit, QueueFull, and what has stopped it.
        """
        if len(request.prompt) > self.n_ctx:
            raise UsageError(
                f"a prompt of {len(request.prompt)} tokens does not fit: a slot holds {self.n_ctx}"
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.model.n_vocab:
            raise UsageError(f"a token is not in the vocabulary of {self.model.n_vocab}")
        with self._lock:
            self._check_full()
        job = Job(request, self._counting(sink), self.model, self)
        with self._lock:
            try:
                self._check_full()
            except CaravanError:
                job.drop()
                raise
            self._queue.append(job)
            self._place_all()
        return job

    def _check_full(self) -> None:
        error = self.error
        if error is not None:
            raise error.with_traceback(None)
        if self._closed:
            raise ContextError("the batcher is closed")
        if len(self._queue) >= self._most and not self._free_slots():
            self._refused += 1
            raise QueueFull(
                f"{len(self._queue)} requests are waiting for {len(self._slots)} slots",
                self._retry_after(),
            )

    @property
    def capacity(self) -> int:
        """Requests that can be there at a time: in slots, and waiting."""
        return len(self._slots) + self._most

    @property
    def error(self) -> CaravanError | None:
        """Why no lane computes any more."""
        errors = [lane.error for lane in self.lanes]
        return errors[0] if all(errors) else None

    def _retry_after(self) -> float:
        waves = 1 + len(self._queue) / len(self._slots)
        return min(max(self._mean_seconds * waves, _SHORTEST_RETRY), _LONGEST_RETRY)

    def _counting(self, sink: Sink) -> Sink:
        began = time.monotonic()

        def counted(chunk: Chunk) -> None:
            if chunk.finish:
                self._count(chunk, time.monotonic() - began)
            sink(chunk)

        return counted

    def _count(self, chunk: Chunk, seconds: float) -> None:
        with self._lock:
            self._finished[chunk.finish] += 1
            self._n_cached += chunk.usage.n_cached if chunk.usage else 0
            self._mean_seconds += (seconds - self._mean_seconds) * 0.1

    def cancelled(self, job: Job) -> None:
        """It is not waited for any more; one that has a slot sees that itself."""
        with self._lock:
            waiting = job in self._queue
            if waiting:
                self._queue.remove(job)
        if waiting:
            job.end("cancelled")

    # slots

    @property
    def _slots(self) -> list[Slot]:
        return [slot for lane in self.lanes for slot in lane.slots]

    def _free_slots(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.job is None and slot.lane.error is None]

    def _on_free(self, lane: Lane) -> None:
        with self._lock:
            self._place_all()
        if self.error is not None:
            self._end_queue("error", self.error)

    def _end_queue(self, finish: str, error: CaravanError | None) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    return
                job = self._queue.popleft()
            job.end(finish, error)

    def _place_all(self) -> None:
        while self._queue and (free := self._free_slots()):
            job = self._queue.popleft()
            slot = best_slot(free, job.request.prompt)
            slot.lane.give(slot, job)

    def state(self) -> BatcherState:
        with self._lock:
            slots = [
                _state(number, slot)
                for number, lane in enumerate(self.lanes)
                for slot in lane.slots
            ]
            return BatcherState(
                self.n_ctx,
                tuple(slots),
                len(self._queue),
                dict(self._finished),
                self._refused,
                sum(lane.n_steps for lane in self.lanes),
                sum(lane.n_prompt for lane in self.lanes),
                self._n_cached,
                sum(lane.n_gen for lane in self.lanes),
                sum(lane.busy_seconds for lane in self.lanes),
                self.error,
            )

    def close(self, drain: float = 0.0) -> None:
        """Take no more requests, give those that are there `drain` seconds, and free all."""
        with self._lock:
            self._closed = True
        deadline = time.monotonic() + drain
        while time.monotonic() < deadline and (self._queue or self._n_busy()):
            time.sleep(0.02)
        self._end_queue("cancelled", None)
        for lane in self.lanes:
            lane.close()

    def _n_busy(self) -> int:
        return sum(lane.n_busy for lane in self.lanes)


def slot_size(n_ctx: int, n_ctx_train: int | None) -> int:
    """Tokens of a slot, as the engine will have it; see Batcher."""
    wanted = n_ctx or usual_n_ctx(n_ctx_train)
    return -(-wanted // _CTX_STEP) * _CTX_STEP


def planned_context(
    path: Path, n_slots: int, n_ctx: int, params: ContextParams | None = None
) -> ContextParams:
    """What the memory of a model is to be planned for, if a Batcher with these shall be made of it:
    see the `context` of Model.

    Args:
        path: of the model's file, which is not loaded.
    """
    size = slot_size(n_ctx, known_header(path).context)
    given = params or ContextParams()
    return replace(given, n_ctx=size * n_slots, n_seq_max=n_slots, kv_unified=False)


def best_slot(free: list[Slot], prompt: tuple[int, ...]) -> Slot:
    """The one that holds most of the prompt; else one in the lane with the least to do, the longest
    unused."""
    same = {slot: common(slot.held, prompt) for slot in free}
    best = max(free, key=lambda slot: same[slot])
    if same[best] >= WORTH:
        return best
    return min(free, key=lambda slot: (slot.lane.n_busy, slot.used))


def _state(lane: int, slot: Slot) -> SlotState:
    job = slot.job
    return SlotState(
        lane, job is not None, len(slot.held), job.n_gen if job else 0, bool(slot.prompt)
    )
