"""`Curves`: how a plan's options compare over the length of the prompt, as numbers to be drawn.

One option for each number of devices, and few enough of them that a reader can tell them apart.
Called by `draw` (the package); draws nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from caravan.plan.options import Option, Plan
from caravan.plan.pipeline import Pipeline
from caravan.plan.predict import first_token_seconds
from caravan.plan.times import F64

SHORTEST, LONGEST = 64, 4096  # tokens of the prompts that are shown, where the context has room
MOST = 6  # options
_STEPS = 8  # prompt lengths between one and its double


@dataclass(frozen=True, slots=True)
class Curve:
    """One option.

    Attributes:
        values: speed-up in time to first token against the best single device, or tokens of prompt
            a second where no single device fits, for each of the lengths.
    """

    option: Option
    values: F64


@dataclass(frozen=True, slots=True)
class Curves:
    """All that is drawn.

    Attributes:
        lengths: of prompts, in tokens, ascending.
        lines: by number of devices, ascending.
        shown: the option that the plan says most about: its best, or the best of several devices
            where that is a single one.
        speedup: False where there is nothing to compare with, so that values are tokens a second.
    """

    lengths: tuple[int, ...]
    lines: tuple[Curve, ...]
    shown: Option
    speedup: bool


def pipeline(plan: Plan, option: Option) -> Pipeline:
    """An option as the simulator takes it."""
    return Pipeline(plan.setting, option.devices, option.counts)


def curves(plan: Plan, n_prompt: int) -> Curves | None:
    """None: no option fits."""
    ranked = [option for option in (plan.best, *plan.options) if option is not None and option.fits]
    several: dict[int, Option] = {}
    for option in ranked:
        if len(option.devices) > 1:
            several.setdefault(len(option.devices), option)
    shown = next(iter(several.values()), plan.single or next(iter(ranked), None))
    if shown is None:
        return None
    speedup = plan.single is not None and bool(several)
    lengths = np.array(_lengths(plan, n_prompt, shown.break_even or 0))
    alone = _seconds(plan, plan.single, lengths) if speedup and plan.single else lengths
    lines = [
        Curve(option, (alone if speedup else lengths) / _seconds(plan, option, lengths))
        for option in _few(several or {len(shown.devices): shown}, len(shown.devices))
    ]
    return Curves(tuple(int(n) for n in lengths), tuple(lines), shown, speedup)


def _seconds(plan: Plan, option: Option, lengths: F64) -> F64:
    run = pipeline(plan, option)
    return np.array([max(first_token_seconds(run, int(n)), 1e-9) for n in lengths])


def _lengths(plan: Plan, n_prompt: int, break_even: int) -> list[int]:
    """Evenly on a scale of powers of two, among them these, and where there are steps: a token
    more than whole micro-batches is one micro-batch more."""
    end = min(plan.setting.n_ctx, max(LONGEST, n_prompt, break_even))
    start = min(SHORTEST, n_prompt, max(1, end // 8))
    steps = max(1, round(math.log2(end / start) * _STEPS))
    found = {round(start * (end / start) ** (i / steps)) for i in range(steps + 1)}
    found.update(1 << i for i in range(20))
    found.update(plan.setting.n_ubatch * i + more for i in range(1, 17) for more in (0, 1))
    found.update((start, end, break_even))
    return sorted(n for n in found if start <= n <= end)


def _few(options: dict[int, Option], kept: int) -> list[Option]:
    """At most MOST of them by number of devices: the ends, the one to be kept, some between."""
    counts = sorted(options)
    if len(counts) > MOST:
        places = np.geomspace(counts[0], counts[-1], MOST - 1)
        near = {min(counts, key=lambda count: abs(count - place)) for place in places}
        counts = sorted({*near, kept})
    return [options[count] for count in counts]
