"""`--trace`: a timeline of a whole command. Called by `run` and `bench`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from caravan.errors import UsageError


@contextmanager
def traced(path: Path | None, models: Iterable[str]) -> Iterator[None]:
    """Record a timeline until the context is left; without a path there is none.

    Raises UsageError at once if it cannot be written, or would take the place of one of `models`.
    After a run that went well, what the file does not show is told on stderr.
    """
    if path is None:
        yield
        return
    if path.is_file() and any(Path(m).is_file() and path.samefile(m) for m in models):
        raise UsageError(f"--trace {path} would overwrite the model")
    from caravan.backend.timeline import Timeline

    with Timeline(path) as timeline:
        yield
    for note in timeline.notes:
        click.echo(f"trace: {note}", err=True)
