"""`--trace`: a timeline of a whole command. Called by `run` and `bench`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click


@contextmanager
def traced(path: Path | None) -> Iterator[None]:
    """Record a timeline until the context is left; without a path there is none.

    Raises UsageError at once if it cannot be written. After a run that went well, what the file
    does not show is told on stderr.
    """
    if path is None:
        yield
        return
    from caravan.backend.timeline import Timeline

    with Timeline(path) as timeline:
        yield
    for note in timeline.notes:
        click.echo(f"trace: {note}", err=True)
