"""`Seconds`: the type of all options that are a time."""

from __future__ import annotations

from typing import Any

import click

_DAY = 86_400


class Seconds(click.types.FloatParamType):
    """Up to a day, which every clock can take. "nan" is refused too, as FloatRange would not."""

    name = "seconds"

    def __init__(self, least: float = 0.1) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not self.least <= seconds <= _DAY:
            self.fail(f"{value} is not a time from {self.least:g} to {_DAY} seconds", param, ctx)
        return seconds
