"""`caravan worker`: lend this machine's devices to heads; the work-alike of llama.cpp's rpc-server.

Parses, checks, and runs the supervisor; imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from caravan.cli.seconds import Seconds
from caravan.cli.sizes import Size, Sizes
from caravan.cli.tls_options import given, tls_options
from caravan.cli.tokens import token_of, token_option
from caravan.errors import UsageError, WorkerStartError
from caravan.models.cache import weights_dir
from caravan.transport.certificates import Tls, client_context, server_context
from caravan.trust.token import VARIABLE

_DRAIN_SECONDS = 30.0
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
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[DIR]",
    help="Where weights that were sent are kept for the next time. "
    "[default: weights in Caravan's cache directory]",
)
@click.option("--no-cache", is_flag=True, help="Keep no weights, and look for none.")
@click.option(
    "--cache-size",
    type=Size(),
    default=None,
    metavar="SIZE",
    help="How much may be kept, such as 50GiB; what was not used for longest goes. "
    "[default: what is kept already and half of what is free on the disk]",
)
@click.option(
    "--model-dir",
    "model_dirs",
    type=click.Path(exists=True, file_okay=False),
    multiple=True,
    metavar="DIR",
    help="Where this machine has GGUF files of its own, at any depth: of a model that is loaded, "
    "what is here need not be sent. May be given several times.",
)
@click.option(
    "--max-memory",
    type=Sizes(),
    default=(),
    metavar="SIZE[,SIZE...]",
    help="Most memory that all heads together get of each device, such as 8GiB, announced as the "
    "device's own; several: one for each device. [default: no limit]",
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
    "--idle-timeout",
    type=Seconds(0),
    default=120.0,
    show_default=True,
    help="Seconds without a word after which a head counts as gone, and what it held is freed: for "
    "pulled cables and frozen machines. A head shows that it is there also while it has nothing to "
    "do. 0: never.",
)
@click.option(
    "--drain-seconds",
    type=Seconds(0),
    default=None,
    help="Seconds that the sessions which are there may go on for after SIGTERM; new ones are "
    "refused meanwhile. [default: 30]",
)
@click.option(
    "--peer-address",
    default="",
    metavar="HOST[:PORT]",
    help="Where other workers reach this one, if not where heads do (NAT, a second network).",
)
@token_option(
    "Token that heads and other workers have to know; the one by which this worker comes to others."
    " [default: $CARAVAN_TOKEN]"
)
@tls_options(
    cert="Certificate of this worker, as caravan tls makes it: all but llama.cpp's programs go on"
    " in TLS.",
    key="Its private key.",
    ca="CA whose certificates heads and other workers have to show, and this worker believes.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Let everybody in: start without a token even where other machines can connect.",
)
@click.option(
    "--allow-llama-cpp",
    is_flag=True,
    help="Let llama.cpp's programs, which cannot show a token, come from other machines, too.",
)
@click.option("--no-extension", is_flag=True, hidden=True)
@click.option("--parent-fd", type=int, default=-1, hidden=True)
@click.option("--own-directory", default="", hidden=True)
def command(
    threads: int | None,
    devices: str,
    host: str,
    port: int,
    cache: str | None,
    no_cache: bool,
    cache_size: int | None,
    model_dirs: tuple[str, ...],
    max_memory: tuple[int, ...],
    protocol: str,
    timeout: float,
    idle_timeout: float,
    drain_seconds: float | None,
    peer_address: str,
    token_file: str,
    tls_ca: str,
    tls_cert: str,
    tls_key: str,
    insecure: bool,
    allow_llama_cpp: bool,
    no_extension: bool,
    parent_fd: int,
    own_directory: str,
) -> None:
    """Lend this machine's devices to heads.

    Prints `worker ready on HOST:PORT` once it accepts connections, and runs until it is told to
    stop. Where other machines can connect it wants a token, which heads have to know.
    """
    from caravan.transport.endpoint import Endpoint
    from caravan.worker import devices as worker_devices
    from caravan.worker.settings import Settings
    from caravan.worker.supervisor import Supervisor

    if devices:
        worker_devices.parse(devices)
    if peer_address:
        Endpoint.parse(peer_address)
    if token_file and insecure:
        raise UsageError("--token-file and --insecure exclude each other")
    token = token_of(token_file)
    if token is not None and insecure:
        raise UsageError(f"{VARIABLE} is set, and --insecure lets everybody in: one of them only")
    tls = _tls({"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key})
    directory, limit = _cache(cache, no_cache, cache_size)
    if drain_seconds is None:
        # one that a program has started for itself serves nobody without it
        drain_seconds = 0.0 if parent_fd >= 0 else _DRAIN_SECONDS
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
        cache=directory,
        cache_size=limit,
        model_dirs=tuple(map(os.path.abspath, model_dirs)),
        max_memory=max_memory,
        token=token,
        tls=tls,
        insecure=insecure,
        allow_base=allow_llama_cpp,
        idle_timeout=idle_timeout,
        drain_seconds=drain_seconds,
    )
    with _removed(own_directory):
        sys.exit(Supervisor(settings).run())


def _tls(options: dict[str, str]) -> Tls:
    """Raises UsageError for files that are not what they should be."""
    tls = given(options)
    if tls:
        server_context(tls)
        client_context(tls)
    return tls


@contextlib.contextmanager
def _removed(directory: str) -> Iterator[None]:
    """Take away the directory of the worker's socket, if it is a private one, when it ends."""
    try:
        yield
    finally:
        if directory:
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def _cache(named: str | None, off: bool, size: int | None) -> tuple[str, int]:
    """The directory of the weight cache, which is made, and its bound; an empty one for no cache.

    Raises UsageError for options that exclude each other, and WorkerStartError for a directory
    that was asked for and cannot be made.
    """
    from caravan.worker.log import log
    from caravan.worker.store import default_limit

    if off:
        if named is not None or size is not None:
            raise UsageError("--no-cache excludes --cache and --cache-size")
        return "", 0
    directory = Path(named).absolute() if named else weights_dir()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return str(directory), size or default_limit(directory)
    except OSError as exc:
        text = f"cannot create the cache directory {directory}: {exc.strerror or exc}"
        if named is not None:
            raise WorkerStartError(text) from exc
        log(f"{text}; no weights are kept")
        return "", 0
