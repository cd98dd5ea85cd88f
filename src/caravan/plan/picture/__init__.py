"""A plan as a picture: speed-up over the length of the prompt, and below it the best option's
pipeline, who computes what when.

`draw` lays out the two panels (`speedups`, `timeline`) and writes the file. matplotlib is imported
in this room only, and only once something is drawn.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from caravan.errors import UsageError
from caravan.plan.options import Plan
from caravan.plan.picture import canvas
from caravan.plan.picture.curves import Curves, curves, pipeline
from caravan.plan.picture.speedups import draw_speedups
from caravan.plan.picture.timeline import draw_timeline, row_labels
from caravan.plan.simulator import simulate_prompt
from caravan.trace.output import OutputFile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".png", ".svg")
# inches: above, between and below the panels; the upper one; beside each, for words
_TOP, _BETWEEN, _BOTTOM = 0.68, 0.98, 0.46
_UPPER = 2.35
_BESIDE_UPPER, _BESIDE_LOWER = 1.2, 0.55
_LEFT = 0.62  # at least
# of the lower panel, and of its rows: as high as is good to read, and as it must be
_LOWEST, _HIGHEST, _ROW, _THIN_ROW = 1.1, 5.8, 0.36, 0.12


def check_path(path: Path) -> None:
    """Raises UsageError where `draw` would for that path, before there is anything to draw."""
    _output(path).close()


def draw(plan: Plan, path: Path, n_prompt: int, *, model: str = "") -> None:
    """Write a picture of a plan, PNG or SVG by the suffix of the path, whole or not at all.

    Args:
        n_prompt: tokens of the prompt whose pipeline is shown.
        model: its name or description, for the title.

    Raises UsageError for another suffix, a place that cannot be written to, a prompt that the
    context has no room for, and a plan of which nothing fits; CaravanError when writing fails.
    """
    if not 0 < n_prompt <= plan.setting.n_ctx:
        n_ctx = plan.setting.n_ctx
        raise UsageError(f"cannot draw a prompt of {n_prompt} tokens in a context of {n_ctx}")
    output = _output(path)
    try:
        found = curves(plan, n_prompt)
        if found is None:
            raise UsageError("nothing to draw: no split of the model fits into the devices' memory")
        with canvas.defaults():
            picture = _rendered(compose(plan, found, n_prompt, model), path.suffix.lower()[1:])

        def put(out: TextIO) -> None:
            out.buffer.write(picture)

        output.write(put)
    finally:
        output.close()


def _output(path: Path) -> OutputFile:
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"cannot draw {path}: its name must end in .png or .svg")
    return OutputFile(path)


def compose(plan: Plan, found: Curves, n_prompt: int, model: str = "") -> Figure:
    """Both panels and the title. To be called with `canvas.defaults`, and saved with them too."""
    from matplotlib.figure import Figure

    rows = len(found.shown.devices) + 1
    lower = max(rows * _THIN_ROW, min(max(rows * _ROW, _LOWEST), _HIGHEST))
    height = _TOP + _UPPER + _BETWEEN + lower + _BOTTOM
    figure = Figure(figsize=(canvas.WIDTH, height), dpi=canvas.DPI, facecolor="white")
    labels = row_labels(plan, found.shown, lower * canvas.INCH / rows)
    widths = [canvas.text_width(figure, label.text, label.size) for label in labels]
    left = max(_LEFT, canvas.MARGIN * 2 + max(widths))
    above = canvas.Panel(figure, left, _BOTTOM + lower + _BETWEEN, _BESIDE_UPPER, _UPPER)
    below = canvas.Panel(figure, left, _BOTTOM, _BESIDE_LOWER, lower)
    timeline = simulate_prompt(pipeline(plan, found.shown), n_prompt, record=True)
    _title(figure, plan, found, model)
    draw_speedups(above, plan, found, n_prompt)
    draw_timeline(below, plan, found, n_prompt, timeline, labels)
    return figure


def _rendered(figure: Figure, kind: str) -> bytes:
    out = io.BytesIO()
    # no date: the same picture is the same file
    metadata: dict[str, Any] | None = {"Date": None} if kind == "svg" else None
    figure.savefig(out, format=kind, metadata=metadata)
    return out.getvalue()


def _title(figure: Figure, plan: Plan, found: Curves, model: str) -> None:
    used, there = len(found.shown.devices), len(plan.names)
    devices = f"{used} of {there} devices" if used < there else canvas.devices(there)
    place = 1 - 0.08 / figure.get_figheight()
    text = f"{canvas.short(model, 60) or 'The model'} on {devices}"
    canvas.write_line(figure, place, text, 11, va="top", weight="bold")
