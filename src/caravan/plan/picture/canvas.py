"""What both panels are drawn with: style, colours, places in inches, words and their widths.

Figures are our own, not pyplot's, so that nothing depends on a display or on what the caller has
set up. Knows no plan.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from caravan.models import cache_dir

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCH = 72  # points
WIDTH, DPI = 7.4, 200  # of a picture: inches, dots an inch
MARGIN = 0.1  # inches, left of titles
# Okabe and Ito's palette, that everybody can tell apart: dark and light ones in turns, so that
# neighbours differ in grey too
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#F0E442", "#D55E00", "#56B4E9")
DARK = COLOURS[::2]
INK, GREY, PALE = "#222222", "#666666", "#F3F3F3"
_FONT = "DejaVu Sans"  # comes with matplotlib
_STYLE = {
    "font.family": _FONT,
    "font.size": 8,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "svg.hashsalt": "caravan",
}
_LONGEST_NAME = 28  # characters


@contextlib.contextmanager
def defaults() -> Iterator[None]:
    """matplotlib with its defaults and our style, whatever files of the user's say.

    Its list of fonts is kept in our cache. What it logs on the way (that it looks for fonts, or has
    no place to keep their list) is of no use to those who want a picture.
    """
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with _own_directory():
            import matplotlib
            import matplotlib.font_manager
        style: dict[Any, Any] = {**matplotlib.rcParamsDefault, **_STYLE}
        del style["backend"]
        with matplotlib.rc_context(style):
            yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _own_directory() -> Iterator[None]:
    """matplotlib reads this variable once, as it is imported; nobody else shall see ours."""
    name = "MPLCONFIGDIR"
    if name in os.environ or "matplotlib" in sys.modules:
        yield
        return
    os.environ[name] = str(cache_dir() / "matplotlib")
    try:
        yield
    finally:
        del os.environ[name]


class Panel:
    """One part of a picture.

    Args:
        left, bottom: the place of its axes in inches.
        right: inches that are left free beside it.
        height: inches.

    Attributes:
        axes: without a frame above and at the right.
        wide, high: of the axes, in points.
    """

    def __init__(
        self, figure: Figure, left: float, bottom: float, right: float, height: float
    ) -> None:
        total, width = figure.get_figheight(), WIDTH - left - right
        self._figure = figure
        self._top = (bottom + height) / total
        self.wide, self.high = width * INCH, height * INCH
        self.axes: Axes = figure.add_axes(
            (left / WIDTH, bottom / total, width / WIDTH, height / total)
        )
        self.axes.spines[["top", "right"]].set_visible(False)

    def title(self, title: str, note: str) -> None:
        """At the picture's left end, above the axes: a line, and a smaller one below it."""
        inch = 1 / self._figure.get_figheight()
        write_line(self._figure, self._top + 0.24 * inch, title, 9, va="bottom")
        write_line(self._figure, self._top + 0.10 * inch, note, 7, va="bottom", color=GREY)


def write_line(figure: Figure, place: float, text: str, size: float, **style: Any) -> None:
    """At the left end of a picture; smaller where it would not fit into it.

    Args:
        place: the height in it, from 0 to 1.
    """
    line = figure.text(MARGIN / WIDTH, place, text, size=size, **style)
    width = line.get_window_extent().width / DPI
    line.set_fontsize(size * min(1, (WIDTH - 2 * MARGIN) / width))


def text_width(figure: Figure, text: str, size: float) -> float:
    """Inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    probe = Text(text=text, fontsize=size, figure=figure)
    canvas: Any = FigureCanvasAgg(figure)
    return float(probe.get_window_extent(canvas.get_renderer()).width) / DPI


def short(text: str, most: int = _LONGEST_NAME) -> str:
    """A name that may be long or strange. Both ends of it tell more than the middle."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont(_FONT))
    known = "".join(c if c.isprintable() and font.get_char_index(ord(c)) else "?" for c in text)
    if len(known) <= most:
        return known
    tail = (most - 1) // 2
    return f"{known[: most - 1 - tail]}…{known[-tail:]}"


def devices(count: int) -> str:
    """So many, in words."""
    return f"{count} devices" if count > 1 else "one device"


def duration(seconds: float) -> str:
    """In three digits: `1.28 s`, `718 ms`."""
    value, unit = (seconds, "s") if seconds >= 0.9995 else (seconds * 1e3, "ms")
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f} {unit}"
