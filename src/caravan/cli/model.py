"""`caravan model`: fetch the samples, say where they are, and describe any GGUF file.

Paths, lists and JSON go to stdout alone; everything about the way there goes to stderr.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from caravan.cli.download import model_path, progress_bar
from caravan.cli.tables import print_table
from caravan.errors import ModelError
from caravan.models.cache import models_dir
from caravan.models.catalog import SAMPLES
from caravan.models.fake import ARCHITECTURES, TYPES, FakeModel
from caravan.models.fetch import cached, fetch, intact
from caravan.models.resolve import sample_named

if TYPE_CHECKING:
    from caravan.models.metadata import ModelInfo

_F = TypeVar("_F", bound=Callable[..., object])

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def command() -> None:
    """Fetch, list and describe model files."""


@command.command()
@click.argument("name")
def get(name: str) -> None:
    """Fetch a sample model, and print its path.

    It is checked; one that is here already is not fetched again, unless it is damaged.
    """
    sample = sample_named(name)
    path = cached(sample, models_dir())
    if path is not None and not intact(sample, path):
        click.echo(f"caravan: {path} is damaged, fetching it again", err=True)
        path.unlink(missing_ok=True)
    with progress_bar(name) as progress:
        click.echo(fetch(sample, models_dir(), progress))


@command.command()
@click.argument("name")
def path(name: str) -> None:
    """Print where a sample model is.

    Fails if it was not fetched yet.
    """
    found = cached(sample_named(name), models_dir())
    if found is None:
        raise ModelError(f"{name} is not in {models_dir()}; `caravan model get {name}` fetches it")
    click.echo(found)


@command.command()
@_as_json
def ls(as_json: bool) -> None:
    """List the sample models, and which of them are here."""
    rows = [
        {
            "name": sample.name,
            "about": sample.about,
            "licence": sample.licence,
            "size": sample.file_size,
            "path": None if here is None else str(here),
        }
        for sample in SAMPLES.values()
        for here in [cached(sample, models_dir())]
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = [
        (row["name"], _megabytes(row["size"]), row["licence"], row["about"], row["path"] or "-")
        for row in rows
    ]
    if sys.stdout.isatty():
        table.insert(0, ("NAME", "SIZE", "LICENCE", "ABOUT", "HERE"))
    print_table(table)


def _shape(name: str, about: str) -> Callable[[_F], _F]:
    """An option for a number of FakeModel, with its default."""
    default = FakeModel.__dataclass_fields__[name].default
    flag = f"--{name.replace('_', '-')}"
    return click.option(flag, name, type=int, default=default, show_default=True, help=about)


@command.command()
@click.option(
    "--arch",
    type=click.Choice(ARCHITECTURES),
    default="llama",
    show_default=True,
    help="Architecture.",
)
@_shape("layers", "Number of layers.")
@_shape("embd", "Length of an embedding.")
@_shape("heads", "Attention heads.")
@_shape("kv_heads", "Attention heads that keep keys and values.")
@_shape("ff", "Width of the feed-forward part.")
@_shape("vocab", "Tokens of the vocabulary.")
@_shape("ctx", "Context that the model is made for.")
@click.option(
    "--type",
    "type_",
    metavar="TYPE",
    default="Q4_0",
    show_default=True,
    help=f"Number format of the weights: {', '.join(TYPES)}.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The file to write.",
)
@click.option("--force", is_flag=True, help="Overwrite it if it is there.")
def fake(arch: str, type_: str, output: Path, force: bool, **shape: int) -> None:
    """Write the header of a GGUF file without its weights.

    It describes a model that is not there, and runs on simulated devices (caravan worker -d
    sim:...), and on no others.
    """
    FakeModel(arch=arch, type=type_.upper(), **shape).write(output, force)
    click.echo(output)


@command.command()
@click.argument("name_or_path", metavar="NAME|PATH")
@_as_json
def show(name_or_path: str, as_json: bool) -> None:
    """Print what a model file says about itself. A sample is fetched on first use."""
    from caravan.models.metadata import describe

    info = describe(model_path(name_or_path))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(info), indent=2))
    else:
        print_table(_rows(info))


def _rows(info: ModelInfo) -> list[tuple[str, str]]:
    rows: list[tuple[str, Any]] = [
        ("file", f"{Path(info.path).name}{_others(info.files)}"),
        ("name", info.name),
        ("architecture", info.architecture),
        ("parameters", _count(info.parameters)),
        ("file type", info.file_type),
        ("layers", info.layers),
        ("context", info.context),
        ("embedding", info.embedding),
        ("tensors", info.tensors),
        ("size", f"{_megabytes(info.size)}{', none of it here' if info.fake else ''}"),
        ("path", info.path),
    ]
    # one line a row, whatever a name has in it
    return [(label, "-" if value is None else _printable(value)) for label, value in rows]


def _others(files: int) -> str:
    return f" and {files - 1} more" if files > 1 else ""


def _printable(value: Any) -> str:
    return "".join(char if char.isprintable() else " " for char in str(value))


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def _megabytes(size: Any) -> str:
    return f"{size / 1e6:.1f} MB"
