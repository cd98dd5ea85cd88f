"""`advise`: a plan in one sentence, for somebody who has a few boxes and no time.

Called by `planner`, which knows everything else of the plan by then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from caravan.llm.needs import size
from caravan.plan.estimate import Estimator
from caravan.plan.job import Job
from caravan.plan.options import Option, Plan, Speed
from caravan.plan.pipeline import Setting
from caravan.plan.profile import HEAD, ClusterProfile, LinkProfile

# The engine's scheduler knows 16 backends, of which the CPU is one (GGML_SCHED_MAX_BACKENDS).
MOST_DEVICES = 15
_NAMED = 4
_SAME = 0.02  # of a speed, which is no difference


def advise(plan: Plan, jobs: Sequence[Job]) -> str:
    """What to do, and why.

    Args:
        jobs: what the plan is for.
    """
    best = plan.best
    if best is None:
        return _nothing(plan)
    if len(best.devices) == 1:
        return _alone(plan, best, jobs)
    text = f"{_devices(plan, best)} ({_layers(best)}): {_gain(plan, best, jobs)}"
    text = f"No single device holds it; use {text}" if plan.single is None else f"Use {text}"
    if len(best.devices) > MOST_DEVICES:
        text += f"; but the engine can use {MOST_DEVICES} devices at most"
    return f"{text}."


def _gain(plan: Plan, best: Option, jobs: Sequence[Job]) -> str:
    speed = _longest(best)
    many = speed.concurrency
    prompts = f"prompts of {speed.prompt:,} tokens{f', {many} at a time,' if many > 1 else ''}"
    writes = any(job.generate for job in jobs)
    if plan.single is None:
        written = f", and {_number(speed.tg)} are written" if writes else ""
        return f"{prompts} are read at {_number(speed.pp)} tokens/s{written}"
    parts = [f"{prompts} are read {_ratio(speed.speedup_pp)} {_name(plan, plan.single)} alone"]
    if many == 1 and best.break_even and speed.speedup_pp > 1:
        parts[0] += f", from {best.break_even:,} tokens on"
    if writes:
        parts.append(f"writing is {_difference(speed.speedup_tg)}")
    crowd = max(best.speeds, key=lambda s: (s.concurrency, s.prompt))
    if crowd.concurrency > many:
        written = f" and writing {_difference(crowd.speedup_tg)}" if writes else ""
        reading = f"reading is {_difference(crowd.speedup_pp)}{written}"
        parts.append(f"with {crowd.concurrency} requests at a time {reading}")
    return "; ".join(parts)


def _alone(plan: Plan, best: Option, jobs: Sequence[Job]) -> str:
    use = f"Use {_name(plan, best)} alone"
    if len(plan.names) == 1:
        return f"{use}: there is no other device."
    split = plan.several
    if split is None:
        return f"{use}: the others are too small to be of any help."
    return f"{use}: {_against(plan, best, split, jobs)}."


def _against(plan: Plan, best: Option, split: Option, jobs: Sequence[Job]) -> str:
    """Why not a split, but one device alone."""
    others = _names(plan, [number for number in split.devices if number not in best.devices])
    shown = _longest(split)
    worst = min(split.speeds, key=lambda speed: speed.speedup_pp)
    upto = f"for prompts up to {max(job.prompt for job in jobs):,} tokens"
    reading = f"read prompts of {shown.prompt:,} tokens {_factor(shown.speedup_pp)} as fast"
    gain = f"with {others} it would {reading}"
    if shown.speedup_pp > 1 + _SAME:
        if any(job.generate for job in jobs) and shown.speedup_tg < 1 - _SAME:
            return f"{gain}, but write {_slower(shown.speedup_tg)}, which takes longer"
        if worst.speedup_pp < 1 - _SAME:
            return f"{gain}, but those of {worst.prompt:,} {_slower(worst.speedup_pp)}"
    if _without_links(plan.setting, split, jobs) < _without_links(plan.setting, best, jobs):
        second = "the second device gives" if len(split.devices) == 2 else "more devices give"
        return f"{_slowest(plan.setting, split)} costs more than {second}, {upto}"
    if shown.speedup_pp > 1 - _SAME:
        return f"{others} would gain next to nothing, {upto}"
    return f"{others} would only slow it down, {upto}"


def _nothing(plan: Plan) -> str:
    fullest = max(plan.options, key=lambda option: len(option.devices), default=None)
    if fullest is None:
        return "Nothing fits: no device has any room."
    needs = fullest.needs
    lacks = sum(need.lacks for need in needs)
    total = sum(need.need for need in needs)
    who = "all devices together lack" if len(needs) > 1 else f"{needs[0].name} lacks"
    return (
        f"Nothing fits: {who} {size(lacks)} of {size(total)}; another device with as much free "
        "memory, a shorter context or a smaller quantization would do."
    )


def _without_links(setting: Setting, option: Option, jobs: Sequence[Job]) -> float:
    """The sum of the logarithms of the jobs' seconds, if messages took no time."""
    cluster = setting.cluster
    pairs = {(a, b): LinkProfile() for a in option.devices for b in option.devices if a != b}
    free = ClusterProfile(
        cluster.devices, (LinkProfile(),) * len(cluster.devices), pairs, cluster.processors
    )
    estimator = Estimator(replace(setting, cluster=free), jobs)
    return float(estimator.score(option.devices, np.array([option.counts]))[0])


