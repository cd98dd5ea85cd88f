"""A plan in text, for people: advice, the choices in a table, the memory of the best.

Knows `plan.options` and the width of a terminal; called by `cli.plan`.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from caravan.llm.needs import DeviceNeeds, size
from caravan.plan.options import Option, Plan, Speed
from caravan.plan.verify import Check, errors

_GAP = 2
_NARROW = 8  # what a column of names is wrapped to at least
_DEVICES = 16  # whose memory is shown
_LEFT = 2  # columns of text; those of numbers stand to the right
_HEADINGS = ("DEVICES", "LAYERS", "PROMPT", "PP t/s", "", "TG t/s", "", "TTFT")


def told(plan: Plan, top: int, width: int) -> list[str]:
    """All of it, for a terminal so many characters wide."""
    options = one_of_each(plan.options)
    lines = [*textwrap.wrap(plan.advice, width), "", *choices(plan, options[:top], width)]
    more = len(options) - top
    if more > 0:
        lines.append(f"… and {more} more (--top {len(options)} shows all)")
    if plan.best is not None:
        lines += ["", *memory(plan.best.needs)]
    lines += ["", *textwrap.wrap(" ".join(_notes(plan)), width)]
    return lines


def one_of_each(options: Sequence[Option]) -> list[Option]:
    """The best order of each set of devices."""
    found: dict[frozenset[int], Option] = {}
    for option in options:
        found.setdefault(frozenset(option.devices), option)
    return list(found.values())


def choices(plan: Plan, options: Sequence[Option], width: int) -> list[str]:
    """The table: a line for each option and kind of request."""
    blocks = [_block(plan, option) for option in options]
    rows = [_HEADINGS, *(row for block in blocks for row in block.rows)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(_HEADINGS))]
    _narrow(widths, width, [(block.devices, block.layers) for block in blocks])
    lines = [_line(_HEADINGS, widths)]
    for block in blocks:
        lines += block.lines(widths, width)
    return lines


class _Block:
    """The lines of one option.

    Attributes:
        rows: cells, those of devices and layers empty.
        lacks: why there are none; empty where it fits.
    """

    def __init__(self, devices: str, layers: str, rows: list[tuple[str, ...]], lacks: str) -> None:
        self.devices = devices
        self.layers = layers
        self.rows = rows
        self.lacks = lacks

    def lines(self, widths: Sequence[int], width: int) -> list[str]:
        """Names and layers go on below each other, beside the numbers."""
        devices = _wrapped(self.devices, widths[0])
        layers = _wrapped(self.layers, widths[1])
        count = max(len(devices), len(layers), len(self.rows))
        empty = ("",) * len(_HEADINGS)
        lines = []
        for n in range(count):
            cells = list(self.rows[n] if n < len(self.rows) else empty)
            cells[0] = devices[n] if n < len(devices) else ""
            cells[1] = layers[n] if n < len(layers) else ""
            lines.append(_line(cells, widths))
        if self.lacks:
            start = sum(widths[:_LEFT]) + _GAP * _LEFT
            told = textwrap.wrap(self.lacks, max(width - start, 20))
            lines += [""] * (len(told) - len(lines))
            for n, text in enumerate(told):
                lines[n] = lines[n].ljust(start) + text
        return lines


def _block(plan: Plan, option: Option) -> _Block:
    devices = names([plan.names[number] for number in option.devices])
    layers = counts(option.counts)
    if not option.fits:
        return _Block(devices, layers, [], f"does not fit: {lacking(option.needs)}")
    crowded = any(speed.concurrency > 1 for speed in option.speeds)
    return _Block(devices, layers, [_row(speed, crowded) for speed in option.speeds], "")


def _row(speed: Speed, crowded: bool) -> tuple[str, ...]:
    prompt = f"{speed.concurrency} x {speed.prompt}" if crowded else str(speed.prompt)
    return (
        "",
        "",
        prompt,
        rate(speed.pp),
        factor(speed.speedup_pp),
        rate(speed.tg),
        factor(speed.speedup_tg),
        seconds(speed.ttft),
    )


def _narrow(widths: list[int], width: int, texts: Sequence[tuple[str, str]]) -> None:
    """Give names and layers what the numbers leave, and no more than they need."""
    needed = [
        max([len(_HEADINGS[n]), *(len(pair[n]) for pair in texts)], default=0) for n in range(_LEFT)
    ]
    left = width - sum(widths[_LEFT:]) - _GAP * (len(widths) - 1)
    while sum(needed) > left and max(needed) > _NARROW:
        widest = needed.index(max(needed))
        needed[widest] -= 1
    # what is shorter for being broken at a slash
    for n in range(_LEFT):
        lines = [line for pair in texts for line in _wrapped(pair[n], needed[n])]
        widths[n] = max(len(line) for line in [_HEADINGS[n], *lines])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _aligned(cells, widths, _LEFT)


def _wrapped(text: str, width: int) -> list[str]:
    """Broken behind slashes; a part that is too long stays whole."""
    lines = [""]
    for part in re.findall(r"[^/]*/?", text):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines


# words


def names(devices: Sequence[str]) -> str:
    """`RPC0/RPC1`, and `RPC0…RPC7` for three and more in a row, up or down."""
    parts = []
    for run in _runs(devices):
        parts += [f"{run[0]}…{run[-1]}"] if len(run) > 2 else run
    return "/".join(parts)


def _runs(devices: Sequence[str]) -> Iterator[list[str]]:
    run: list[str] = []
    step = 0
    for name in devices:
        ahead = _steps(run[-1], name) if run else 0
        if run and (not ahead or (len(run) > 1 and ahead != step)):
            yield run
            run = []
        run.append(name)
        step = ahead
    if run:
        yield run


def _steps(name: str, following: str) -> int:
    """1 from `RPC0` to `RPC1`, -1 back, 0 between all that are no neighbours."""
    one, other = (re.fullmatch(r"(.*?)(\d+)", text) for text in (name, following))
    if one is None or other is None or one[1] != other[1]:
        return 0
    ahead = int(other[2]) - int(one[2])
    return ahead if abs(ahead) == 1 else 0


def counts(layers: Sequence[int]) -> str:
    """`20/11`, and `7x5/6` for seven times 5 and 6."""
    parts = []
    for count, run in groupby(layers):
        times = len(list(run))
        parts += [f"{times}x{count}"] if times > 2 else [str(count)] * times
    return "/".join(parts)


def rate(value: float) -> str:
    """Tokens a second."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.1f}" if value < 999.95 else f"{value:.0f}"


