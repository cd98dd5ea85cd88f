"""The upper panel: speed-up in time to first token over the length of the prompt, with the
break-even; tokens a second where there is nothing to compare with.

What is drawn comes from `curves`. Called by `draw` (the package).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from caravan.plan.options import Plan
from caravan.plan.picture.canvas import DARK, GREY, INK, PALE, Panel, devices, short
from caravan.plan.picture.curves import Curves, pipeline
from caravan.plan.times import F64

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from matplotlib.text import Annotation

_DASHES: tuple[Any, ...] = ((0, (5, 1.5)), (0, (2, 1.2)), (0, (6, 1.5, 1.5, 1.5)), "-")
_LABEL = 7.5  # points, of a line's label
_NEAR = 4  # pixels between a text and a line
# where a text may be beside its point: in points, right and above
_ASIDE, _ABOVE = (0, 8, -8), (-8, 8, -20, 20, -40, 40)
_LEADER = {"arrowstyle": "-", "color": DARK[2], "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3}


class _End(NamedTuple):
    """The right end of a line, and what is written there."""

    value: float
    text: str
    colour: str
    weight: str


def draw_speedups(panel: Panel, plan: Plan, found: Curves, n_prompt: int) -> None:
    """One line for each option of `found`; the one that is shown below is the thick one."""
    axes = panel.axes
    ends = _draw_lines(axes, found)
    axes.axvline(n_prompt, color=GREY, linewidth=0.7, linestyle=(0, (1, 2)), zorder=0)
    _scale_lengths(axes, found)
    _scale_values(axes, found)
    _label_ends(panel, ends)
    note = f"dotted: the prompt of {n_prompt:,} tokens below"
    if len(found.lines) > 1:
        note = f"thick: the split below; {note}"
    if found.speedup and plan.single is not None:
        ((device, _, _),) = pipeline(plan, plan.single).stages
        name = short(plan.names[device])
        title = f"Speed-up in time to first token against the best single device, {name}"
        _mark_break_even(axes, plan, found)
    else:
        title = "Prompt tokens a second until the first token"
        if plan.single is None:
            title += "; no single device holds the model"
    panel.title(title, note)


def _draw_lines(axes: Axes, found: Curves) -> list[_End]:
    ends = []
    dashes = itertools.cycle(_DASHES)
    for line in found.lines:
        shown = line.option is found.shown
        colour = DARK[0] if shown else GREY
        axes.plot(
            found.lengths,
            line.values,
            color=colour,
            linestyle="-" if shown else next(dashes),
            linewidth=2.0 if shown else 1.1,
            zorder=3 if shown else 2,
        )
        weight = "bold" if shown else "normal"
        ends.append(_End(float(line.values[-1]), devices(len(line.option.devices)), colour, weight))
    if found.speedup:
        axes.axhline(1.0, color=INK, linewidth=0.9, zorder=1)
        ends.append(_End(1.0, devices(1), INK, "normal"))
    return ends


def _scale_lengths(axes: Axes, found: Curves) -> None:
    start, end = found.lengths[0], found.lengths[-1]
    axes.set_xscale("log", base=2)
    axes.set_xlim(start, max(end, start + 1))
    ticks = [1 << i for i in range(start.bit_length() - 1, end.bit_length()) if 1 << i >= start]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("tokens of the prompt", labelpad=2)


def _scale_values(axes: Axes, found: Curves) -> None:
    """From zero, unless that would flatten what there is to see."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    values = np.concatenate([line.values for line in found.lines])
    low, high = float(values.min()), float(values.max())
    if found.speedup:
        low, high = min(low, 1.0), max(high, 1.0)
    room = max(high - low, 0.1 * high) * 0.12
    axes.set_ylim(max(0.0, low - room) if low > 0.4 * high else 0.0, high + room)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    form = "{:.4g}x" if found.speedup else "{:,.6g}"
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form.format(value)))
    axes.grid(axis="y", color=PALE, linewidth=0.7)
    axes.set_axisbelow(True)


