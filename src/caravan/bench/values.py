"""Reading the value of one option: lists, ranges, names, device sets, ratios, overrides.

A reader takes a text and returns the tuple of values that it stands for, or raises UsageError.
`bench.options` gives each option its reader; nothing here knows an option.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from caravan.errors import UsageError
from caravan.worker import names as device_names

T = TypeVar("T")
Reader = Callable[[str], tuple[T, ...]]

AUTO = ("auto",)
"""The device set of a test for which none was chosen: whatever there is."""
NO_DEVICE = ("none",)
"""The device set of a test on the CPU alone."""

MAX_DEVICES = 16
_MOST_VALUES = 10_000
# The sum of three such numbers still fits the engine's 32 bits.
_LARGEST = 2**30
MAX_THREADS = 512
_RANGE = re.compile(r"(-?\d+)(?:-(\d+)(?:([+*])(\d+))?)?", re.ASCII)
_RANGE_FORMS = "N, FIRST-LAST, FIRST-LAST+STEP or FIRST-LAST*FACTOR"


def texts(text: str) -> tuple[str, ...]:
    """The parts between commas, none of them empty."""
    parts = tuple(part.strip() for part in text.removesuffix(",").split(","))
    if not all(parts):
        raise UsageError(f"{text!r} holds an empty value")
    return parts


def integers(low: int = 0, high: int = _LARGEST) -> Reader[int]:
    """Whole numbers from `low` to `high`, also as ranges."""

    def read(text: str) -> tuple[int, ...]:
        values = tuple(value for part in texts(text) for value in _range(part))
        if min(values) < low:
            raise UsageError(f"{min(values)} is too small: at least {low} is needed")
        if max(values) > high:
            raise UsageError(f"{max(values)} is too large: at most {high} is possible")
        return values

    return read


def _range(part: str) -> list[int]:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise UsageError(f"{part!r} is no number: expected {_RANGE_FORMS}")
    value, last, by = int(match[1]), int(match[2] or match[1]), int(match[4] or 1)
    factor = match[3] == "*"
    if last < value:
        raise UsageError(f"the range {part!r} is empty")
    if last > value and (by < 1 or (factor and (by < 2 or value < 1))):
        raise UsageError(f"the range {part!r} never gets to its end")
    values = [value]
    while (value := value * by if factor else value + by) <= last and last > values[0]:
        values.append(value)
        if len(values) > _MOST_VALUES:
            raise UsageError(f"the range {part!r} has more than {_MOST_VALUES} values")
    return values


def pair(text: str) -> tuple[tuple[int, int], ...]:
    """One pair `PP,TG`; never a list."""
    match = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", text, re.ASCII)
    if match is None:
        raise UsageError(f"{text!r} is no pair: expected PP,TG")
    return ((int(match[1]), int(match[2])),)


def names(meanings: Mapping[str, T]) -> Reader[T]:
    """Words out of a closed list, each with its meaning."""

    def read(text: str) -> tuple[T, ...]:
        try:
            return tuple(meanings[part] for part in texts(text))
        except KeyError as exc:
            raise UsageError(
                f"{exc.args[0]!r} is none of {', '.join(dict.fromkeys(meanings))}"
            ) from None

    return read


def words(*allowed: str) -> Reader[str]:
    """Words out of a closed list that mean themselves."""
    return names({word: word for word in allowed})


booleans = names({"0": False, "1": True})


def masks(text: str) -> tuple[str, ...]:
    """CPU masks in hexadecimal, kept as they were written."""
    for part in texts(text):
        if not re.fullmatch(r"(0x)?[0-9a-fA-F]{1,128}", part):
            raise UsageError(f"{part!r} is no mask: expected hexadecimal digits, as in 0x3")
    return texts(text)


def device_sets(text: str) -> tuple[tuple[str, ...], ...]:
    """`,` starts another configuration, `/` joins the devices of one."""
    return tuple(_device_set(part) for part in device_names.split(text.removesuffix(","), ","))


def _device_set(part: str) -> tuple[str, ...]:
    if not part:
        raise UsageError("it holds an empty value")
    devices = tuple(device_names.split(part, "/"))
    if not all(devices):
        raise UsageError(f"{part!r} holds an empty device name")
    if len(devices) > 1 and {"auto", "none"} & set(devices):
        raise UsageError(f"{part!r}: auto and none stand alone")
    device_names.check(devices)
    return devices


def ratios(text: str) -> tuple[tuple[float, ...], ...]:
    """`,` starts another configuration, `/` or `;` separates the shares of one."""
    return tuple(_ratio(part) for part in texts(text))


def _ratio(part: str) -> tuple[float, ...]:
    try:
        shares = [float(share) for share in re.split(r"[;/]+", part)]
    except ValueError:
        raise UsageError(f"{part!r} is no split: expected numbers joined by /") from None
    if not all(math.isfinite(share) and share >= 0 for share in shares):
        raise UsageError(f"{part!r}: a share is a number from 0 up")
    if len(shares) > MAX_DEVICES:
        raise UsageError(f"{part!r} has more than {MAX_DEVICES} shares")
    # Shares of nothing at the end say nothing: `1/0` is `1`, and `0` is the default.
    while shares and shares[-1] == 0:
        shares.pop()
    return tuple(shares)


def overrides(text: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    """`,` starts another configuration (an empty one: none), `;` separates `PATTERN=BUFFER`s."""
    return tuple(_override_set(group) for group in text.removesuffix(",").split(","))


def _override_set(group: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for item in filter(None, group.split(";")):
        pattern, equals, buffer_type = item.partition("=")
        if not (pattern and equals and buffer_type):
            raise UsageError(f"{item!r}: expected PATTERN=BUFFER")
        pairs.append((pattern, buffer_type))
    return tuple(pairs)
