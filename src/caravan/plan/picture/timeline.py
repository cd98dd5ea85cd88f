"""The lower panel: one prompt in an option's pipeline, who computes what when.

A row for the head and for each device with layers; what is drawn comes from the simulator. Called
by `draw` (the package).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from caravan.plan.options import Option, Plan
from caravan.plan.picture.canvas import COLOURS, DARK, GREY, INK, PALE, Panel, duration, short
from caravan.plan.picture.curves import Curves, pipeline
from caravan.plan.predict import first_token_seconds
from caravan.plan.profile import HEAD
from caravan.plan.simulator import Timeline

_BAR = 0.62  # of a row's height
_THINNEST = 0.8  # points, of a bar
_SMALLEST, _LARGEST = 6.0, 8.0  # points, of a row's label
_SMALLEST_NUMBER, _LARGEST_NUMBER = 4.5, 7.5  # points, in a bar
_TRANSFER, _ASIDE = "#444444", "#AAAAAA"
_BUSY = 1.07  # place of a row's share of time, in widths of the panel


class Label(NamedTuple):
    """Of a row."""

    text: str
    size: float  # points


def row_labels(plan: Plan, option: Option, row: float) -> list[Label]:
    """For the head and each device with layers; empty where rows are too thin for all.

    Args:
        row: points of a row.
    """
    size = min(_LARGEST, max(_SMALLEST, row * 0.6))
    every = max(1, math.ceil(size * 1.2 / row))
    between = "\n" if row >= 2.6 * size else "  "
    found = [Label("head", size)]
    for i, (device, start, end) in enumerate(pipeline(plan, option).stages, 1):
        layers = _layers(start, end, plan.setting.n_layer)
        text = f"{short(plan.names[device])}{between}{layers}"
        found.append(Label("" if i % every else text, size))
    return found


def _layers(start: int, end: int, n_layer: int) -> str:
    """`layers 0-14`; the output layer is the one after the last."""
    last = min(end, n_layer) - 1
    if last < start:
        return "output layer"
    whole = f"layers {start}-{last}" if last > start else f"layer {start}"
    return f"{whole} + output" if end > n_layer else whole


def draw_timeline(
    panel: Panel,
    plan: Plan,
    found: Curves,
    n_prompt: int,
    timeline: Timeline,
    labels: Sequence[Label],
) -> None:
    """A prompt of n_prompt tokens; `labels` are those of `row_labels`."""
    devices = [device for device, _, _ in pipeline(plan, found.shown).stages]
    chart = _Chart(panel, timeline, {device: i for i, device in enumerate([HEAD, *devices])})
    chart.scale(labels)
    chart.draw_bars()
    chart.draw_transfers()
    chart.draw_busy(labels)
    seconds = first_token_seconds(pipeline(plan, found.shown), n_prompt)
    title = f"A prompt of {n_prompt:,} tokens: first token after {duration(seconds)}"
    if found.speedup and plan.single is not None:
        alone = first_token_seconds(pipeline(plan, plan.single), n_prompt)
        title += f", against {duration(alone)} on the best single device"
        if seconds:
            title += f" ({alone / seconds:.2f}x)"
    count = 1 + max((span.ubatch for span in timeline.spans), default=0)
    parts = "one micro-batch"
    if count > 1:
        parts = f"{count} micro-batches of up to {plan.setting.n_ubatch:,} tokens"
    panel.title(title, f"bars: computing, {parts}; lines between rows: transfers; light: idle")


class _Chart:
    """The rows of one timeline.

    Args:
        rows: of the head and the devices.
    """

    def __init__(self, panel: Panel, timeline: Timeline, rows: dict[int, int]) -> None:
        self._panel, self._axes = panel, panel.axes
        self._rows = rows
        self._spans = timeline.spans
        self._seconds = max(timeline.seconds, 1e-9)
        self._points = panel.wide / self._seconds  # of a second

    def scale(self, labels: Sequence[Label]) -> None:
        """Rows with their names; the axis of time, in data is in seconds."""
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axes = self._axes
        factor, unit = (1e3, "ms") if self._seconds < 1 else (1.0, "s")
        axes.set_xlim(0, self._seconds)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
        form = FuncFormatter(lambda value, _: f"{value * factor:,.6g}")
        axes.xaxis.set_major_formatter(form)
        axes.set_xlabel(f"time in {unit}", labelpad=2)
        axes.set_yticks(range(len(labels)), [label.text for label in labels])
        axes.tick_params(axis="y", length=0, labelsize=labels[0].size)
        for text in axes.get_yticklabels():
            text.set_verticalalignment("center")
        axes.spines["left"].set_visible(False)
        axes.barh(range(len(labels)), self._seconds, _BAR, color=PALE, zorder=0)

    def draw_bars(self) -> None:
        """What is computed, none thinner than can be seen, with numbers where they have room."""
        from matplotlib.collections import PolyCollection

        size = min(_LARGEST_NUMBER, self._panel.high / len(self._rows) * _BAR * 0.72)
        boxes, colours = [], []
        for span in self._spans:
            if span.kind == "transfer" or span.end == span.start:
                continue
            row, colour = self._rows[span.source], COLOURS[span.ubatch % len(COLOURS)]
            width = max(span.end - span.start, _THINNEST / self._points)
            left, right = span.start, span.start + width
            top, bottom = row - _BAR / 2, row + _BAR / 2
            boxes.append([(left, top), (right, top), (right, bottom), (left, bottom)])
            colours.append(colour)
            number = str(span.ubatch + 1)
            room = width * self._points / (0.64 * len(number) + 0.4)
            if size >= _SMALLEST_NUMBER and room > size:
                ink, place = "white" if colour in DARK else INK, (left + right) / 2
                self._axes.text(
                    place, row, number, size=size, color=ink, ha="center", va="center_baseline"
                )
        self._axes.add_collection(PolyCollection(boxes, facecolors=colours, linewidths=0, zorder=2))

    def draw_transfers(self) -> None:
        """Each in the gap beside the row where it arrives, from when it is sent to when it is
        there. The head's messages to later stages only where they take a time that can be seen."""
        from matplotlib.collections import LineCollection

        lines, colours = [], []
        for span in self._spans:
            if span.kind != "transfer":
                continue
            source, target = self._rows[span.source], self._rows[span.target]
            aside = source == 0 and target > 1
            if aside and (span.end - span.start) * self._points < 1.5:
                continue
            above, below = target - 1 + _BAR / 2, target - _BAR / 2
            gap = (above, below) if target else (1 - _BAR / 2, _BAR / 2)
            lines.append([(span.start, gap[0]), (span.end, gap[1])])
            colours.append(_ASIDE if aside else _TRANSFER)
        thick = 0.7 if len(self._rows) <= 24 else 0.35
        self._axes.add_collection(LineCollection(lines, colors=colours, linewidths=thick, zorder=1))

    def draw_busy(self, labels: Sequence[Label]) -> None:
        """The share of the time that each row computes, at its right end."""
        busy = dict.fromkeys(self._rows, 0.0)
        for span in self._spans:
            if span.kind != "transfer":
                busy[span.source] += (span.end - span.start) / self._seconds
        place = self._axes.get_yaxis_transform()
        for share, row, label in zip(busy.values(), self._rows.values(), labels, strict=True):
            if label.text:
                text = "<1%" if 0 < share < 0.005 else f"{share:.0%}"
                self._axes.text(
                    _BUSY,
                    row,
                    text,
                    transform=place,
                    size=label.size,
                    color=GREY,
                    ha="right",
                    va="center",
                )
        self._axes.annotate(
            "busy",
            (_BUSY, -_BAR / 2),
            (0, 3),
            xycoords=place,
            textcoords="offset points",
            size=7,
            color=GREY,
            ha="right",
        )