def _slowest(setting: Setting, option: Option) -> str:
    """The link that costs a split most: what it is to be known by."""
    tokens = setting.n_ubatch * setting.traffic.activation
    ways = [*zip(option.devices, option.devices[1:], strict=False), (option.devices[-1], HEAD)]
    links = [setting.cluster.link(*way) for way in ways]
    slowest = max(links, key=lambda link: link.seconds + link.transfer(tokens))
    if slowest.transfer(tokens) > slowest.seconds:
        return f"the link of {_number(slowest.rate * 8 / 1e6)} Mbit/s"
    return f"the link of {_number(slowest.seconds * 1e3)} ms"


def _longest(option: Option) -> Speed:
    """For the longest prompt, with the fewest requests at a time."""
    return max(option.speeds, key=lambda speed: (-speed.concurrency, speed.prompt))


def _devices(plan: Plan, option: Option) -> str:
    names = [plan.names[number] for number in option.devices]
    if len(names) <= _NAMED:
        return _and(names)
    return f"{len(names)} devices, {names[0]} first and {names[-1]} last"


def _name(plan: Plan, option: Option) -> str:
    return plan.names[option.devices[0]]


def _names(plan: Plan, numbers: Sequence[int]) -> str:
    if len(numbers) > _NAMED:
        return f"{len(numbers)} more devices"
    return _and([plan.names[number] for number in numbers])


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _layers(option: Option) -> str:
    if len(option.counts) <= _NAMED:
        return f"{' + '.join(str(count) for count in option.counts)} layers"
    least, most = min(option.counts), max(option.counts)
    return f"{least} layers each" if least == most else f"{least} to {most} layers each"


def _ratio(speedup: float) -> str:
    if abs(speedup - 1) < _SAME:
        return "as fast as on"
    if speedup > 1:
        return f"{_factor(speedup)} as fast as on"
    return f"{_slower(speedup)} than on"


def _factor(speedup: float) -> str:
    return f"{speedup:.2f} times" if speedup < 1.1 else f"{speedup:.1f} times"


def _difference(speedup: float) -> str:
    if abs(speedup - 1) < _SAME:
        return "as fast"
    if speedup > 1.5:
        return f"{_factor(speedup)} as fast"
    return f"{_percent(speedup - 1)} faster" if speedup > 1 else _slower(speedup)


def _slower(speedup: float) -> str:
    return f"{_percent(1 - speedup)} slower"


def _percent(part: float) -> str:
    return f"{part * 100:.0f} %"


def _number(value: float) -> str:
    """With three digits, or all before the point."""
    if math.isfinite(value) and abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
