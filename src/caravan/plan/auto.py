"""`AutoSplit`: the layers go where they make some jobs fastest. `EvenSplit`: equally many to each.

Splitters for `llm.Model`. What keeps a plan from being made is told, and is no reason not to run:
the split then goes by free memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from caravan import interrupt
from caravan.errors import UsageError, WorkerLost
from caravan.llm.arrangement import holds
from caravan.llm.params import USUAL_CTX
from caravan.llm.placement import whole_layers
from caravan.llm.splitter import SplitRequest, Splitter
from caravan.models.ledger import known_header
from caravan.plan.job import Job
from caravan.plan.pipeline import Setting
from caravan.plan.setting import measured, require_remote, work_of
from caravan.plan.split import best_counts
from caravan.plan.steps import Steps
from caravan.plan.times import F64, DeviceTimes

Say = Callable[[str], None]
Measure = Callable[[SplitRequest, Sequence[Job], Say], Setting]
_ALIKE = 1.1  # times as fast
_NOTABLE = 1.5  # layers that the output layer counts as


class Unplanned(UsageError):
    """Why no plan is made, in words that come after `split by memory: `."""


def _silent(line: str) -> None:
    pass


def splitter_of(mode: str, jobs: Sequence[Job], say: Say) -> Splitter | None:
    """The one that `auto`, `memory` or `even` means; None: by memory, without any."""
    if mode == "memory":
        return None
    return EvenSplit(say) if mode == "even" else AutoSplit(jobs, say)


class EvenSplit:
    """Equally many layers for each device, in so far as they fit."""

    def __init__(self, say: Say = _silent) -> None:
        self._say = say

    def split(self, request: SplitRequest) -> list[float] | None:
        placed = len(request.layers)
        counts = whole_layers(placed - 1, placed, [1.0] * len(request.devices))
        if sum(counts) == placed and holds(counts, request.layers, request.room):
            return counts
        self.settled(False)
        return None

    def settled(self, taken: bool) -> None:
        if not taken:
            self._say("split by memory: an even one does not fit")


class AutoSplit:
    """Goes by the time that the jobs would take, as it is computed from measurements.

    What was measured is kept in the user's cache: the first time with a device or a kind of model
    takes a second or two, later ones some tenths of a second.

    Args:
        jobs: what the model is wanted for, one like the other.
        say: told, in a line each, what is measured, what was chosen and why.
        measure: makes what is planned with.
    """

    def __init__(
        self,
        jobs: Sequence[Job] = (Job(),),
        say: Say = _silent,
        *,
        measure: Measure | None = None,
    ) -> None:
        self._jobs = tuple(jobs)
        self._say = say
        self._measure = measure or _measured
        self._known: tuple[object, Setting] | None = None
        self._line = ""

    def split(self, request: SplitRequest) -> list[float] | None:
        """See `Splitter`. Raises WorkerLost, and KeyboardInterrupt; nothing else."""
        try:
            return self._by_time(request)
        except Unplanned as exc:
            why = str(exc)
        except WorkerLost:
            raise
        except Exception as exc:  # whatever it is, the model can be run without a plan
            if interrupt.pending():
                # what the engine broke off it calls a failure
                raise KeyboardInterrupt from exc
            text = " ".join(str(exc).split())
            why = f"no plan could be made: {text or type(exc).__name__}"
        self._say(f"split by memory: {why}")
        return None

    def settled(self, taken: bool) -> None:
        """See `Splitter`."""
        self._say(self._line if taken else "split by memory: the one by time does not fit")

    def _by_time(self, request: SplitRequest) -> list[float]:
        _require_plain(request)
        setting = self._setting(request)
        devices = range(len(request.devices))
        layers, room = list(request.layers), list(request.room)
        counts = best_counts(setting, devices, self._jobs, layers, room)
        if counts is None:
            raise Unplanned("no other one fits")
        bound = False
        if _is_tight(counts, layers, room):
            boundless = [sum(layers)] * len(devices)
            bound = best_counts(setting, devices, self._jobs, layers, boundless) != counts
        names = [device.name for device in request.devices]
        self._line = told(setting, self._jobs, names, counts, bound=bound)
        return [float(count) for count in counts]

    def _setting(self, request: SplitRequest) -> Setting:
        """The one before, where only the room has changed."""
        key = (request.path, request.params, request.context, request.devices)
        if self._known is None or self._known[0] != key:
            with Steps(self._say) as step:
                self._known = (key, self._measure(request, self._jobs, step))
        return self._known[1]


def _measured(request: SplitRequest, jobs: Sequence[Job], step: Say) -> Setting:
    try:
        devices = require_remote(request.devices)
    except UsageError as exc:
        raise Unplanned(str(exc)) from None
    context = replace(request.context, n_ctx=length_of(jobs))
    work = work_of(request.path, request.params, context, jobs)
    return measured(work, context, devices, step, ordered=True)


def _require_plain(request: SplitRequest) -> None:
    """Raises Unplanned where the devices do not compute all of the model."""
    n_layer = known_header(request.path).layers
    if n_layer is not None and len(request.layers) <= n_layer:
        raise Unplanned("not all layers are on devices")
    if request.params.overrides:
        raise Unplanned("some tensors are put elsewhere by name")
    if not request.context.offload_kqv:
        raise Unplanned("the KV cache is not on the devices")


def _is_tight(counts: Sequence[int], layers: Sequence[int], room: Sequence[int]) -> bool:
    """Whether some device has no room for a layer more."""
    ends = list(itertools.accumulate(counts))
    for count, end, space in zip(counts, ends, room, strict=True):
        if sum(layers[end - count : end]) + max(layers) > space:
            return True
    return False


def length_of(jobs: Sequence[Job]) -> int:
    """Tokens of a context that has room for each of them; one of a few lengths, so that what was
    measured for one job is good for others."""
    most = max((job.prompt + job.generate for job in jobs), default=0)
    return max(USUAL_CTX, 1 << (most - 1).bit_length())


# why


def told(
    setting: Setting,
    jobs: Sequence[Job],
    names: Sequence[str],
    counts: Sequence[int],
    *,
    bound: bool = False,
) -> str:
    """The line: `split 20/11 by time: RPC0 is 1.9 times as fast as RPC1`.

    Args:
        counts: layers of each of the devices, whose names these are.
        bound: whether it would be another one with more memory.
    """
    used = [number for number, count in enumerate(counts) if count]
    layers = [layer_seconds(times, jobs, setting) for times in setting.times]
    reasons = [_speeds([(names[n], float(layers[n][:-1].sum())) for n in used])]
    last = layers[used[-1]]
    output = last[-1] / max(float(last[:-1].mean()), 1e-12)
    if output >= _NOTABLE:
        reasons.append(f"the output layer counts as {output:.2g} layers")
    if bound:
        reasons.append("as far as memory allows")
    unused = [name for name, count in zip(names, counts, strict=True) if not count]
    if unused:
        reasons.append(f"faster without {' and '.join(unused)}")
    shares = "/".join(str(count) for count in counts)
    return f"split {shares} by time: {', '.join(reason for reason in reasons if reason)}"


def _speeds(devices: Sequence[tuple[str, float]]) -> str:
    """How fast they are, from the seconds that each would take for the same; empty for one."""
    (fast, least), (slow, most) = (
        choose(devices, key=lambda device: device[1]) for choose in (min, max)
    )
    if len(devices) == 1:
        return ""
    if most < _ALIKE * least:
        both = " and ".join(name for name, _ in devices) if len(devices) == 2 else "all devices"
        return f"{both} are equally fast"
    if len(devices) == 2:
        return f"{fast} is {most / least:.1f} times as fast as {slow}"
    return f"{fast} is the fastest, {most / least:.1f} times as fast as {slow}"


def layer_seconds(times: DeviceTimes, jobs: Sequence[Job], setting: Setting) -> F64:
    """(n_layer + 1,) seconds that a device would take for each layer in all jobs, the output layer
    last: of one request each, one after the other."""
    total = np.zeros(setting.n_layer + 1)
    for job in jobs:
        whole, rest = divmod(job.prompt, setting.n_ubatch)
        middle = job.prompt // 2
        total += whole * times.prompt.at(setting.n_ubatch, middle)
        if rest:
            total += times.prompt.at(rest, job.prompt)
        step = times.decode.at(1, job.depth)
        total += job.generate * step
        if job.prompt:
            total[-1] += step[-1]
    return total
