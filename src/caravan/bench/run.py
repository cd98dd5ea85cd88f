"""One test: warm-up, depth, repetitions, the clock.

The rules of what is timed are llama-bench's and live here alone. The model and its contexts come
through the protocols below, so that the rules can be tested without an engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from caravan.bench.plan import Case, same_model
from caravan.bench.result import Host, ModelFacts, Result
from caravan.bench.usage import Lap, Totals, uses


class BenchContext(Protocol):
    """A context made for one case, with its batch sizes and threads set."""

    def decode(self, tokens: Sequence[int]) -> None:
        """Queue one batch of at most `n_batch` tokens; need not wait for it."""

    def synchronize(self) -> None: ...
    def clear(self) -> None: ...
    def save(self) -> bytes: ...

    def restore(self, state: bytes) -> bool:
        """False when the state does not fit this context; the context is to be cleared then."""

    def close(self) -> None: ...


class BenchModel(Protocol):
    """A loaded model. `bos` is None when a text of its vocabulary does not begin with one."""

    @property
    def facts(self) -> ModelFacts: ...
    @property
    def n_vocab(self) -> int: ...
    @property
    def bos(self) -> int | None: ...
    def context(self, case: Case) -> BenchContext: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What holds for every test of a run.

    Attributes:
        delay: seconds to cool off before each test.
    """

    repetitions: int = 5
    warmup: bool = True
    delay: float = 0


@dataclass(slots=True)
class _Depth:
    """The state at the depth that was filled last; depth 0 when there is none."""

    tokens: int = 0
    state: bytes = b""


class Runner:
    """Runs cases one after the other, keeping the model while it can. Close it when done.

    `say` is told how far it is; `ready` is called when a test has got its model and its context;
    `watch` tells what the devices have done so far, where it is wanted how busy they were.
    """

    def __init__(
        self,
        load: Callable[[Case], BenchModel],
        host: Host,
        settings: RunSettings,
        *,
        say: Callable[[str], None] = lambda text: None,
        ready: Callable[[], None] = lambda: None,
        watch: Callable[[Case], Totals] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._load = load
        self._host = host
        self.settings = settings
        self.say = say
        self._ready = ready
        self.watch = watch
        self.clock = clock
        self._model: BenchModel | None = None
        self._loaded: Case | None = None
        self.depth = _Depth()
        # C's rand() without a seed gives every run the same tokens, and so does this.
        self.random = random.Random(1)

    def close(self) -> None:
        """Let go of the model."""
        model, self._model, self._loaded = self._model, None, None
        if model is not None:
            model.close()

    def run(self, case: Case, label: str = "") -> Result:
        """Run one test. `label` (`benchmark I/N`) begins its progress lines. Blocks to its end."""
        self.say(f"{label}: starting")
        model = self._model_for(case)
        context = model.context(case)
        try:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            test = _Test(self, model, context, case, label)
            self._ready()
            context.clear()
            if self.settings.delay:
                time.sleep(self.settings.delay)
            if self.settings.warmup:
                test.warm_up()
            samples = [test.sample(n) for n in range(1, self.settings.repetitions + 1)]
            used = uses(test.laps) if self.watch else None
            return Result(case, self._host, model.facts, now, samples, used)
        finally:
            context.close()

    def _model_for(self, case: Case) -> BenchModel:
        if self._model is not None and self._loaded and same_model(self._loaded, case):
            return self._model
        if self._loaded is not None and self._loaded.model != case.model:
            self.depth = _Depth()
        # Two models at a time may not fit.
        self.close()
        self._model = self._load(case)
        self._loaded = case
        return self._model


class _Test:
    """One case on its context."""

    def __init__(
        self, runner: Runner, model: BenchModel, context: BenchContext, case: Case, label: str
    ) -> None:
        self.runner = runner
        self.model = model
        self.context = context
        self.case = case
        self.label = label
        self.laps: list[Lap] = []

    def say(self, text: str) -> None:
        self.runner.say(f"{self.label}: {text}")

    def warm_up(self) -> None:
        if self.case.n_prompt:
            self.say("warmup prompt run")
            self._prompt(self._batches(self.case.n_prompt))
        if self.case.n_gen:
            self.say("warmup generation run")
            self._generate(self._tokens(1))

    def sample(self, number: int) -> int:
        """The nanoseconds of one repetition."""
        case, turn = self.case, f"{number}/{self.runner.settings.repetitions}"
        self.context.clear()
        if case.n_depth:
            self._fill(turn)
        # Made before the clock starts: in Python this would be felt.
        prompt, gen = self._batches(case.n_prompt), self._tokens(case.n_gen)
        watch = self.runner.watch
        before = watch(case) if watch else {}
        start = self.runner.clock()
        if prompt:
            self.say(f"prompt run {turn}")
            self._prompt(prompt)
        if gen:
            self.say(f"generation run {turn}")
            self._generate(gen)
        ns = self.runner.clock() - start
        if watch:
            self.laps.append(Lap(before, watch(case), ns))
        return ns

    def _fill(self, turn: str) -> None:
        depth = self.runner.depth
        if depth.tokens == self.case.n_depth:
            if self.context.restore(depth.state):
                self.say(f"depth run {turn} (cached)")
                return
            self.context.clear()
        self.say(f"depth run {turn}")
        self._prompt(self._batches(self.case.n_depth))
        self.runner.depth = _Depth(self.case.n_depth, self.context.save())

    def _prompt(self, batches: list[list[int]]) -> None:
        # No wait between batches, so that a pipeline of devices stays full.
        for batch in batches:
            self.context.decode(batch)
        self.context.synchronize()

    def _generate(self, tokens: list[int]) -> None:
        for token in tokens:
            self.context.decode((token,))
            self.context.synchronize()

    def _batches(self, count: int) -> list[list[int]]:
        tokens, size = self._tokens(count), self.case.n_batch
        return [tokens[start : start + size] for start in range(0, count, size)]

    def _tokens(self, count: int) -> list[int]:
        tokens = self.runner.random.choices(range(self.model.n_vocab), k=count)
        if tokens and self.model.bos is not None:
            tokens[0] = self.model.bos
        return tokens
