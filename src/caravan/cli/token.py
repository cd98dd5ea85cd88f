"""`caravan token`: make the secret that a worker and its heads share."""

from __future__ import annotations

import contextlib
import os
import tempfile

import click

from caravan.errors import CaravanError, UsageError
from caravan.trust.token import new as new_token

_MODE = 0o600


@click.group()
def command() -> None:
    """Make the token that a worker asks for, and heads show."""


@command.command("new")
@click.option(
    "-o",
    "--output",
    default="",
    metavar="FILE",
    help="Write it there, for this user's eyes only, instead of printing it.",
)
@click.option("--force", is_flag=True, help="Write over a file that is there already.")
def new(output: str, force: bool) -> None:
    """Make a token of 256 random bits. Every machine gets the same one."""
    if not output:
        if force:
            raise UsageError("--force is about the file of -o, and none is given")
        click.echo(new_token())
        return
    try:
        _write(output, f"{new_token()}\n".encode(), force)
    except FileExistsError:
        raise UsageError(f"{output} is there already; --force writes over it") from None
    except OSError as exc:
        raise CaravanError(f"cannot write {output}: {exc.strerror or exc}") from exc
    click.echo(f"caravan: wrote {output}", err=True)


def _write(path: str, data: bytes, force: bool) -> None:
    """The whole file under its name or none of it, at no time for others to read."""
    if force:
        descriptor, place = tempfile.mkstemp(prefix=".token-", dir=os.path.dirname(path) or ".")
    else:
        descriptor, place = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE), path
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), _MODE)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if force:
            os.replace(place, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(place)
        raise
