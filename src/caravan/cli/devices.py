"""`caravan devices`: what there is to compute on, how fast, and how copies between devices go."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from caravan.cli.endpoints import device_list, workers_of
from caravan.cli.main import dashed
from caravan.cli.seconds import Seconds
from caravan.cli.tls_options import HEAD, tls_options
from caravan.cli.tokens import token_option

if TYPE_CHECKING:
    from caravan.llm.devices import EngineDevice
    from caravan.llm.survey import CopyFacts, DeviceFacts, Survey

_MIB = 1 << 20
_HEADINGS = ("NAME", "KIND", "THREADS", "FREE MiB", "TOTAL MiB", "ENGINE", "PROTOCOL")
_RIGHT = {2, 3, 4}
_MEASURED = ("NAME", "GFLOPS", "GB/s", "ROUND TRIP ms", "TO IT MB/s")


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
@click.option(
    "--measure/--no-measure",
    default=True,
    show_default=True,
    help="Measure speeds and links; the devices should have nothing else to do.",
)
@click.option("--fresh", is_flag=True, help="Measure also the devices whose speeds are known.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(**options: Any) -> None:
    """List the devices that a model can be put on, how fast they are, and how copies between any
    two of them go.

    Those of the workers, then this machine's own, the CPU last.
    """
    names = device_list(options["device"])
    workers = workers_of(options)

    from caravan.llm.opening import open_devices
    from caravan.llm.survey import survey

    with open_devices(workers, names) as devices:
        found = survey(devices, with_cpu=names in ([], ["none"]))
        if options["measure"]:
            found = _measured(found, devices, options["fresh"])
    if options["as_json"]:
        click.echo(json.dumps(asdict(found), indent=2))
    elif sys.stdout.isatty():
        click.echo("\n".join(_told(found, shutil.get_terminal_size().columns)))
    else:
        click.echo("\n".join(_columns(found)))


def _measured(found: Survey, devices: Sequence[EngineDevice], fresh: bool) -> Survey:
    """With what can be measured: of the workers' devices, and of the links to and between them."""
    from caravan.backend import RemoteDevice
    from caravan.plan.measure import measure_cluster

    steps = itertools.count()

    def say(step: str) -> None:
        # on several threads
        if not next(steps):
            click.echo("caravan: measuring, which takes a second for each device", err=True)

    remote = [device for device in devices if isinstance(device, RemoteDevice)]
    cluster = measure_cluster(remote, fresh=fresh, on_step=say)
    numbers = {device.name: number for number, device in enumerate(remote)}

    def of_device(facts: DeviceFacts) -> DeviceFacts:
        if facts.name not in numbers or facts.endpoint is None:
            return facts
        number = numbers[facts.name]
        profile, link = cluster.devices[number], cluster.to_head[number]
        return replace(
            facts,
            host=profile.host,
            gflops=profile.gflops or None,
            gbps=profile.gbps or None,
            graph_ns=round(profile.graph * 1e9),
            turn_ns=round(profile.turn * 1e9),
            check_ns=round(profile.check_graph * 1e9),
            check_node_ns=round(profile.check * 1e9),
            round_trip_ns=round(link.seconds * 2e9),
            bytes_per_second=_finite(link.rate),
        )

    def of_copy(facts: CopyFacts) -> CopyFacts:
        ends = numbers.get(facts.source, -1), numbers.get(facts.target, -1)
        link = cluster.between.get(ends)
        if link is None:
            return facts
        latency = round(link.seconds * 1e9)
        return replace(facts, latency_ns=latency, bytes_per_second=_finite(link.rate))

    return replace(
        found, devices=[*map(of_device, found.devices)], copies=[*map(of_copy, found.copies)]
    )


def _finite(rate: float) -> float | None:
    return rate if math.isfinite(rate) else None


def _told(found: Survey, width: int) -> list[str]:
    """For a terminal so many characters wide."""
    rows = [_HEADINGS, *(_cells(device) for device in found.devices)]
    heading, *lines = _aligned(rows, _RIGHT)
    told = [heading]
    for line, device in zip(lines, found.devices, strict=True):
        told += [line, *_about(device, width)]
    told += _speeds(found)
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


def _speeds(found: Survey) -> list[str]:
    """A table of what was measured, if anything was."""
    rows = [
        (
            device.name,
            *(
                "-" if value is None else f"{value:.{digits}f}"
                for value, digits in (
                    (device.gflops, 1),
                    (device.gbps, 1),
                    (_scaled(device.round_trip_ns, 1e6), 2),
                    (_scaled(device.bytes_per_second, 1e6), 0),
                )
            ),
        )
        for device in found.devices
    ]
    if not any(cell != "-" for row in rows for cell in row[1:]):
        return []
    return ["", *_aligned([_MEASURED, *rows], {1, 2, 3, 4})]


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


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
    parts = [{"direct": "direct", "within": "within the worker"}.get(copy.way, copy.way)]
    if copy.way == "direct" and copy.round_trip_ns is not None:
        parts.append(f"round trip {copy.round_trip_ns / 1e6:.2f} ms")
    if copy.bytes_per_second is not None:
        parts.append(f"{copy.bytes_per_second / 1e6:.0f} MB/s")
    told = ", ".join(parts)
    return f"{told}: {copy.reason}" if copy.reason else told


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
            d.host,
            d.gflops,
            d.gbps,
            d.graph_ns,
            d.turn_ns,
            d.check_ns,
            d.check_node_ns,
            d.round_trip_ns,
            d.bytes_per_second,
        )
        for d in found.devices
    ]
    copies = [
        (
            c.source,
            c.target,
            c.way,
            c.round_trip_ns,
            c.reason or None,
            c.latency_ns,
            c.bytes_per_second,
        )
        for c in found.copies
    ]
    lines = ["\t".join("-" if cell is None else str(cell) for cell in row) for row in devices]
    more = ["\t".join("-" if cell is None else str(cell) for cell in row) for row in copies]
    return [*lines, *([""] if more else []), *more]
