"""What there is to say of devices, and of the ways of copies between any two of them.

What `caravan devices` shows, without its printing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from caravan import engine
from caravan.backend import RemoteDevice, routes_between
from caravan.llm.cores import physical_cores
from caravan.llm.devices import EngineDevice, cpu
from caravan.stream.routes import Path, Route
from caravan.wire.extension import EXTENSION_VERSION, SIMULATED

_KINDS = {0: "CPU", 1: "GPU", 2: "iGPU", 3: "accelerator"}


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device. What is not known, or means nothing for it, is None.

    Attributes:
        name: as `--device` takes it.
        endpoint: of its worker; None for a device of this process's own engine.
        kind: `CPU`, `GPU`, `iGPU`, `accelerator`, or `sim` for one that only costs time.
        engine: version of its ggml.
        threads: compute threads of a CPU device.
        memory_free, memory_total: bytes.
        protocol: version of llama.cpp's RPC that its worker announces.
        extension: version of Caravan's extension that is spoken; None for a llama.cpp server.
        host: the machine that it is on, as far as its address tells.
        gflops, gbps: its speeds, as `plan.profile` has them, once they were measured.
        graph_ns, turn_ns, check_ns, check_node_ns: what a graph, a decode step, a new graph as such
            and each of its nodes cost it, likewise.
        round_trip_ns: from here to it and back.
        bytes_per_second: that can be sent to it.
    """

    name: str
    endpoint: str | None
    kind: str | None
    description: str
    engine: str | None
    threads: int | None
    memory_free: int
    memory_total: int
    protocol: str | None
    extension: int | None
    host: str | None = None
    gflops: float | None = None
    gbps: float | None = None
    graph_ns: int | None = None
    turn_ns: int | None = None
    check_ns: int | None = None
    check_node_ns: int | None = None
    round_trip_ns: int | None = None
    bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class CopyFacts:
    """How copies from one device to another go.

    Attributes:
        source, target: names of the devices.
        way: `within` a worker, `direct` from worker to worker, or `relay`: through this process.
        round_trip_ns: between the two workers, as the source's has measured it; None unless direct.
        reason: why it is the relay, in words; else empty.
        latency_ns: of a small copy, one way, once it was measured; None for a relay.
        bytes_per_second: of big ones, likewise.
    """

    source: str
    target: str
    way: str
    round_trip_ns: int | None
    reason: str
    latency_ns: int | None = None
    bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """Devices, the CPU last if it was asked for; copies between any two, without the CPU."""

    devices: list[DeviceFacts]
    copies: list[CopyFacts]


def survey(devices: Sequence[EngineDevice], *, with_cpu: bool = False) -> Survey:
    """Ask about all of them; waits until the workers know whether they reach each other."""
    told = [_facts(device) for device in devices]
    if with_cpu:
        told.append(_own_facts(cpu()))
    routes = routes_between([device for device in devices if isinstance(device, RemoteDevice)])
    copies = []
    for one, other in itertools.permutations(devices, 2):
        route = routes.get((one.name, other.name))
        if route is None:
            own = other if isinstance(one, RemoteDevice) else one
            reason = f"{own.name} is a device of this process"
            copies.append(CopyFacts(one.name, other.name, Path.RELAY.value, None, reason))
        else:
            copies.append(_copy_facts(one, other, route))
    return Survey(told, copies)


def _facts(device: EngineDevice) -> DeviceFacts:
    if not isinstance(device, RemoteDevice):
        return _own_facts(device)
    link = device.link
    free, total = device.memory()
    return DeviceFacts(
        name=device.name,
        endpoint=device.endpoint,
        kind=_kind(device) if link.extension else None,
        description=device.description,
        engine=device.engine or None,
        threads=link.info.threads or None,
        memory_free=free,
        memory_total=total,
        protocol=str(link.version),
        extension=EXTENSION_VERSION if link.extension else None,
    )


def _kind(device: RemoteDevice) -> str | None:
    return SIMULATED if device.simulated else _KINDS.get(device.link.info.type)


def _own_facts(device: EngineDevice) -> DeviceFacts:
    loaded = engine.load()
    kind = _KINDS.get(loaded.ggml.dev_type(device.handle))
    free, total = device.memory()
    return DeviceFacts(
        name=device.name,
        endpoint=None,
        kind=kind,
        description=device.description,
        engine=loaded.version,
        threads=physical_cores() if kind == "CPU" else None,
        memory_free=free,
        memory_total=total,
        protocol=None,
        extension=None,
    )


def _copy_facts(one: EngineDevice, other: EngineDevice, route: Route) -> CopyFacts:
    way = route.path.value
    if route.path is Path.DIRECT and route.round_trip is None:
        way = "within"
    elapsed = None if route.round_trip is None else round(route.round_trip * 1e9)
    return CopyFacts(one.name, other.name, way, elapsed, route.reason)
