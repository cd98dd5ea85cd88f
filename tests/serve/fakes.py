"""A service without a model: tokens are bytes, and answers are what the test says."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from caravan.batching import BatcherState, Chunk, Request, SlotState, Token, Usage
from caravan.errors import CaravanError, QueueFull, UsageError
from caravan.llm.sampling import SamplingParams
from caravan.llm.text import TextStream

BOS, EOG, N_VOCAB = 256, 257, 258
N_CTX = 512


def text_of(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < BOS).decode("utf-8", "replace")


class FakeJob:
    """Answers on a thread of its own, as fast as its batcher lets it."""

    def __init__(self, batcher: FakeBatcher, request: Request, sink: Callable[[Chunk], None]):
        self.request, self.sink, self.batcher = request, sink, batcher
        self.is_cancelled = threading.Event()
        self.n_gen = 0
        self.began = time.monotonic()
        self.thread = threading.Thread(target=self._run, name="fake-job")

    def cancel(self) -> None:
        self.is_cancelled.set()
        self.batcher.wake()

    def _run(self) -> None:
        finish, error = "error", None
        try:
            finish = self._answer()
        except CaravanError as exc:
            error = exc
        n_cached = self.batcher.n_cached
        use = Usage(len(self.request.prompt), n_cached, self.n_gen, 0.01, 0.02, 0.03)
        self.batcher.end(self, finish)
        self.sink(Chunk(self._rest if finish in ("eog", "length") else "", (), finish, use, error))

    def _answer(self) -> str:
        text = TextStream(self.request.stop)
        self._rest = ""
        for token in self.batcher.reply(self.request):
            if self.n_gen == self.request.max_tokens:
                break
            if not self.batcher.may_go_on(self):
                return "cancelled"
            self.n_gen += 1
            piece = bytes([token])
            told = self._told(token, piece)
            fed = text.feed(piece)
            if fed or told:
                self.sink(Chunk(fed, told))
            if text.stopped:
                return "stop"
        else:
            self._rest = text.finish()
            return "eog"
        self._rest = text.finish()
        return "length"

    def _told(self, token: int, piece: bytes) -> tuple[Token, ...]:
        wanted = self.request.logprobs
        if wanted is None:
            return ()
        top = [((token + i) % 256, bytes([(token + i) % 256]), -0.5 - i) for i in range(wanted)]
        return (Token(token, piece, -0.5, tuple(top)),)


class FakeBatcher:
    """Says in capitals what it was told, or what `answer` says.

    Attributes:
        requests: all that have come.
        gate: cleared, no token comes.
        error: what `answer` may raise is what fails a request; this one fails all.
    """

    def __init__(self, n_slots: int = 4, queue: int = 64) -> None:
        self.n_slots, self.queue = n_slots, queue
        self.answer: Callable[[Request], str] = lambda request: text_of(request.prompt).upper()
        self.requests: list[Request] = []
        self.jobs: list[FakeJob] = []
        self.n_cached = 3
        self.error: CaravanError | None = None
        self.finished: dict[str, int] = {}
        self.refused = 0
        self._open = True
        self._waiting: deque[FakeJob] = deque()
        self._busy: set[FakeJob] = set()
        self._lock = threading.Condition()
        self.threads: list[threading.Thread] = []

    # of the batcher

    @property
    def capacity(self) -> int:
        return self.n_slots + self.queue

    def submit(self, request: Request, sink: Callable[[Chunk], None]) -> Any:
        if not 0 <= min(request.prompt) <= max(request.prompt) < N_VOCAB:
            raise UsageError(f"a token is not in the vocabulary of {N_VOCAB}")
        if request.sampling.grammar == "wrong":
            raise UsageError("grammar: there is no rule named root")
        with self._lock:
            if self.error is not None:
                raise self.error
            if len(self._busy) >= self.n_slots and len(self._waiting) >= self.queue:
                self.refused += 1
                raise QueueFull("the queue is full", 1.5)
            job = FakeJob(self, request, sink)
            self.requests.append(request)
            self.jobs.append(job)
            self._waiting.append(job)
            self._place()
        self.threads.append(job.thread)
        job.thread.start()
        return job

    def state(self) -> BatcherState:
        with self._lock:
            busy = len(self._busy)
            slots = [SlotState(0, i < busy, 5, 2, False) for i in range(self.n_slots)]
            waiting = len(self._waiting)
            told = dict(self.finished)
            numbers = (len(self.requests), 40, 3, 20)
            return BatcherState(
                N_CTX, tuple(slots), waiting, told, self.refused, *numbers, 1.25, self.error
            )

    # of its jobs

    def _place(self) -> None:
        while self._waiting and len(self._busy) < self.n_slots:
            self._busy.add(self._waiting.popleft())
        self._lock.notify_all()

    def reply(self, request: Request) -> Iterator[int]:
        yield from self.answer(request).encode()

    def may_go_on(self, job: FakeJob) -> bool:
        with self._lock:
            self._lock.wait_for(
                lambda: job.is_cancelled.is_set() or (job in self._busy and self._open)
            )
            return not job.is_cancelled.is_set()

    def end(self, job: FakeJob, finish: str) -> None:
        with self._lock:
            self._busy.discard(job)
            if job in self._waiting:
                self._waiting.remove(job)
            self.finished[finish] = self.finished.get(finish, 0) + 1
            self._place()

    def wake(self) -> None:
        with self._lock:
            self._lock.notify_all()

    # of the test

    def hold(self) -> None:
        self._open = False

    def go(self) -> None:
        with self._lock:
            self._open = True
            self._lock.notify_all()

    def wait_for(self, condition: Callable[[], object]) -> None:
        with self._lock:
            assert self._lock.wait_for(condition, 20.0), "nothing happened in time"

    @property
    def n_busy(self) -> int:
        return len(self._busy)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        for job in self.jobs:
            job.cancel()
        for thread in self.threads:
            thread.join()


class FakeTemplate:
    source = "{{ messages }}"
    stop: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def render(self, messages, *, tools=(), add_generation_prompt=True, **variables) -> str:
        self.seen.append({"messages": messages, "tools": tools, **variables})
        if messages[0]["role"] == "tool":
            raise UsageError("the template says: a chat does not begin with a tool")
        return "".join(f"{message['role']}:{message.get('content')}\n" for message in messages)


@dataclass
class FakeCall:
    id: str
    name: str
    arguments: str


@dataclass
class FakeDelta:
    content: str = ""
    call: FakeCall | None = None


class FakeSplits:
    """`<name arguments>` is a call."""

    def __init__(self) -> None:
        self.held = ""
        self.count = 0

    def feed(self, text: str) -> list[FakeDelta]:
        found = []
        for letter in text:
            self.held += letter
            if self.held.startswith("<"):
                if letter == ">":
                    name, _, arguments = self.held[1:-1].partition(" ")
                    self.count += 1
                    found.append(FakeDelta(call=FakeCall(f"call_{self.count}", name, arguments)))
                    self.held = ""
            else:
                found.append(FakeDelta(self.held))
                self.held = ""
        return found

    def finish(self) -> list[FakeDelta]:
        held, self.held = self.held, ""
        return [FakeDelta(held)] if held else []


class FakeService:
    def __init__(self, batcher: FakeBatcher | None = None) -> None:
        self.model_name, self.created, self.n_ctx = "fake", 1_700_000_000, N_CTX
        self.template: FakeTemplate | None = FakeTemplate()
        self.sampling = SamplingParams()
        self.batcher = batcher or FakeBatcher()
        self.facts = {"n_vocab": N_VOCAB}
        self.view = None
        self.given_up = False
        self.embedded: list[list[list[int]]] = []

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        return [*([BOS] if add_special else []), *text.encode("utf-8", "replace")]

    def piece(self, token: int) -> bytes:
        if not 0 <= token < N_VOCAB:
            raise UsageError(f"token {token} is not in the vocabulary of {N_VOCAB}")
        return bytes([token]) if token < BOS else b""

    def split_calls(self, tools) -> FakeSplits:
        return FakeSplits()

    def call_grammar(self, tools, name) -> str:
        names = [tool["function"]["name"] for tool in tools]
        if name and name not in names:
            raise UsageError(f"there is no tool {name!r}")
        return f"a call of {name or names}"

    def embed(self, prompts):
        self.embedded.append([list(prompt) for prompt in prompts])
        return np.array([[len(prompt), 0.5, -0.25] for prompt in prompts], np.float32)

    def give_up(self) -> None:
        self.given_up = True
