"""`Streamed`: text on stdout as it comes, beside lines on stderr that go to the same screen."""

from __future__ import annotations

import re
import sys

import click

# control characters, and those that turn the direction of what follows
_STEERING = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Streamed:
    """See the module.

    Args:
        clean: leave out what would steer a terminal; names of files and the like come from here,
            but the text of a model may be anybody's.
    """

    def __init__(self, *, clean: bool = False) -> None:
        self._clean = clean
        self._begun = False

    def write(self, text: str) -> None:
        if self._clean:
            text = _STEERING.sub("", text)
        if not text:
            return
        self._begun = not text.endswith("\n")
        sys.stdout.write(text)
        sys.stdout.flush()

    def break_line(self) -> None:
        """After the ^C that a terminal shows."""
        click.echo()
        self._begun = False

    def end_line(self) -> None:
        """On a screen, what is told next begins a new line."""
        if self._begun and sys.stdout.isatty():
            click.echo()
        self._begun = False
