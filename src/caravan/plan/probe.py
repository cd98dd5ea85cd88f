"""What one device can do, measured on it: its speeds. Its times for a model: see `layers`.

Nothing is put there but cleared memory and graphs, and nothing stays. Used by `measure`.
"""

from __future__ import annotations

from caravan.backend import RemoteDevice
from caravan.errors import AllocationError
from caravan.plan.profile import DeviceProfile
from caravan.plan.samples import Sample, addition, copy, product, various
from caravan.plan.scratch import Scratch, Span
from caravan.transport.endpoint import Endpoint

# depth, rows, columns: so small that the slowest device is soon done, up to what loads a big one
_PRODUCTS = (
    (256, 16, 8),
    (512, 256, 64),
    (1024, 1024, 512),
    (2048, 2048, 512),
    (4096, 4096, 512),
    (8192, 8192, 2048),
)
_DEPTH = 4096
_NODES = (64, 640)
# rows of f32: 64 KiB, 4 MiB, and what no cache holds; or what there is room for
_ROWS = (4, 256, 16384)
_SHARE = 0.03  # seconds for each try
_LONG = 0.01  # seconds that say enough of a speed
_PATIENCE = 0.3  # seconds that the next bigger try may take
_NEARLY = 0.8
HERE = "localhost"


def measure_device(device: RemoteDevice) -> DeviceProfile:
    """Its speeds; takes half a second, and longer on a very slow device.

    Waits, and must have the device for itself. Raises WorkerLost; AllocationError for a device
    that has no room at all.
    """
    free, total = device.memory()
    with Scratch(device) as scratch:
        small = addition(32)
        memory = scratch.take(small.size)
        graph = scratch.graph(small.at(memory.base), 1, memory)
        own = scratch.computing(graph)
        each = scratch.following(graph)
        turn = scratch.turn(graph, Span(memory, int(small.rows["data"][0]), 128), 128)
        check, check_graph = _checks(scratch)
        gflops = _gflops(scratch, own, free)
        gbps = _gbps(scratch, own, free, gflops)
    return DeviceProfile(
        device.name,
        gflops,
        gbps,
        each,
        turn,
        free,
        total,
        host_of(device),
        check=check,
        check_graph=check_graph,
        threads=float(device.link.info.threads),
    )


def host_of(device: RemoteDevice) -> str:
    """The machine that the device is on, as far as its address tells."""
    endpoint = Endpoint.parse(device.endpoint)
    return HERE if endpoint.is_here else endpoint.host


def _checks(scratch: Scratch) -> tuple[float, float]:
    """Seconds for each node of a new graph, and for a new graph as such."""
    few, many = (various(count) for count in _NODES)
    memory = scratch.take(max(few.size, many.rows.nbytes))
    try:
        one, other = (
            scratch.checking(sample.at(memory.base), count, memory)
            for sample, count in zip((few, many), _NODES, strict=True)
        )
    finally:
        scratch.give_back(memory)
    each = max(other - one, 0.0) / (_NODES[1] - _NODES[0])
    return each, max(one - _NODES[0] * each, 0.0)


def _gflops(scratch: Scratch, own: float, free: int) -> float:
    """Of the biggest product that does not take long."""
    best = 0.0
    for shape in _PRODUCTS:
        sample = product("q8_0", *shape)
        if best and (sample.size > free // 2 or sample.flops / best > _PATIENCE * 1e9):
            break
        try:
            seconds = _seconds(scratch, sample, own)
        except AllocationError:
            if best:
                break
            raise
        best = sample.flops / seconds / 1e9
        if seconds >= _LONG:
            break
    return best


def _gbps(scratch: Scratch, own: float, free: int, gflops: float) -> float:
    """Of the biggest matrix by a vector that does not take long, and more than caches hold."""
    best, bound = 0.0, False
    for rows in _ROWS:
        rows = min(rows, max(free // 4 // (4 * _DEPTH), _ROWS[0]))
        sample = product("f32", _DEPTH, rows, 1)
        if best and sample.moved / best > _PATIENCE * 1e9:
            break
        try:
            seconds = _seconds(scratch, sample, own)
        except AllocationError:
            if best:
                break
            raise
        best = sample.moved / seconds / 1e9
        bound = sample.flops / seconds / 1e9 > _NEARLY * gflops
        if seconds >= _LONG:
            break
    if bound:
        # it multiplies as slowly as it would without reading: copying has little arithmetic
        sample = copy(int(sample.moved) // 8)
        best = max(best, sample.moved / _seconds(scratch, sample, own) / 1e9)
    return best


def _seconds(scratch: Scratch, sample: Sample, own: float) -> float:
    """Of one computation, without what each graph costs (`own`)."""
    memory = scratch.take(sample.size)
    try:
        graph = scratch.graph(sample.at(memory.base), 1, memory)
        return max(scratch.computing(graph, _SHARE) - own, 1e-9)
    finally:
        scratch.give_back(memory)
