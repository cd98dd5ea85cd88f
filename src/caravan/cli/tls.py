"""`caravan tls`: a small private CA, and the certificates of the machines that belong together.

The files that were written go to stdout, one a line; what is to be done with them to stderr.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from caravan.transport.authority import Wanted

_F = TypeVar("_F", bound=Callable[..., object])

_DIRECTORY = Path("caravan-tls")
_MOST_DAYS = 3650


def _days(function: _F) -> _F:
    return click.option(
        "--days",
        type=click.IntRange(1, _MOST_DAYS),
        default=730,
        show_default=True,
        metavar="N",
        help="How long the certificates are valid; the CA's own is for ten years.",
    )(function)


@click.group()
def command() -> None:
    """Make a private CA, and certificates for the machines that belong together."""


@command.command()
@click.argument("directory", metavar="[DIR]", type=click.Path(path_type=Path), default=_DIRECTORY)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Host name or address of a machine that gets a pair of its own, for a worker and for a"
    " head; may be given several times.  [default: one pair for workers, and one for heads]",
)
@_days
def init(directory: Path, hosts: Sequence[str], days: int) -> None:
    """Make a CA, and its certificates for workers and heads.

    They are written to DIR (caravan-tls). Each pair is NAME.pem and NAME-key.pem. Keys can be read
    by their owner alone, and no file is overwritten.
    """
    from caravan.transport import authority

    wanted = [_machine(host) for host in hosts] if hosts else authority.usual()
    _say(authority.init(directory, wanted, days))
    first, last = (wanted[at].name.replace(":", "_") for at in (0, -1))
    click.echo(
        "caravan: copy ca.pem and its own pair to each machine; ca-key.pem stays where it is\n"
        f"caravan: workers: caravan worker --tls-cert {first}.pem --tls-key {first}-key.pem"
        " --tls-ca ca.pem\n"
        f"caravan: heads: --tls-ca ca.pem --tls-cert {last}.pem --tls-key {last}-key.pem, or"
        " $CARAVAN_TLS_CA, $CARAVAN_TLS_CERT and $CARAVAN_TLS_KEY",
        err=True,
    )


@command.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=_DIRECTORY,
    show_default=True,
    metavar="DIR",
    help="Where the CA is.",
)
@click.option("--head", is_flag=True, help="For heads alone: no worker can be run with it.")
@_days
def add(names: Sequence[str], directory: Path, head: bool, days: int) -> None:
    """Make certificates for further machines.

    Each machine is known by a host name or address, which is also the name of its files.
    """
    from caravan.transport import authority

    _say(authority.add(directory, [_machine(name, head) for name in names], days))


def _machine(name: str, head: bool = False) -> Wanted:
    from caravan.transport.authority import Wanted

    return Wanted(name, (name,), head)


def _say(paths: Sequence[Any]) -> None:
    for path in paths:
        click.echo(path)
