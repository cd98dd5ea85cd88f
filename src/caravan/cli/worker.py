"""`caravan worker`: lend this machine's devices to heads; the work-alike of llama.cpp's rpc-server.

Parses, checks, and runs the supervisor; imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from caravan.cli.seconds import Seconds
from caravan.errors import WorkerStartError

_PROTOCOLS = {"auto": 0, "7": 7, "8": 8}


@click.command("worker", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-t",
    "--threads",
    type=click.IntRange(1, 512),
    default=None,
    help="Compute threads of CPU devices. [default: half of the hardware's]",
)
@click.option(
    "-d",
    "--device",
    "devices",
    default="",
    metavar="DEV[:THREADS],...",
    help="Devices to lend, such as CUDA0 or CPU:1,CPU:1. sim:GFLOPS=100,GBPS=50[,GIB=24][,US=20] "
    "is a device that only takes the time that computing would. [default: all GPUs, else the CPU]",
)
@click.option(
    "-H", "--host", default="127.0.0.1", show_default=True, help="Host name, address or unix:PATH."
)
@click.option(
    "-p",
    "--port",
    type=click.IntRange(0, 65535),
    default=50052,
    show_default=True,
    help="Port; 0 picks a free one.",
)
@click.option(
    "-c",
    "--cache",
    is_flag=True,
    help="Keep the big weights of llama.cpp's heads for the next time, in rpc-server's directory: "
    "$LLAMA_CACHE/rpc, else llama.cpp/rpc in the user's cache.",
)
@click.option(
    "--protocol",
    type=click.Choice(list(_PROTOCOLS)),
    default="auto",
    show_default=True,
    help="Version of llama.cpp's RPC to announce.",
)
@click.option(
    "--timeout",
    type=Seconds(),
    default=10.0,
    show_default=True,
    help="Seconds that a client has to introduce itself.",
)
@click.option(
    "--peer-address",
    default="",
    metavar="HOST[:PORT]",
    help="Where other workers reach this one, if not where heads do (NAT, a second network).",
)
@click.option("--no-extension", is_flag=True, hidden=True)
@click.option("--parent-fd", type=int, default=-1, hidden=True)
@click.option("--own-directory", default="", hidden=True)
def command(
    threads: int | None,
    devices: str,
    host: str,
    port: int,
    cache: bool,
    protocol: str,
    timeout: float,
    peer_address: str,
    no_extension: bool,
    parent_fd: int,
    own_directory: str,
) -> None:
    """Lend this machine's devices to heads.

    Prints `worker ready on HOST:PORT` once it accepts connections, and runs until it is told to
    stop. Never expose it to an open network: whoever can connect can use the devices.
    """
    from caravan.transport.endpoint import Endpoint
    from caravan.worker import devices as worker_devices
    from caravan.worker.listener import is_loopback
    from caravan.worker.supervisor import Settings, Supervisor

    if devices:
        worker_devices.parse(devices)
    if peer_address:
        Endpoint.parse(peer_address)
    if not is_loopback(host) and _is_known(host):
        _warn(host)
    settings = Settings(
        host=host,
        port=port,
        devices=devices,
        threads=threads or worker_devices.default_threads(),
        protocol=_PROTOCOLS[protocol],
        extension=not no_extension,
        timeout=timeout,
        parent_fd=parent_fd,
        peer_address=peer_address,
        cache=_made(weights_dir()) if cache else "",
    )
    with _removed(own_directory):
        sys.exit(Supervisor(settings).run())


@contextlib.contextmanager
def _removed(directory: str) -> Iterator[None]:
    """Take away the directory of the worker's socket, if it is a private one, when it ends."""
    try:
        yield
    finally:
        if directory:
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def weights_dir() -> Path:
    """Where rpc-server keeps weights. Raises WorkerStartError if there is no home directory."""
    own = os.environ.get("LLAMA_CACHE")
    try:
        return (Path(own) if own else _platform_cache() / "llama.cpp") / "rpc"
    except RuntimeError as exc:
        raise WorkerStartError("no home directory to keep weights in: set LLAMA_CACHE") from exc


def _platform_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or "~/AppData/Local").expanduser()
    if sys.platform == "darwin":
        return Path("~/Library/Caches").expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def _made(directory: Path) -> str:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise WorkerStartError(
            f"cannot create the cache directory {directory}: {exc.strerror or exc}"
        ) from exc
    return str(directory.absolute())


def _is_known(host: str) -> bool:
    """One that is not fails a moment later, in one line."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False


def _warn(host: str) -> None:
    rule = "!" * 59
    click.echo(rule, err=True)
    click.echo(f"WARNING: Host ('{host}') is != '127.0.0.1'", err=True)
    click.echo("         Never expose the worker to an open network!", err=True)
    click.echo("         This is an experimental feature and is not secure!", err=True)
    click.echo(rule, err=True)
