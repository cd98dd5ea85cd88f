"""The model that `-m` names, fetched with a progress bar when it is a sample that is not here yet.

Every subcommand that takes a model calls `model_path`. The bar is drawn on stderr, and only on a
terminal; elsewhere one line says what is going on.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from caravan.models.fetch import Progress


def model_path(name_or_path: str | os.PathLike[str]) -> Path:
    """`models.resolve` for people: shows how far a download is. Raises what that raises, and
    ModelError for a file that is no model or not all of one, so that nothing is started for it."""
    from caravan.models.resolve import resolve
    from caravan.models.splits import parts

    with progress_bar(os.fspath(name_or_path)) as progress:
        path = resolve(name_or_path, progress=progress)
    parts(path)
    return path


@contextlib.contextmanager
def progress_bar(name: str) -> Iterator[Progress]:
    """A callback that shows the progress it is told; nothing appears before its first call."""
    if sys.stderr.isatty():
        with bar(name) as progress:
            yield progress
    else:
        yield _one_line(name)


@contextlib.contextmanager
def bar(name: str) -> Iterator[Progress]:
    """`progress_bar` that says nothing where there is no terminal."""
    if not sys.stderr.isatty():
        yield lambda step, done, total: None
        return
    with contextlib.ExitStack() as stack:
        bars: list[Progress] = []

        def progress(step: str, done: int, total: int) -> None:
            # rich takes 0.1 s to import: only pay for it when there is something to show.
            if not bars:
                bars.append(_start_bar(stack, name))
            bars[0](step, done, total)

        yield progress


def _one_line(name: str) -> Progress:
    told = False

    def progress(step: str, done: int, total: int) -> None:
        nonlocal told
        if not told:
            told = True
            print(f"caravan: fetching {name} ({total / 1e6:.0f} MB)", file=sys.stderr, flush=True)

    return progress


def _start_bar(stack: contextlib.ExitStack, name: str) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bars = stack.enter_context(Bars(*columns, console=Console(stderr=True)))
    tasks = {}

    def progress(step: str, done: int, total: int) -> None:
        if step not in tasks:
            tasks[step] = bars.add_task(f"{step} {name}", total=total)
        bars.update(tasks[step], completed=done)

    return progress
