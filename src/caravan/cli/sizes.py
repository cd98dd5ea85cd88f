"""`Size`: the type of all options that are an amount of memory or of a disk, in bytes."""

from __future__ import annotations

import math
import re
from typing import Any

import click

_PATTERN = re.compile(
    r"\s*(\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})\s*([kmgt]?)(i?)(b?)\s*", re.ASCII | re.IGNORECASE
)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MOST = 1 << 60


class Size(click.types.IntParamType):
    """`8GiB`, `500MB`, `1.5G` or plain bytes; a prefix with an i, or without B, counts in 1024s.

    Args:
        least: bytes that it must be at least.
    """

    name = "size"

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        size = value if isinstance(value, int) else parse_size(str(value))
        if size is None:
            self.fail(f"{value!r} is not a size such as 8GiB, 500MB or 1.5G", param, ctx)
        if not self.least <= size <= _MOST:
            least = f"{self.least} byte{'s' if self.least != 1 else ''}"
            self.fail(f"{value} is not a size from {least} to 1 EiB", param, ctx)
        return size


class Sizes(click.types.StringParamType):
    """Several of them, one after the other: `8GiB,500MB`."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return tuple(value)
        size = Size()
        return tuple(size.convert(part, param, ctx) for part in value.split(","))


def parse_size(text: str) -> int | None:
    """Bytes; None for what is no size."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        return None
    number, prefix, binary, unit = match.groups()
    if binary and not prefix:
        return None
    base = 1000 if unit and prefix and not binary else 1024
    # a whole number stays exact, however long
    factor: int = base ** _POWERS[prefix.lower()]
    if number.isdigit():
        return int(number) * factor
    return math.floor(float(number) * factor)
