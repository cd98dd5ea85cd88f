"""A session process: started by the supervisor, first as the warm spare: engine loaded, devices
described, nothing opened.

Whatever happens in here, a crash in a kernel included, costs this session alone. It ends with its
`Session`, or when the supervisor is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import signal
import socket
import threading

from caravan import engine
from caravan.engine.library import Engine
from caravan.errors import CaravanError
from caravan.transport.certificates import Tls
from caravan.worker import control
from caravan.worker.device import Device
from caravan.worker.devices import Found, choose, parse
from caravan.worker.limited import limited
from caravan.worker.log import Bound, bound_lines
from caravan.worker.native import NativeDevice
from caravan.worker.session import Session, leave
from caravan.worker.sim import SimDevice
from caravan.worker.store import Store
from caravan.worker.tally import Row


def open_devices(spec: str, threads: int) -> tuple[Engine, list[Device]]:
    """Raises CaravanError when there is no engine, or no such device."""
    loaded = engine.load()
    ggml = loaded.ggml
    handles = ggml.devices()
    found = [
        Found(
            handle,
            ggml.dev_name(handle).decode(),
            ggml.dev_description(handle).decode(errors="replace"),
            ggml.dev_type(handle),
        )
        for handle in handles
    ]
    devices: list[Device] = []
    for index, chosen in enumerate(choose(parse(spec) if spec else [], found, threads)):
        native = NativeDevice(loaded, chosen.device.handle, index, chosen.threads)
        devices.append(native if chosen.speed is None else SimDevice(chosen.speed, native))
    return loaded, devices


def serve(talk: socket.socket, args: argparse.Namespace) -> None:
    """Report to the supervisor, then adopt what it sends until it is gone."""
    try:
        loaded, devices = open_devices(args.devices, args.threads)
        limits = [int(limit) for limit in args.max_memory.split(",") if limit]
        if limits:
            devices = limited(devices, limits, Row(args.tally, args.row))
        ready = control.Ready(
            engine=loaded.version,
            protocol=loaded.rpc_version[0],
            devices=[device.info() for device in devices],
        )
    except CaravanError as exc:
        control.send(talk, control.Ready(error=str(exc)))
        leave(1)
        return
    control.send(talk, ready)
    # What is loaded by now stays; collecting it again and again would cost a decode step more than
    # its commands do. What a session makes is freed by reference counts.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    store = Store(args.cache, args.cache_size or None) if args.cache else None
    tls = Tls(args.tls_ca, args.tls_cert, args.tls_key)
    session = Session(loaded, devices, talk, store, args.model_dir, args.idle_timeout, tls)
    threading.Thread(target=session.beat, name="beat", daemon=True).start()
    while True:
        message, fd = control.receive(talk)
        if isinstance(message, control.Secrets):
            session.trust(message)
            continue
        if not isinstance(message, control.Adopt) or fd is None:
            leave(0)
            return
        session.adopt(message, fd)


def _give_way() -> None:
    """Never push another program aside, only take turns with it.

    When a head on this machine sends a graph, what it wakes here would often take its processor and
    keep it for the whole computation, while the head had more to send to other workers.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main() -> None:
    """Entry of the process."""
    # they are the supervisor's affair, which lets the session go on for a while: also where the
    # system tells all processes of a service
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # what a head does wrong it may do without end
    bound_lines(Bound())
    # A crash of the engine is told in one line by the supervisor; its core would be huge.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--devices", default="")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache", default="")
    parser.add_argument("--cache-size", type=int, default=0)
    parser.add_argument("--model-dir", action="append", default=[])
    parser.add_argument("--max-memory", default="")
    parser.add_argument("--idle-timeout", type=float, default=0.0)
    for name in ("--tls-ca", "--tls-cert", "--tls-key"):
        parser.add_argument(name, default="")
    parser.add_argument("--tally", type=int, default=-1)
    parser.add_argument("--row", type=int, default=0)
    parser.add_argument("--beside-head", action="store_true")
    args = parser.parse_args()
    # a simulated device has to wake in time, and computes nothing
    if args.beside_head and "sim:" not in args.devices:
        _give_way()
    talk = socket.socket(fileno=args.fd)
    try:
        serve(talk, args)
    except OSError:
        # the supervisor is gone
        leave(1)


if __name__ == "__main__":
    main()