def factor(value: float) -> str:
    """A speed-up."""
    return f"{value:.2f}x" if math.isfinite(value) else "-"


def tokens(value: float) -> str:
    """Of a prompt."""
    return f"{value:.0f}" if math.isfinite(value) else "-"


def seconds(value: float) -> str:
    """A time, in at most three digits and its unit."""
    if not math.isfinite(value):
        return "-"
    if value < 0.9995:
        return f"{value * 1e3:.0f} ms"
    if value < 99.95:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"
    return f"{value / 60:.1f} min"


def lacking(needs: Sequence[DeviceNeeds]) -> str:
    """What is missing where."""
    found = [f"{need.name} lacks {size(need.lacks)}" for need in needs if need.lacks]
    return ", ".join(found) or "too little memory"


def memory(needs: Sequence[DeviceNeeds]) -> list[str]:
    """A line for each device of what is planned."""
    rows: list[tuple[str, ...]] = [("MEMORY", "WEIGHTS", "KV CACHE", "COMPUTE", "ALL", "FREE")]
    for need in needs[:_DEVICES]:
        sizes = (need.weights, need.kv, need.compute, need.need)
        free = size(need.free) if need.total else "-"
        rows.append((need.name, *(size(number) for number in sizes), free))
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = [_aligned(row, widths, 1) for row in rows]
    more = len(needs) - _DEVICES
    return [*lines, f"… and {more} more"] if more > 0 else lines


_WHAT = {
    "prompt": ("prompt of {}", "t/s", rate),
    "decode": ("answer after {}", "t/s", rate),
    "break-even": ("break-even", "tokens", tokens),
}


def checked(checks: Sequence[Check]) -> list[str]:
    """Predictions beside measurements, and how far off they are."""
    rows: list[tuple[str, ...]] = [("VERIFIED", "LAYERS", "", "PREDICTED", "MEASURED", "ERROR")]
    before: tuple[object, ...] = ()
    for check in checks:
        what, unit, number = _WHAT[check.what]
        own = (check.devices, check.counts)
        first = ("", "") if own == before else (names(check.devices), counts(check.counts))
        before = own
        error = f"{100 * check.error:+.1f} %" if math.isfinite(check.error) else "-"
        values = (number(value) for value in (check.predicted, check.measured))
        shown = (f"{value} {unit}" if value != "-" else value for value in values)
        rows.append((*first, what.format(check.tokens), *shown, error))
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = [_aligned(row, widths, 3) for row in rows]
    median, worst = (f"{100 * error:.1f} %" for error in errors(checks))
    return [*lines, "", f"Error of all speeds: median {median}, worst {worst}."]


def _aligned(cells: Sequence[str], widths: Sequence[int], left: int) -> str:
    """So many cells to the left of their columns, the others to the right."""
    padded = (
        cell.ljust(width) if n < left else cell.rjust(width)
        for n, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return (" " * _GAP).join(padded).rstrip()


def _notes(plan: Plan) -> Iterator[str]:
    """What the columns are, and from which prompts on several devices are better than one."""
    yield "PP and TG: tokens of prompts and answers a second, of all requests together."
    if plan.single is None:
        return
    alone = f"{plan.names[plan.single.devices[0]]} alone"
    yield f"x: times as fast as {alone}."
    several = plan.several
    if several is None:
        return
    who = names([plan.names[number] for number in several.devices])
    if several.break_even is None:
        n_ctx = plan.setting.n_ctx
        yield f"{who}: never sooner with the first token than {alone}, up to {n_ctx} tokens."
    elif several.break_even == 0:
        yield f"{who}: always sooner with the first token than {alone}."
    else:
        yield (
            f"{who}: sooner with the first token than {alone} from prompts of"
            f" {several.break_even} tokens on."
        )
