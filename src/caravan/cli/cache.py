"""`caravan cache`: what weights workers keep on this machine; removing and checking them.

Lists and JSON go to stdout, complaints about single files to stderr. The work is `worker/upkeep`'s.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from caravan.cli.ages import Age
from caravan.cli.tables import print_table
from caravan.errors import UsageError
from caravan.models.cache import digests_dir, weights_dir

if TYPE_CHECKING:
    from caravan.worker.store import Entry, Store

_DIGITS = 16

_directory = click.option(
    "-c",
    "--cache",
    "directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    default=None,
    help="The worker's --cache. [default: weights in Caravan's cache directory]",
)


@click.group()
def command() -> None:
    """List, remove and check the weights that workers keep on this machine."""


@command.command()
@_directory
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(directory: Path | None, as_json: bool) -> None:
    """List the files, those first that were not used for longest."""
    from caravan.models.sidecar import sidecars
    from caravan.worker import upkeep

    store = _store(directory)
    found = upkeep.entries(store)
    files = len(sidecars(digests_dir()))
    if as_json:
        _print_json(store, found, files)
    elif sys.stdout.isatty():
        heading = ("DIGEST", "SIZE", "LAST USED", "KIND")
        rows = [
            (entry.digest[:_DIGITS], _size(entry.size), _when(entry.mtime), upkeep.kind(entry))
            for entry in found
        ]
        if rows:
            print_table([heading, *rows])
        click.echo(f"{_sum(found)} in {store.directory}")
        click.echo(f"digests of {_count(files, 'model file')} in {digests_dir()}")
    else:
        print_table([(e.digest, e.size, _when(e.mtime), upkeep.kind(e)) for e in found])


@command.command()
@_directory
@click.argument("digests", metavar="[DIGEST]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All weights.")
@click.option(
    "--older-than", type=Age(), metavar="AGE", help="What was not used for so long, such as 30d."
)
@click.option(
    "--digests",
    "known",
    is_flag=True,
    help="Not weights, but the digests of model files that were computed here.",
)
def rm(
    directory: Path | None,
    digests: Sequence[str],
    everything: bool,
    older_than: float | None,
    known: bool,
) -> int:
    """Remove files, and say how much that freed.

    Which ones: those that are named, each by its digest or the beginning of it, or those that an
    option says. If a name fits no file, or several, nothing is removed.
    """
    from caravan.worker import upkeep

    if sum((bool(digests), everything, older_than is not None, known)) != 1:
        raise UsageError("name digests, or one of --all, --older-than and --digests")
    if known:
        return _forget()
    store = _store(directory)
    found = upkeep.entries(store)
    if digests:
        found = upkeep.named(found, digests)
    elif older_than is not None:
        before = time.time() - older_than
        found = [entry for entry in found if entry.mtime < before]
    else:
        store.sweep()
    removed = []
    for entry in found:
        why = upkeep.remove(store, entry)
        if why:
            click.echo(f"caravan: {entry.path} {why}", err=True)
        else:
            removed.append(entry)
    click.echo(f"removed {_sum(removed)}")
    return 1 if len(removed) < len(found) else 0


@command.command()
@_directory
def verify(directory: Path | None) -> int:
    """Read all files, and remove damaged ones.

    The exit code is 1 if there were any.
    """
    from caravan.cli.download import bar
    from caravan.worker import upkeep

    store = _store(directory)
    found = upkeep.entries(store)
    store.sweep()
    total = sum(entry.size for entry in found)
    done = wrong = 0
    with bar(_count(len(found), "file")) as progress:
        for entry in found:
            progress("check", done, total)
            told = upkeep.verify(store, entry)
            if told:
                wrong += 1
                click.echo(f"caravan: {entry.path} {told}", err=True)
            done += entry.size
        if total:
            progress("check", total, total)
    click.echo(f"checked {_sum(found)}: {f'{wrong} wrong' if wrong else 'all as they should be'}")
    return 1 if wrong else 0


def _store(directory: Path | None) -> Store:
    from caravan.worker.store import Store

    return Store(directory or weights_dir())


def _forget() -> int:
    from caravan.models.sidecar import sidecars

    removed, status = 0, 0
    for path in sidecars(digests_dir()):
        try:
            path.unlink(missing_ok=True)
            removed += 1
        except OSError as exc:
            click.echo(f"caravan: {path} cannot be removed: {exc.strerror or exc}", err=True)
            status = 1
    click.echo(f"removed the digests of {_count(removed, 'model file')}")
    return status


def _print_json(store: Store, found: Sequence[Entry], files: int) -> None:
    from caravan.worker import upkeep

    content = {
        "directory": str(store.directory),
        "size": sum(entry.size for entry in found),
        "entries": [
            {
                "digest": entry.digest,
                "size": entry.size,
                "last_used": entry.mtime,
                "kind": upkeep.kind(entry),
                "path": str(entry.path),
            }
            for entry in found
        ],
        "digests": {"directory": str(digests_dir()), "model_files": files},
    }
    click.echo(json.dumps(content, indent=2))


def _sum(found: Sequence[Entry]) -> str:
    return f"{_count(len(found), 'file')}, {_size(sum(entry.size for entry in found))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(size: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def _when(mtime: float) -> str:
    try:
        return datetime.fromtimestamp(mtime).isoformat(" ", "minutes")
    except (ValueError, OverflowError, OSError):
        # a clock that was wrong when the file was used
        return "-"
