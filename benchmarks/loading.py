"""How fast a model gets to its workers: the first time, over slow links, and the second time.

    python benchmarks/loading.py [--rounds 5] [--only cold links again] [--json FILE]

Makes a model of 2.3 GB with random weights in a temporary directory; nothing is computed with it.

cold    One worker on loopback, nothing cached anywhere: bytes a second from the call of `Model` to
        its return, over those of one `sendfile` of the same bytes to a process that puts them into
        fresh memory; and over llama.cpp's own client and server, where they are installed
        (`make interop`). The worker fills its cache meanwhile, as it does by itself.
links   Two workers, each behind a link of 200 Mbit/s (`link.py`): the time over that which the
        link of the worker with more bytes needs for them. With the sample model.
again   The same model on workers that have it in their caches, from a head that has read it before
        and whose page cache was dropped: the time over that of reading the same bytes from the page
        cache into fresh memory, what crosses the network, and what the head reads (/proc/self/io).

All files are in the page cache but for the head's of `again`. The sides take turns in changing
order; ratios are those of one round. Before each side what is dirty is written, and memory is
touched.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import caravan
from caravan import engine
from caravan.llm import EngineDevice, Model, ModelParams
from caravan.llm.devices import LocalDevice
from caravan.llm.loading import DeviceLoad
from caravan.models import resolve
from caravan.models.fake import MARK, FakeModel, described_size
from caravan.worker.local import Worker
from interop.peers import CppServer, libraries
from link import Link
from measure import machine, print_ratios, quotients, spread

_PIECE = 4 << 20
_LINK_MBIT = 200.0
_SHAPE = {"layers": 32, "embd": 2048, "heads": 16, "kv_heads": 8, "ff": 8192, "type": "Q8_0"}

Rows = list[tuple[str, list[float], float | None]]


def main() -> None:
    args = _arguments()
    folder = libraries() if "cold" in args.only else None
    if folder is not None:
        # the same kernels on all sides
        os.environ["CARAVAN_LIBRARY"] = str(folder)
    print(machine(), file=sys.stderr)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.work)))
        sample = resolve("smollm2")
        os.environ["CARAVAN_CACHE"] = str(work / "head")
        model = work / "model.gguf"
        if {"cold", "again"} & set(args.only):
            write_model(model)
        rows: Rows = []
        if "cold" in args.only:
            rows += cold(model, work, folder, args.rounds)
        if "links" in args.only:
            rows += links(sample, work, args.rounds)
        if "again" in args.only:
            rows += again(model, work, args.rounds)
    medians = print_ratios(rows)
    if args.json:
        samples = {name: values for name, values, _ in rows}
        args.json.write_text(json.dumps({"samples": samples, "medians": medians}, indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sides = ("cold", "links", "again")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=sides, default=list(sides))
    parser.add_argument("--work", help="where the temporary directory is made")
    parser.add_argument("--json", type=Path, help="write samples and ratios there too")
    return parser.parse_args()


def write_model(path: Path) -> None:
    """A model with random weights. The values make no sense; no two tensors are alike."""
    header = FakeModel(**_SHAPE, vocab=32000, ctx=4096).header()
    path.write_bytes(header)
    size = described_size(path)
    mark = MARK.encode()
    block = os.urandom(8 << 20)
    with path.open("wb") as file:
        # it is whole, so it must not say that it is not
        file.write(header.replace(mark, mark[::-1], 1))
        number = 0
        while (left := size - file.tell()) > 0:
            number += 1
            file.write((number.to_bytes(8, "little") + block[8:])[:left])


# the first time


def cold(model: Path, work: Path, folder: Path | None, rounds: int) -> Rows:
    samples: dict[str, list[float]] = {"ours": [], "sendfile": [], "llama.cpp": []}
    with ExitStack() as stack:
        cache = work / "cold"
        worker = stack.enter_context(Worker("CPU:1", options=("--cache", str(cache))))

        def once() -> tuple[list[DeviceLoad], float]:
            return load(
                model,
                [worker.endpoint],
                lambda cluster, loads: _filled(cache, sum(x.total for x in loads)),
            )

        def ours() -> float:
            loads, seconds = once()
            assert sum(x.network for x in loads) == sum(x.total for x in loads)
            return seconds

        size = sum(x.total for x in once()[0])

        sides: dict[str, Callable[[], float]] = {
            "ours": ours,
            "sendfile": lambda: sendfile(model, size),
        }
        if folder is not None:
            device = _their_device(stack, folder)
            sides["llama.cpp"] = lambda: _timed(lambda: Model(model, _PLAIN, devices=[device]))
        for number in range(rounds):
            for name in _turns(list(sides), number):
                _forget(cache, work / "head")
                _warm(model)
                _calm()
                samples[name].append(size / sides[name]() / 1e9)
            print(f"cold: round {number + 1} of {rounds}", file=sys.stderr)
    print(f"\ncold, {size / 1e9:.2f} GB, in GB/s:")
    for name in sides:
        print(f"  {name} {spread(samples[name], 2)}")
    rows: Rows = [("cold load / sendfile", quotients(samples["ours"], samples["sendfile"]), 0.7)]
    if folder is not None:
        ratios = quotients(samples["ours"], samples["llama.cpp"])
        rows.append(("cold load / llama.cpp's", ratios, 2.0))
    return rows


def _turns(names: list[str], number: int) -> list[str]:
    """Every side is the first one in some rounds."""
    start = number % len(names)
    return [*names[start:], *names[:start]]


def _calm() -> None:
    """Nothing that one side has left over is the next one's to pay for.

    What is dirty is written, and memory is touched: a virtual machine's host takes back what has
    been free for a few seconds, and the first touch of that costs more than all copies here.
    """
    os.sync()
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with _fresh(min(8 << 30, free // 2)) as memory:
        for start in range(0, len(memory), mmap.PAGESIZE):
            memory[start] = 0


def _filled(cache: Path, size: int) -> None:
    """Wait until the worker has written so much into its cache, which it does on the quiet."""
    deadline = time.monotonic() + 120
    while _held(cache) < size:
        if time.monotonic() > deadline:
            raise SystemExit("the cache does not fill up")
        time.sleep(0.1)


def _held(cache: Path) -> int:
    """Bytes of whole files."""
    sizes = []
    for path in cache.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(0 if path.suffix == ".part" or path.is_dir() else path.stat().st_size)
    return sum(sizes)


_PLAIN = ModelParams(repack=False)


Look = Callable[[caravan.Cluster, list[DeviceLoad]], Any]


def load(
    model: Path, endpoints: list[str], look: Look = lambda cluster, loads: None
) -> tuple[list[DeviceLoad], float]:
    """Load a model on workers; how it came there, and seconds. `look` sees it before it closes."""
    told: list[list[DeviceLoad]] = []
    with caravan.connect(endpoints) as cluster:
        started = time.perf_counter()
        with Model(
            model, _PLAIN, devices=cluster.devices, on_load=lambda loads: told.append(list(loads))
        ):
            seconds = time.perf_counter() - started
            look(cluster, told[-1])
    return told[-1], seconds


def _timed(call: Callable[[], Model]) -> float:
    started = time.perf_counter()
    with call():
        return time.perf_counter() - started


def _their_device(stack: ExitStack, folder: Path) -> EngineDevice:
    """llama.cpp's own remote device."""
    server = stack.enter_context(CppServer())
    add = ctypes.CDLL(str(folder / "libggml-rpc.so.0")).ggml_backend_rpc_add_server
    add.restype, add.argtypes = ctypes.c_void_p, (ctypes.c_char_p,)
    ggml = engine.load().ggml
    device = ggml.reg_dev_get(add(server.endpoint.encode()), 0)
    return LocalDevice(device, ggml.dev_name(device).decode(), "llama.cpp's server")


