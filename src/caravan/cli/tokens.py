"""The token of a command: `--token-file`, else the environment; `caravan token` makes one.

Called by all commands that have the option. A token is never an argument: everybody on the machine
can read those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from caravan.trust.token import Token, from_environment, read

_F = TypeVar("_F", bound=Callable[..., Any])


def token_option(text: str, metavar: str = "FILE") -> Callable[[_F], _F]:
    """`--token-file`, with this help."""
    return click.option("--token-file", default="", metavar=metavar, help=text)


def token_of(file: str) -> Token | None:
    """The token in the file, or without one that of the environment; raises UsageError."""
    if not file:
        return from_environment()
    return read(file, lambda text: click.echo(f"caravan: note: {text}", err=True))
