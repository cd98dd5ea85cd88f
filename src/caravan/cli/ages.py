"""`Age`: the type of options that say how long ago, in seconds."""

from __future__ import annotations

import re
from typing import Any

import click

_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9}"
_PATTERN = re.compile(rf"\s*({_NUMBER})\s*([smhdw])\s*", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Age(click.types.FloatParamType):
    """`30d`, `12h` or `1.5w`; the unit is one of s, m, h, d and w."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        match = _PATTERN.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is not a time such as 30d, 12h or 2w", param, ctx)
        number, unit = match.groups()
        return float(number) * _SECONDS[unit.lower()]