def _forget(*directories: Path) -> None:
    for directory in directories:
        for path in directory.glob("*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def sendfile(path: Path, size: int) -> float:
    """Seconds for so many bytes of a file to get into another process's fresh memory."""
    with socket.create_server(("127.0.0.1", 0)) as server, open(path, "rb") as file:
        child = os.fork()
        if not child:
            with socket.create_connection(server.getsockname()) as sock:
                done = 0
                while done < size:
                    done += os.sendfile(sock.fileno(), file.fileno(), done, size - done)
            os._exit(0)
        sock, _ = server.accept()
        with sock, _fresh(size) as memory:
            started = time.perf_counter()
            done = 0
            while done < size:
                done += sock.recv_into(memory[done:])
            seconds = time.perf_counter() - started
        os.waitpid(child, 0)
    return seconds


@contextmanager
def _fresh(size: int, huge: bool = True) -> Iterator[memoryview]:
    """Memory that this process has not touched yet: with huge pages, as a worker's, or as programs
    get it."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        area.madvise(mmap.MADV_HUGEPAGE)
    with memoryview(area) as memory:
        yield memory
    area.close()


# over slow links


def links(model: Path, work: Path, rounds: int) -> Rows:
    ratios: list[float] = []
    with ExitStack() as stack:
        caches = [work / f"link{number}" for number in range(2)]
        ports = []
        for cache in caches:
            worker = stack.enter_context(Worker("CPU:1", options=("--cache", str(cache))))
            port = int(worker.endpoint.rpartition(":")[2])
            ports.append(stack.enter_context(Link(port, 0.25, _LINK_MBIT)).port)
        for number in range(rounds):
            _forget(*caches, work / "head")
            loads, seconds = load(model, [f"127.0.0.1:{port}" for port in ports])
            assert all(x.network == x.total for x in loads)
            most = max(x.total for x in loads)
            ratios.append(seconds / (most * 8 / (_LINK_MBIT * 1e6)))
            print(f"links: round {number + 1} of {rounds}", file=sys.stderr)
    sizes = " and ".join(f"{x.total / 1e6:.1f} MB" for x in loads)
    print(f"\nlinks of {_LINK_MBIT:g} Mbit/s, {sizes}, s: {spread([seconds], 2)} in the last round")
    return [("load over two slow links / the slower one alone", ratios, 1.1)]


# the second time


def again(model: Path, work: Path, rounds: int) -> Rows:
    times: list[float] = []
    crossed: list[float] = []
    read: list[float] = []
    sent: list[int] = []
    spent: list[float] = []
    strict: list[float] = []
    with ExitStack() as stack:
        caches = [work / f"again{number}" for number in range(2)]
        endpoints = [
            stack.enter_context(Worker("CPU:1", options=("--cache", str(cache)))).endpoint
            for cache in caches
        ]
        _fill(model, endpoints)
        for number in range(rounds):
            _calm()
            _drop(model)
            before = _read_bytes()
            loads, seconds = load(model, endpoints, lambda cluster, _: sent.append(_sent(cluster)))
            size = sum(x.total for x in loads)
            read.append((_read_bytes() - before) / model.stat().st_size)
            crossed.append(sent[-1] / size)
            _warm(model)
            _calm()
            times.append(seconds / copy(model, size, huge=False))
            _calm()
            strict.append(seconds / copy(model, size, huge=True))
            spent.append(seconds)
            print(f"again: round {number + 1} of {rounds}", file=sys.stderr)
    print(f"\nagain, {size / 1e9:.2f} GB on two workers, s: {spread(spent, 2)}")
    return [
        ("second load / copy from the page cache", times, 1.5),
        ("second load / copy into huge pages, as a worker's", strict, None),
        ("sent to the workers / weights", crossed, 0.01),
        ("read by the head / file", read, 0.01),
    ]


def _fill(model: Path, endpoints: list[str]) -> None:
    """Load until nothing more is sent: what is loaded fast is cached a little later."""
    for _ in range(10):
        loads, _ = load(model, endpoints, lambda cluster, loads: time.sleep(3))
        if not sum(x.network for x in loads):
            return
    raise SystemExit("the caches do not fill up")


def _sent(cluster: caravan.Cluster) -> int:
    return sum(device.link.stream.bytes_sent for device in cluster.devices)


def _read_bytes() -> int:
    """What this process has read: from files and pipes, or, where it is more, from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    found = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return max(found["rchar"], found["read_bytes"])


def _drop(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _warm(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(_PIECE):
            pass


def copy(path: Path, size: int, huge: bool) -> float:
    """Seconds to read so many bytes of a file in the page cache into fresh memory."""
    with path.open("rb", buffering=0) as file, _fresh(size, huge) as memory:
        started = time.perf_counter()
        done = 0
        while done < size:
            done += file.readinto(memory[done : done + _PIECE])
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
