"""Tables on stdout: for eyes on a terminal, for `cut` and `awk` elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click


def print_table(rows: Sequence[Sequence[Any]]) -> None:
    """A line a row: aligned on a terminal, elsewhere plain columns with tabs between them.

    A line that is too long is the terminal's to wrap: a path broken here could not be copied.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for row in texts:
            click.echo("\t".join(row))
        return
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
