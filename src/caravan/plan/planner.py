"""`make_plan`: every sensible way to run a model on a cluster, with what it would do, best first.

Numbers in, numbers and a sentence out; nothing is loaded or asked. Called by the command line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from caravan.errors import UsageError
from caravan.llm.needs import DeviceNeeds
from caravan.llm.placement import filled_layers
from caravan.plan.advice import MOST_DEVICES, advise
from caravan.plan.candidates import FEW, Kinds, orders
from caravan.plan.crossing import Race
from caravan.plan.job import Job
from caravan.plan.memory import MemoryModel
from caravan.plan.options import Option, Plan, Speed
from caravan.plan.pipeline import Pipeline, Setting
from caravan.plan.split import Search

_FITTINGS = 3
# Micro-batches in stages that are played, which takes some tenths of a second.
_BUDGET = 24_000
_AT_LEAST = 2  # whatever it takes
_SINGLES = 4
# So many of the best are tried with other splits, for half as much all together.
_BETTERED = 3
# More devices have to be worth it, on the average of the jobs.
_WORTH = 0.02
# Tokens of the longest prompt that is played for the break-even of what is not among the best.
_SHORT = 4096
# Single devices that do not fit.
_LISTED = 16


def make_plan(
    setting: Setting,
    memory: MemoryModel,
    *,
    prompts: Sequence[int],
    concurrency: Sequence[int],
    generate: int = 128,
) -> Plan:
    """What to do for requests of each of some lengths, so many at a time, that each write as much.

    Options are compared by the geometric mean of the seconds for each of these.

    Args:
        memory: of the model with the context that it is to have.
        prompts: tokens of a request's prompt.
        concurrency: requests at a time.
        generate: tokens that each of them writes.

    Raises UsageError for numbers that are none, or requests that the context has no room for.
    """
    jobs = _jobs(setting, prompts, concurrency, generate)
    return _Planner(setting, memory, jobs).plan()


def _jobs(
    setting: Setting, prompts: Sequence[int], concurrency: Sequence[int], generate: int
) -> list[Job]:
    if not prompts or min(prompts) < 1:
        raise UsageError("a plan is for prompts of one token at least")
    if not concurrency or min(concurrency) < 1 or generate < 0:
        raise UsageError("a plan is for one request at a time at least, and for what it writes")
    if max(prompts) + generate > setting.n_ctx:
        raise UsageError(
            f"a prompt of {max(prompts):,} tokens and {generate:,} more that are written need a "
            f"context of {max(prompts) + generate:,}; it has {setting.n_ctx:,}"
        )
    each = dict.fromkeys((n, many) for n in prompts for many in concurrency)
    return [Job(n, generate, many) for n, many in each]


@dataclass(frozen=True, slots=True)
class _Draft:
    """An option without its speeds.

    Attributes:
        score: the sum of the logarithms of the jobs' seconds, by the formula or the simulator.
        room: bytes for layers on each device.
    """

    devices: tuple[int, ...]
    counts: tuple[int, ...]
    needs: tuple[DeviceNeeds, ...]
    room: tuple[int, ...]
    score: float
    played: bool = False


class _Planner:
    """One plan."""

    def __init__(self, setting: Setting, memory: MemoryModel, jobs: Sequence[Job]) -> None:
        self._setting = setting
        self._memory = memory
        self._jobs = jobs
        self._search = Search(setting, jobs, memory.layers)
        devices = setting.cluster.devices
        self._sizes = [(device.memory_free, device.memory_total) for device in devices]

    def plan(self) -> Plan:
        drafts, unfit = self._drafts()
        drafts = drafts or self._tight()
        drafts = self._ranked(self._judged(drafts))
        singles = [draft for draft in drafts if len(draft.devices) == 1]
        single = min(singles, key=lambda draft: draft.score, default=None)
        race = Race(None if single is None else self._pipeline(single), self._setting.n_ctx)
        options = self._options(drafts, single, race)
        if not options:
            unfit = [*self._filled(), *unfit]
        several = next(iter(_several(drafts)), None)
        plan = Plan(
            setting=self._setting,
            names=tuple(device.name for device in self._setting.cluster.devices),
            single=None if single is None else options[drafts.index(single)],
            options=(*options, *unfit),
            best=options[0] if options else None,
            curve=() if several is None else race.curve(self._pipeline(several)),
            advice="",
        )
        return replace(plan, advice=advise(plan, self._jobs))

    def _drafts(self) -> tuple[list[_Draft], list[Option]]:
        """What fits, with splits by estimate; and the single devices that do not."""
        rooms = self._memory.room(self._sizes)
        kinds = Kinds(self._setting, rooms)
        found: dict[object, _Draft] = {}
        small = [number for number, room in enumerate(rooms) if room <= 0]
        for devices in orders(self._setting, rooms):
            draft = self._fitted(devices)
            if draft is not None:
                # others, without those that get nothing, may have led to the same
                looks = kinds.looks(draft.devices)
                if draft.score < found.setdefault(looks, draft).score:
                    found[looks] = draft
            elif len(devices) == 1:
                small += devices
        whole = self._setting.n_layer + 1
        unfit = [self._unfit((number,), (whole,)) for number in sorted(small)[:_LISTED]]
        return list(found.values()), unfit

    def _fitted(self, devices: tuple[int, ...]) -> _Draft | None:
        """With the split that looks best; None if there is none that fits."""
        # where every set is tried, one that gets no layers is another candidate
        least = len(devices) if len(devices) <= FEW else 2
        sizes = [self._sizes[number] for number in devices]
        room = self._memory.room(sizes, ordered=least == len(devices))
        for _ in range(_FITTINGS):
            splits = self._search.guesses(devices, room, least)
            if not len(splits):
                return None
            used = np.flatnonzero(splits[0])
            pipeline = self._search.pipeline(devices, splits[0].tolist())
            needs = self._needs(pipeline.devices, pipeline.counts)
            if not any(need.lacks for need in needs):
                left = tuple(room[place] for place in used)
                score = self._search.estimator.score(devices, splits[:1])
                return _Draft(pipeline.devices, pipeline.counts, needs, left, float(score[0]))
            for place, need in zip(used, needs, strict=True):
                room[place] -= need.lacks
        return None

    def _judged(self, drafts: list[_Draft]) -> list[_Draft]:
        """As the simulator has them, as many of the best as there is time for."""
        drafts = sorted(drafts, key=lambda draft: draft.score)
        singles = [draft for draft in drafts if len(draft.devices) == 1]
        several = _several(drafts)
        played, rest = self._played(singles[:_SINGLES], _BUDGET)
        split, others = self._played(several, _BUDGET)
        for place, draft in enumerate(split[:_BETTERED]):
            split[place] = self._bettered(draft)
        played = sorted([*played, *split], key=lambda draft: draft.score)
        rest = sorted([*rest, *singles[_SINGLES:], *others], key=lambda draft: draft.score)
        return played + rest

    def _played(self, drafts: Sequence[_Draft], budget: int) -> tuple[list[_Draft], list[_Draft]]:
        """As many of the first as there is time for, the best first; and the rest as it is."""
        played: list[_Draft] = []
        for draft in drafts:
            budget -= self._search.cost(len(draft.devices))
            if budget < 0 and len(played) >= _AT_LEAST:
                break
            score = self._search.score(draft.devices, draft.counts)
            played.append(replace(draft, score=score, played=True))
        return sorted(played, key=lambda draft: draft.score), [*drafts[len(played) :]]

    def _bettered(self, draft: _Draft) -> _Draft:
        devices = draft.devices
        budget = _BUDGET // 2 // _BETTERED
        counts = self._search.best(devices, draft.room, len(devices), budget)
        needs = None if counts is None else self._needs(devices, counts)
        if counts is None or needs is None or any(need.lacks for need in needs):
            return draft
        score = self._search.score(devices, counts)
        return min(
            draft,
            replace(draft, counts=counts, needs=needs, score=score),
            key=lambda draft: draft.score,
        )

    def _ranked(self, drafts: list[_Draft]) -> list[_Draft]:
        """First the one with the fewest devices of those that are about as good as the best; one
        that the engine can use, if there is any."""
        if not drafts:
            return []
        able = [draft for draft in drafts if len(draft.devices) <= MOST_DEVICES] or drafts
        limit = able[0].score + _WORTH * len(self._jobs)
        good = [draft for draft in able if draft.played and draft.score <= limit]
        first = min(good or able[:1], key=lambda draft: len(draft.devices))
        return [first, *(draft for draft in drafts if draft is not first)]

    def _options(self, drafts: Sequence[_Draft], single: _Draft | None, race: Race) -> list[Option]:
        alone = None if single is None else self._seconds(single)
        # the best of several devices is told of, wherever it stands
        looked_at = [*drafts[:_BETTERED], *_several(drafts)[:1]]
        return [
            Option(
                draft.devices,
                draft.counts,
                draft.needs,
                True,
                tuple(self._speeds(self._seconds(draft), alone)),
                race.break_even(self._pipeline(draft), None if draft in looked_at else _SHORT),
            )
            for draft in drafts
        ]

    def _seconds(self, draft: _Draft) -> Sequence[tuple[float, float]]:
        """For the prompts, and for a decode step, of each job."""
        if draft.played:
            return self._search.played(draft.devices, draft.counts)
        return self._search.guessed(draft.devices, draft.counts)

    def _speeds(
        self,
        seconds: Sequence[tuple[float, float]],
        alone: Sequence[tuple[float, float]] | None,
    ) -> Iterator[Speed]:
        nothing = [(math.nan, math.nan)] * len(seconds)
        for job, (prompt, step), (prompt_alone, step_alone) in zip(
            self._jobs, seconds, alone or nothing, strict=True
        ):
            yield Speed(
                job.prompt,
                job.concurrency,
                pp=job.prompt * job.concurrency / prompt,
                tg=job.concurrency / step,
                ttft=prompt + (self._setting.head.sample if job.concurrency == 1 else 0.0),
                speedup_pp=prompt_alone / prompt,
                speedup_tg=step_alone / step,
            )

    def _pipeline(self, draft: _Draft) -> Pipeline:
        return Pipeline(self._setting, draft.devices, draft.counts)

    def _needs(self, devices: Sequence[int], counts: Sequence[int]) -> tuple[DeviceNeeds, ...]:
        names = [self._setting.cluster.devices[number].name for number in devices]
        needs = self._memory.needs(counts, [self._sizes[number] for number in devices])
        return tuple(replace(need, name=name) for need, name in zip(needs, names, strict=True))

    def _unfit(self, devices: tuple[int, ...], counts: tuple[int, ...]) -> Option:
        return Option(devices, counts, self._needs(devices, counts), False, (), None)

    def _tight(self) -> list[_Draft]:
        """All devices together, where that leaves nothing to spare."""
        room = self._memory.room(self._sizes)
        return [
            _Draft(
                option.devices,
                option.counts,
                option.needs,
                tuple(room[number] for number in option.devices),
                float(self._search.estimator.score(option.devices, np.array([option.counts]))[0]),
            )
            for option in self._filled()
            if not any(need.lacks for need in option.needs)
        ]

    def _filled(self) -> list[Option]:
        """All devices together, each as full as the others."""
        if len(self._sizes) < 2:
            return []
        devices = range(len(self._sizes))
        room = self._memory.room(self._sizes)
        filled = filled_layers(self._memory.layers, room)
        if filled is None:
            return []
        used = [
            (number, int(count)) for number, count in zip(devices, filled, strict=True) if count
        ]
        numbers, counts = zip(*used, strict=True)
        return [self._unfit(numbers, counts)]


def _several(drafts: Sequence[_Draft]) -> list[_Draft]:
    """Those of several devices."""
    return [draft for draft in drafts if len(draft.devices) > 1]
