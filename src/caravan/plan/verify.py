"""`verify`: what a plan predicts, run and measured: is the cost model right on these devices?

Loads the model as the plan's best options say, and times prompts and decode steps of one request
with the predictions beside them. Called by the command line.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from caravan.llm import Context, ContextParams, EngineDevice, Model, ModelParams
from caravan.plan.crossing import CLEAR
from caravan.plan.options import Option, Plan
from caravan.plan.pipeline import Pipeline
from caravan.plan.predict import prompt_seconds, step_seconds

_OPTIONS = 4
_ROUNDS = 3
_STEPS = 24  # decode steps that are timed, after one that is not
_WARM_UP = 32
# prompts around the predicted break-even, as parts of it; it is left out where they take longer
_AROUND = (0.6, 0.8, 1.0, 1.25, 1.6)
_MOST_SECONDS = 60.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """One prediction and what came of it.

    Attributes:
        devices, counts: names, and layers of each.
        what: `prompt` and `decode`, in tokens a second, or `break-even`, in tokens of a prompt.
        tokens: of the prompt, which decoding goes on from; 0 for the break-even.
        measured: the median; nan where there is none.
    """

    devices: tuple[str, ...]
    counts: tuple[int, ...]
    what: str
    tokens: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """How much the prediction is above the measurement, as a part of it."""
        return self.predicted / self.measured - 1


def errors(checks: Sequence[Check]) -> tuple[float, float]:
    """Median and worst error of all speeds, without their signs; nan without any."""
    found = [abs(check.error) for check in checks if check.what != "break-even"]
    return (statistics.median(found), max(found)) if found else (math.nan, math.nan)


def worth_checking(plan: Plan) -> list[Option]:
    """The best, the best of one device, and the best of each number of devices."""
    fitting = [option for option in plan.options if option.fits]
    chosen: dict[int, Option] = {}
    for option in fitting:
        chosen.setdefault(len(option.devices), option)
    single = [plan.single] if plan.single is not None else []
    first = [*fitting[:1], *single]
    wanted = first + [option for option in chosen.values() if option not in first]
    return list({(option.devices, option.counts): option for option in wanted}.values())[:_OPTIONS]


def verify(
    path: Path,
    params: ModelParams,
    context: ContextParams,
    plan: Plan,
    devices: Sequence[EngineDevice],
    *,
    prompts: Sequence[int],
    say: Say = lambda line: None,
) -> list[Check]:
    """Run what was predicted; blocks as long as that takes.

    Args:
        context: of one request, as it was planned for.
        devices: those of the plan.
        prompts: tokens of each.
        say: told, in a line, what is measured.

    Raises what `Model` and `Context` raise.
    """
    options = worth_checking(plan)
    runs = [_Run(path, params, context, plan, option, devices) for option in options]
    together = _fit_together(options)
    groups = [runs] if together else [[run] for run in runs]
    for group in groups:
        with ExitStack() as stack:
            for run in group:
                say(f"loading the model on {run.where}")
                stack.enter_context(run)
            for number in range(_ROUNDS):
                say(f"measuring, round {number + 1} of {_ROUNDS}")
                # one after the other: what else the machines do touches all alike
                for run in group:
                    run.measure(prompts)
            checks = _break_even(plan, group, say) if together else []
    return [*(check for run in runs for check in run.checks()), *checks]


def _fit_together(options: Sequence[Option]) -> bool:
    """Whether all of them can be loaded at a time."""
    need: dict[int, int] = {}
    free: dict[int, int] = {}
    for option in options:
        for device, needs in zip(option.devices, option.needs, strict=True):
            need[device] = need.get(device, 0) + needs.need
            free[device] = needs.free if needs.total else 1 << 62
    return all(need[device] <= free[device] for device in need)


class _Run:
    """An option, loaded. Use it as a context manager.

    Attributes:
        where: the option's devices, for people.
    """

    def __init__(
        self,
        path: Path,
        params: ModelParams,
        context: ContextParams,
        plan: Plan,
        option: Option,
        devices: Sequence[EngineDevice],
    ) -> None:
        self.option = option
        self.names = tuple(plan.names[number] for number in option.devices)
        self.where = "/".join(self.names)
        self.pipeline = Pipeline(plan.setting, option.devices, option.counts)
        self._sample = plan.setting.head.sample
        self._path = path
        self._params = replace(params, tensor_split=tuple(float(n) for n in option.counts))
        self._context_params = context
        self._devices = [devices[number] for number in option.devices]
        self._stack = ExitStack()
        self._rng = random.Random(1)
        self._seconds: dict[tuple[str, int], list[float]] = {}

    def __enter__(self) -> _Run:
        with ExitStack() as stack:
            self._model = stack.enter_context(
                Model(
                    self._path,
                    self._params,
                    devices=self._devices,
                    context=self._context_params,
                )
            )
            self._context = stack.enter_context(Context(self._model, self._context_params))
            self.prompt(min(_WARM_UP, self._context.n_ctx - 1))
            self.step()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def measure(self, prompts: Sequence[int]) -> None:
        """One round: each prompt, and steps after it."""
        for count in prompts:
            self._note("prompt", count, self.prompt(count))
            steps = min(_STEPS, self._context.room - 1)
            if steps > 0:
                self.step()
                self._note("decode", count, statistics.median(self.step() for _ in range(steps)))

    def _note(self, what: str, count: int, seconds: float) -> None:
        self._seconds.setdefault((what, count), []).append(seconds)

    def prompt(self, count: int) -> float:
        """Seconds of reading so many tokens, until the logits of the last are here."""
        tokens = self._some(count)
        self._context.clear()
        began = time.perf_counter()
        self._context.decode(tokens)
        self._context.synchronize()
        return time.perf_counter() - began

    def step(self) -> float:
        """Seconds of one token more."""
        tokens = self._some(1)
        began = time.perf_counter()
        self._context.decode(tokens)
        self._context.synchronize()
        return time.perf_counter() - began

    def _some(self, count: int) -> list[int]:
        # the content does not matter for speed
        return [self._rng.randrange(self._model.n_vocab) for _ in range(count)]

    def checks(self) -> Iterator[Check]:
        """What was predicted beside what was measured."""
        for (what, count), seconds in self._seconds.items():
            if what == "prompt":
                predicted, tokens = prompt_seconds(self.pipeline, count), count
            else:
                # nothing is sampled here
                step = step_seconds(self.pipeline, count + _STEPS // 2) - self._sample
                predicted, tokens = step, 1
            measured = statistics.median(seconds)
            yield Check(
                self.names,
                self.option.counts,
                what,
                count,
                tokens / predicted,
                tokens / measured,
            )


def _break_even(plan: Plan, runs: Sequence[_Run], say: Say) -> list[Check]:
    """The prompt from which on several devices are better than one, where it is cheap to find."""
    single = next((run for run in runs if len(run.option.devices) == 1), None)
    several = next((run for run in runs if len(run.option.devices) > 1), None)
    if single is None or several is None or not several.option.break_even:
        return []
    predicted = several.option.break_even
    lengths = sorted({max(1, round(predicted * part)) for part in _AROUND})
    if lengths[-1] > plan.setting.n_ctx:
        return []
    once = sum(
        prompt_seconds(run.pipeline, length) for run in (single, several) for length in lengths
    )
    if once * _ROUNDS > _MOST_SECONDS:
        return []
    say("looking for the break-even")
    ratios: dict[int, list[float]] = {length: [] for length in lengths}
    for _ in range(_ROUNDS):
        for length in lengths:
            ratios[length].append(single.prompt(length) / several.prompt(length))
    found = crossing([(length, statistics.median(ratios[length])) for length in lengths])
    return [Check(several.names, several.option.counts, "break-even", 0, predicted, found)]


def crossing(points: Sequence[tuple[int, float]]) -> float:
    """From which length on a speed-up, known at some, is one that is more than noise; nan where it
    is that from the first on, or not at the last."""
    above = None
    for (low, before), (high, after) in itertools.pairwise(points):
        if before < CLEAR <= after:
            part = (CLEAR - before) / (after - before)
            above = float(low * (high / low) ** part)
    return above if above is not None and points[-1][1] >= CLEAR else math.nan
