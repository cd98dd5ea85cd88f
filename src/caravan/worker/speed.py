"""`Speed`: what a simulated device can do, as in `sim:GFLOPS=100,GBPS=50,GIB=24`.

Knows no engine and no NumPy: the command line checks its argument with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from caravan.errors import UsageError

# The least and the most; what lies beyond is a slip, and some of it would be waited for for ever.
_RANGES = {"GFLOPS": (1e-9, 1e12), "GBPS": (1e-9, 1e12), "GIB": (1e-6, 1 << 20), "US": (0.0, 1e9)}
_REQUIRED = ("GFLOPS", "GBPS")
_DEFAULTS = {"GIB": 1024.0, "US": 0.0}


@dataclass(frozen=True, slots=True)
class Speed:
    """The cost model's numbers.

    Attributes:
        gflops: 10^9 operations of arithmetic a second.
        gbps: 10^9 bytes of memory, read or written, a second.
        gib: memory in GiB; more cannot be allocated.
        us: microseconds that every graph takes on top.
    """

    gflops: float
    gbps: float
    gib: float = _DEFAULTS["GIB"]
    us: float = _DEFAULTS["US"]

    def __str__(self) -> str:
        text = f"{self.gflops:g} GFLOPS, {self.gbps:g} GB/s"
        return f"{text}, {self.us:g} us a graph" if self.us else text

    @property
    def memory(self) -> int:
        """Bytes."""
        return int(self.gib * (1 << 30))

    @staticmethod
    def parse(text: str) -> Speed:
        """From KEY=VALUE entries separated by ','; raises UsageError."""
        values = dict(_DEFAULTS)
        given = set()
        for entry in filter(None, text.split(",")):
            key, _, value = (part.strip() for part in entry.partition("="))
            if key not in (*_REQUIRED, *_DEFAULTS):
                known = ", ".join((*_REQUIRED, *_DEFAULTS))
                raise UsageError(f"device sim has no {key!r}; it takes {known}")
            if key in given:
                raise UsageError(f"device sim: {key} is given twice")
            given.add(key)
            values[key] = _number(key, value)
        missing = [key for key in _REQUIRED if key not in given]
        if missing:
            raise UsageError(
                f"device sim needs {' and '.join(missing)}, as in sim:GFLOPS=100,GBPS=50"
            )
        return Speed(values["GFLOPS"], values["GBPS"], values["GIB"], values["US"])


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    least, most = _RANGES[key]
    if not least <= value <= most:
        raise UsageError(
            f"device sim: {key}={text} is not a number that it can have ({least:g} to {most:g})"
        )
    return value
