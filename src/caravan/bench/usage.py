"""How busy each device was during a test: `Use` from its totals before and after every repetition.

The totals are the workers' own, by their own clocks; the time they are a share of is this head's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from caravan.stream.telemetry import DeviceStats

Totals = Mapping[str, DeviceStats | None]
"""By device; None for one that nobody counts for."""

HEADING = "utilization: shares of each test's time, as the workers counted them"
_SHARES = ("computing", "waiting", "sending", "idle")


@dataclass(frozen=True, slots=True)
class Use:
    """One device in one test. The shares are of the time of its repetitions, and add up to 1.

    Attributes:
        computing: the engine computed a graph.
        waiting: it did not, but received input, or waited for a copy from another device.
        sending: neither, but results or copies were being handed to the network.
        idle: the rest: there was nothing to do, as far as the worker knew.
        bytes_in, bytes_out: payload moved to and from the device, for each repetition.
        graphs: graphs computed, for each repetition.
    """

    computing: float
    waiting: float
    sending: float
    idle: float
    bytes_in: int
    bytes_out: int
    graphs: int


@dataclass(frozen=True, slots=True)
class Lap:
    """One repetition: the totals around it, and the nanoseconds that it took."""

    before: Totals
    after: Totals
    ns: int


def uses(laps: Sequence[Lap]) -> dict[str, Use | None]:
    """How busy each device was; None where nobody knows."""
    names = laps[0].before if laps else ()
    return {name: _use(name, laps) for name in names}


def _use(name: str, laps: Sequence[Lap]) -> Use | None:
    sums = dict.fromkeys(("computing", "waiting", "sending", "bytes_in", "bytes_out", "graphs"), 0)
    for lap in laps:
        before, after = lap.before.get(name), lap.after.get(name)
        if before is None or after is None:
            return None
        for field in sums:
            sums[field] += getattr(after, field) - getattr(before, field)
    spent = [sums[field] for field in ("computing", "waiting", "sending")]
    # what was asked before the clock started and after it stopped may hold a little more
    whole = max(sum(lap.ns for lap in laps), sum(spent), 1)
    computing, waiting, sending = (ns / whole for ns in spent)
    return Use(
        computing,
        waiting,
        sending,
        max(0.0, 1 - computing - waiting - sending),
        sums["bytes_in"] // len(laps),
        sums["bytes_out"] // len(laps),
        sums["graphs"] // len(laps),
    )


def records(found: Mapping[str, Use | None]) -> list[dict[str, object]]:
    """For JSON: an object a device, with the shares to four digits."""
    rows: list[dict[str, object]] = []
    for name, use in found.items():
        values = dict.fromkeys(Use.__slots__) if use is None else asdict(use)
        rows.append({"device": name, **{key: _short(value) for key, value in values.items()}})
    return rows


def _short(value: float | None) -> float | None:
    return round(value, 4) if isinstance(value, float) else value


def table(tests: Sequence[tuple[str, float, Mapping[str, Use | None]]]) -> list[str]:
    """Lines of a table: a row for each device of each test, given with its name and t/s."""
    rows = [
        [test, f"{rate:.2f}", name, *_percents(use)]
        for test, rate, found in tests
        for name, use in found.items()
    ]
    headings = ["test", "t/s", "device", *_SHARES]
    left = headings.index("device")
    # no wider than it must be: it has to fit where the table above it may not
    columns = list(zip(headings, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    rules = ["-" * (width - 1) + ("-" if n == left else ":") for n, width in enumerate(widths)]
    return [
        "| " + " | ".join(_cell(cells[n], widths[n], n == left) for n in range(len(cells))) + " |"
        for cells in (headings, rules, *rows)
    ]


def _percents(use: Use | None) -> list[str]:
    return [f"{100 * getattr(use, share):.1f} %" if use else "-" for share in _SHARES]


def _cell(text: str, width: int, left: bool) -> str:
    return text.ljust(width) if left else text.rjust(width)
