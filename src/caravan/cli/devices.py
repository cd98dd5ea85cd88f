"""`caravan devices`: what there is to compute on, and how copies between any two devices go."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from caravan.cli.endpoints import device_list, workers_of
from caravan.cli.main import dashed
from caravan.cli.seconds import Seconds
from caravan.cli.tls_options import HEAD, tls_options
from caravan.cli.tokens import token_option

if TYPE_CHECKING:
    from caravan.llm.survey import CopyFacts, DeviceFacts, Survey

_MIB = 1 << 20
_HEADINGS = ("NAME", "KIND", "THREADS", "FREE MiB", "TOTAL MiB", "ENGINE", "PROTOCOL")
_RIGHT = {2, 3, 4}


@click.command(
    "devices",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": dashed,
        "max_content_width": 100,
    },
)
@click.option(
    "-rpc",
    "--rpc",
    multiple=True,
    metavar="HOST:PORT,…",
    help="Workers to ask.  [default: $CARAVAN_RPC or $LLAMA_ARG_RPC]",
)
@click.option(
    "--local-workers",
    type=click.IntRange(0, 16),
    default=0,
    metavar="N",
    help="Start N workers on this machine, with -t threads each.",
)
@click.option(
    "-dev",
    "--device",
    default="",
    metavar="D0,D1,…",
    help="These only, in this order; local:CPU:1 is a worker with one thread, started here.",
)
@click.option(
    "-t",
    "--threads",
    type=click.IntRange(0, 512),
    default=0,
    metavar="N",
    help="Threads of each worker that is started; 0: a share of the cores.",
)
@token_option("Token to show to workers that ask for one.  [default: $CARAVAN_TOKEN]")
@tls_options(**HEAD)
@click.option(
    "--no-direct-copies", is_flag=True, help="Let all copies between workers pass this process."
)
@click.option(
    "--timeout",
    type=Seconds(),
    default=30.0,
    show_default=True,
    help="How long a worker may owe an answer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(**options: Any) -> None:
    """List the devices that a model can be put on, and how copies between any two of them go.

    Those of the workers, then this machine's own, the CPU last.
    """
    names = device_list(options["device"])
    workers = workers_of(options)

    from caravan.llm.opening import open_devices
    from caravan.llm.survey import survey

    with open_devices(workers, names) as devices:
        found = survey(devices, with_cpu=names in ([], ["none"]))
    if options["as_json"]:
        click.echo(json.dumps(asdict(found), indent=2))
    elif sys.stdout.isatty():
        click.echo("\n".join(_told(found, shutil.get_terminal_size().columns)))
    else:
        click.echo("\n".join(_columns(found)))


def _told(found: Survey, width: int) -> list[str]:
    """For a terminal so many characters wide."""
    rows = [_HEADINGS, *(_cells(device) for device in found.devices)]
    heading, *lines = _aligned(rows, _RIGHT)
    told = [heading]
    for line, device in zip(lines, found.devices, strict=True):
        told += [line, *_about(device, width)]
    if not found.copies:
        return told
    rows = [("FROM", "TO", "COPIES"), *((c.source, c.target, "") for c in found.copies)]
    heading, *lines = _aligned(rows, set())
    start = heading.index("COPIES")
    told += ["", heading]
    for line, copy in zip(lines, found.copies, strict=True):
        wrap = textwrap.TextWrapper(
            max(width, start + 20), initial_indent=line.ljust(start), subsequent_indent=" " * start
        )
        wrap.break_on_hyphens = wrap.break_long_words = False
        told += wrap.wrap(_way(copy))
    return told


def _cells(device: DeviceFacts) -> tuple[str, ...]:
    values = (
        device.name,
        device.kind,
        device.threads,
        device.memory_free // _MIB,
        device.memory_total // _MIB,
        device.engine,
        device.protocol and _protocol(device),
    )
    return tuple("-" if value is None else str(value) for value in values)


def _protocol(device: DeviceFacts) -> str:
    if device.extension is None:
        return f"RPC {device.protocol}"
    return f"extension {device.extension}"


def _about(device: DeviceFacts, width: int) -> list[str]:
    """What the device is and where, on one line where there is room."""
    where = "this process" if device.endpoint is None else f"at {device.endpoint}"
    if device.description in ("", device.endpoint):
        return [f"  {where}"]
    if device.endpoint is None:
        return [f"  {device.description}, in {where}"]
    line = f"  {device.description} {where}"
    return [line] if len(line) <= width else [f"  {device.description}", f"  {where}"]


def _way(copy: CopyFacts) -> str:
    if copy.way == "direct" and copy.round_trip_ns is not None:
        return f"direct, round trip {copy.round_trip_ns / 1e6:.2f} ms"
    if copy.way == "within":
        return "within the worker"
    return f"{copy.way}: {copy.reason}" if copy.reason else copy.way


def _aligned(rows: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _columns(found: Survey) -> list[str]:
    """For a program: a line for each device, an empty one, a line for each pair; tabs between."""
    devices = [
        (
            d.name,
            d.endpoint,
            d.kind,
            d.description,
            d.engine,
            d.threads,
            d.memory_free,
            d.memory_total,
            d.protocol,
            d.extension,
        )
        for d in found.devices
    ]
    copies = [(c.source, c.target, c.way, c.round_trip_ns, c.reason or None) for c in found.copies]
    lines = ["\t".join("-" if cell is None else str(cell) for cell in row) for row in devices]
    more = ["\t".join("-" if cell is None else str(cell) for cell in row) for row in copies]
    return [*lines, *([""] if more else []), *more]
