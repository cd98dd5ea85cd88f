"""Devices of this machine in a list of devices: `local:CPU:1`.

Such a name stands for a worker process that the head starts for the one device. Knows texts only;
`llm.opening` and the command lines ask it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from caravan.errors import UsageError
from caravan.worker import devices

PREFIX = "local:"
_NUMBER = "#"
# `sim:GFLOPS=1,GBPS=2` is one device
_SETTING = re.compile(r"\s*\w+=")


def is_local(text: str) -> bool:
    """Whether a text names a device of this machine: `local:50052` is a port of a host."""
    return text.startswith(PREFIX) and not text[len(PREFIX) :].isdigit()


def spec(name: str) -> str:
    """What its worker is to lend: `CPU:1` for `local:CPU:1`, also for the second of that name."""
    return name.removeprefix(PREFIX).partition(_NUMBER)[0]


def names_threads(name: str) -> bool:
    """Whether its worker need not be told how many threads to compute with."""
    (wish,) = devices.parse(spec(name))
    return wish.name != "CPU" or wish.threads > 0


def check(names: Sequence[str]) -> None:
    """Raises UsageError for a list of devices that cannot be meant."""
    for name in filter(is_local, names):
        wanted = name.removeprefix(PREFIX)
        if not wanted or _NUMBER in name or len(devices.parse(wanted)) != 1:
            raise UsageError(
                f"{name!r} is not one device: expected local:NAME or local:CPU:THREADS"
            )
    others = [name for name in names if not is_local(name)]
    twice = next((name for name in others if others.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice!r} is named twice")


def numbered(names: Sequence[str]) -> list[str]:
    """The names of a pipeline's devices: the second `local:CPU:1` is `local:CPU:1#2`."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        again = is_local(name) and seen[name] > 1
        result.append(f"{name}{_NUMBER}{seen[name]}" if again else name)
    return result


def needed(lists: Iterable[Sequence[str]]) -> list[str]:
    """The local devices that serve each of several pipelines in turn; equal ones are repeated."""
    found = dict.fromkeys(name for names in lists for name in filter(is_local, numbered(names)))
    return [PREFIX + spec(name) for name in found]


def split(text: str, separators: str) -> list[str]:
    """The parts of a list between any of `separators`; the settings of a device stay together."""
    parts: list[str] = []
    for part in re.split(f"([{re.escape(separators)}])", text):
        if parts and parts[-1] == "," and _SETTING.match(part):
            parts[-2:] = [f"{parts[-2]},{part}"]
        else:
            parts.append(part)
    return [part.strip() for part in parts[::2]]
