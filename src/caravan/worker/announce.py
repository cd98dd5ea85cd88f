"""What a worker says on stdout, and once on stderr, for the person or program that has started it.

The lines are those of llama.cpp's rpc-server as far as that has them. Called by the supervisor.
"""

from __future__ import annotations

import contextlib
import sys

from caravan.transport.endpoint import Endpoint
from caravan.wire.extension import EXTENSION_VERSION
from caravan.wire.versions import Version
from caravan.worker import control
from caravan.worker.settings import Settings


def announce(settings: Settings, ready: control.Ready, version: Version, port: int) -> None:
    """What the worker offers, and that it is ready; raises OSError where there is no room for that.

    Whoever has started it may wait for these words, and is not to wait for ever.
    """
    host = settings.host
    where = host if host.startswith("unix:") else str(Endpoint(host, port))
    _say_first(f"Starting RPC server v{version}")
    _say_first(f"  endpoint       : {where}")
    _say_first(f"  local cache    : {_cache(settings)}")
    for directory in settings.model_dirs:
        _say_first(f"  models         : {directory}")
    _say_first("Devices:")
    for d in ready.devices:
        total, free = d.memory_total >> 20, d.memory_free >> 20
        _say_first(f"  {d.name}: {d.description} ({total} MiB, {free} MiB free)")
    _say_first(f"  transport      : {_transport(settings)}")
    extension = f"extension {EXTENSION_VERSION}" if settings.extension else "no extension"
    count = len(ready.devices)
    devices = f"{count} device{'s' if count != 1 else ''}"
    _say_first(f"worker ready on {where} (protocol {version}, {extension}, {devices})")


def _say_first(text: str) -> None:
    # a reader that has gone waits for nothing
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)


def _transport(settings: Settings) -> str:
    if settings.host.startswith("unix:"):
        return "Unix socket"
    if not settings.tls.cert:
        return "TCP"
    return "TCP, TLS for all but llama.cpp's programs"


def _cache(settings: Settings) -> str:
    if not settings.cache:
        return "n/a"
    size = settings.cache_size
    bound = f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size >> 20} MiB"
    return f"{settings.cache} (at most {bound})"


def warn(host: str, why: str) -> None:
    """For a worker that lets in whoever can connect. The words are llama.cpp's, where they fit."""
    rule = "!" * 59
    lines = (
        rule,
        f"WARNING: Host ('{host}') is != '127.0.0.1', and {why}:",
        "         whoever can connect can use the devices.",
        "         Never expose the worker to an open network like this!",
        rule,
    )
    with contextlib.suppress(OSError, ValueError):
        print("\n".join(lines), file=sys.stderr, flush=True)