def _label_ends(panel: Panel, ends: Sequence[_End]) -> None:
    """Beside the lines' right ends, moved apart where they are close, with a line to each."""
    low, high = panel.axes.get_ylim()
    points = panel.high / (high - low)
    ends = sorted(ends)
    places = _apart([(end.value - low) * points for end in ends], _LABEL * 1.25, panel.high)
    for end, place in zip(ends, places, strict=True):
        panel.axes.annotate(
            end.text,
            (1, end.value),
            (14, low + place / points),
            xycoords=("axes fraction", "data"),
            textcoords=("offset points", "data"),
            va="center",
            size=_LABEL,
            color=end.colour,
            weight=end.weight,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": end.colour, "linewidth": 0.5, "shrinkA": 1},
        )


def _apart(places: Sequence[float], gap: float, end: float) -> list[float]:
    """Ascending places moved as little as makes neighbours `gap` apart, none above `end`."""
    groups: list[tuple[float, list[float]]] = []  # the middle of those that touch, and them
    for place in places:
        middle, group = place, [place]
        while groups:
            before, others = groups[-1]
            if middle - before >= (len(group) + len(others)) / 2 * gap:
                break
            groups.pop()
            group = others + group
            half = (len(group) - 1) / 2 * gap
            middle = min(max(sum(group) / len(group), half), end - half)
        groups.append((middle, group))
    return [
        middle + (i - (len(group) - 1) / 2) * gap
        for middle, group in groups
        for i in range(len(group))
    ]


def _mark_break_even(axes: Axes, plan: Plan, found: Curves) -> None:
    """Where the shown option begins to pay: a point, and what it is in words."""
    point, (start, end) = found.shown.break_even, (found.lengths[0], found.lengths[-1])
    line = next(line for line in found.lines if line.option is found.shown)
    who = devices(len(line.option.devices))
    if point is not None and start <= point <= end:
        place = (float(point), float(line.values[found.lengths.index(point)]))
        axes.plot(*place, "o", color=DARK[2], markersize=6, zorder=5, mec="white", mew=0.8)
        _place_text(axes, place, f"break-even: {point:,} tokens")
        return
    text = f"{who} ahead from {point} tokens"
    if point is None:
        text = f"{who} never ahead up to {plan.setting.n_ctx:,} tokens"
    elif point < start:
        text = f"{who} ahead at every length"
    middle = len(found.lengths) // 2
    _place_text(axes, (float(found.lengths[middle]), float(line.values[middle])), text)


def _place_text(axes: Axes, place: tuple[float, float], text: str) -> None:
    """Beside a point, or above or below it, where least of the lines is hidden."""
    dots = _dots(axes.lines)
    labels = [
        axes.annotate(
            text,
            place,
            (x, y),
            textcoords="offset points",
            ha="left" if x > 0 else "right" if x < 0 else "center",
            va="bottom" if y > 0 else "top",
            size=8,
            weight="bold",
            color=DARK[2],
            zorder=6,
            arrowprops=_LEADER if abs(y) > _ABOVE[1] else None,
        )
        for y, x in itertools.product(_ABOVE, _ASIDE)
    ]
    costs = [_hidden(axes, label, dots) + abs(label.xyann[1]) for label in labels]
    best = labels[int(np.argmin(costs))]
    for label in labels:
        if label is not best:
            label.remove()
    best.set_bbox({"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.6})


def _hidden(axes: Axes, label: Annotation, dots: F64) -> float:
    """How much a text hides; it is infinite where it does not fit into the panel."""
    from matplotlib.text import Text

    label.get_window_extent()  # puts it in its place
    # without the line that leads to it
    box, panel = Text.get_window_extent(label), axes.get_window_extent()
    if box.x0 < panel.x0 or box.x1 > panel.x1 or box.y0 < panel.y0 or box.y1 > panel.y1:
        return np.inf
    low, high = (box.x0 - _NEAR, box.y0 - _NEAR), (box.x1 + _NEAR, box.y1 + _NEAR)
    return float(np.count_nonzero(np.all((dots > low) & (dots < high), axis=1)))


def _dots(lines: Iterable[Line2D]) -> F64:
    """(n, 2) places on them, a pixel or so apart, in pixels."""
    found = []
    for line in lines:
        corners = line.get_transform().transform(line.get_xydata())
        for one, other in itertools.pairwise(corners):
            steps = np.linspace(0, 1, 2 + int(np.abs(other - one).max()))[:, None]
            found.append(one + steps * (other - one))
    return np.concatenate(found)
