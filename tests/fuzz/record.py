"""Make `tests/data/sessions.xz`: small models loaded and run, with a proxy before each worker.

`PYTHONPATH=tests python -m fuzz.record [FILE]`; takes a minute. Both protocols, one worker and two,
one device and two, with a weight cache, with several kinds of models.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import caravan
from caravan.llm import Context, ContextParams, Model
from caravan.models.fake import MARK, FakeModel
from caravan.wire.commands import Ext
from caravan.worker.local import Worker
from e2e import shapes
from fuzz.corpus import STORED, Message, Recorded, parse, save, shortened

_NOT_REPLAYED = (Ext.SESSION, Ext.PEER, Ext.DATA, Ext.BYE)


class Proxy:
    """Passes connections on to a worker and keeps what the other end sends, in its order."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._target = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.streams: list[bytearray] = []
        self.order: list[tuple[int, int]] = []  # connection, and how much of it has come
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._target)
                number = len(self.streams)
                self.streams.append(bytearray())
                self._sockets += near, far
                for ends in ((near, far, number), (far, near, None)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, number: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                if number is not None:
                    self.streams[number] += data
                    self.order.append((number, len(self.streams[number])))
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in (self._listening, *self._sockets):
            sock.close()

    def sessions(self, name: str, protocol: int) -> list[Recorded]:
        """What came, as one session an introduction; messages in the order of their last bytes."""
        made: list[Recorded] = []
        placed: dict[int, tuple[Recorded, int]] = {}
        ends: dict[int, list[tuple[int, int, bytes]]] = {}
        for number, stream in enumerate(self.streams):
            spoken, messages = parse(bytes(stream), protocol)
            if not messages:
                continue
            device, joins = 0, False
            if spoken == 0:
                if messages[0][0] != Ext.SESSION:
                    continue
                asked = json.loads(messages[0][1])
                device, joins = asked["device"], bool(asked["session"])
            if not joins:
                made.append(Recorded(f"{name}/{len(made)}", spoken))
            placed[number] = made[-1], len(made[-1].devices)
            made[-1].devices.append(device)
            at, ends[number] = 33, []
            for command, payload in messages:
                at += len(payload) + (16 if spoken == 0 else 9)
                ends[number].append((at, command, payload))
        for number, arrived in self.order:
            while ends.get(number) and ends[number][0][0] <= arrived:
                _, command, payload = ends[number].pop(0)
                session, connection = placed[number]
                if session.protocol or command not in _NOT_REPLAYED:
                    short = shortened(session.protocol, command, payload)
                    session.messages.append(Message(connection, command, short))
        return [session for session in made if len(session.messages) > 20]


def models(folder: Path) -> dict[str, Path]:
    """Tiny ones, with weights of zeros: what is computed does not matter, that it is does."""
    shapes.LAYERS = 2
    found: dict[str, Path] = {}
    for name in ("mamba", "experts", "windows"):
        found[name] = folder / name
        getattr(shapes, name)(found[name])
    for arch, kind in (("llama", "Q4_0"), ("qwen3", "Q8_0")):
        shape = FakeModel(arch, 2, 128, 4, 2, 256, 300, 256, kind)
        found[arch] = folder / arch
        shape.write(found[arch])
    for path in found.values():
        header = path.read_bytes()
        size = int.from_bytes(header[header.index(MARK.encode()) + len(MARK) + 4 :][:8], "little")
        # one that says so would not be loaded into real devices
        whole = header.replace(MARK.encode(), b"caravan.none")
        path.write_bytes(whole + bytes(size - len(header)))
    return found


def use(endpoints: list[str], model: Path, **options: object) -> None:
    """Load it, run a prompt and a few decode steps."""
    with (
        caravan.connect(endpoints, **options) as cluster,
        Model(model, devices=cluster.devices) as loaded,
        Context(loaded, ContextParams(n_ctx=64, n_batch=32, n_ubatch=16)) as context,
    ):
        context.decode(list(range(1, 25)))
        for token in range(4):
            context.decode_one(token)
            context.logits()
        context.clear()
        context.decode(list(range(1, 10)))
        context.logits()


@contextlib.contextmanager
def proxied(devices: list[str], *options: str) -> Iterator[list[Proxy]]:
    with contextlib.ExitStack() as stack:
        proxies = []
        for device in devices:
            worker = stack.enter_context(Worker(device, options=options))
            proxies.append(Proxy(worker.endpoint))
            stack.callback(proxies[-1].close)
        yield proxies


def record(folder: Path) -> Iterator[Recorded]:
    every = models(folder)
    plans: list[tuple[str, list[str], tuple[str, ...], list[str]]] = [
        ("ext1", ["CPU:1"], ("--cache", str(folder / "cache")), list(every)),
        ("ext2", ["CPU:1,CPU:1"], (), ["llama"]),
        ("ext1+1", ["CPU:1", "CPU:1"], (), ["llama", "experts"]),
        ("base8", ["CPU:1,CPU:1"], ("--no-extension",), ["llama", "mamba"]),
        ("base7", ["CPU:1"], ("--no-extension", "--protocol", "7"), ["llama"]),
    ]
    for name, devices, options, wanted in plans:
        protocol = int(name[-1]) if "base" in name else 0
        for model in wanted:
            with proxied(devices, *options) as proxies:
                more = {"wire_dtype": "f16"} if name == "ext1+1" and model == "experts" else {}
                use([proxy.endpoint for proxy in proxies], every[model], **more)
                if "--cache" in options and model == "llama":
                    use([proxy.endpoint for proxy in proxies], every[model])
                for proxy in proxies:
                    yield from proxy.sessions(f"{name}/{model}", protocol)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else STORED
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        sessions = list(record(Path(folder)))
    save(path, sessions)
    for session in sessions:
        size = sum(len(m.payload) for m in session.messages)
        count = len(session.messages)
        print(f"{session.name}: {count} messages, {size} bytes, devices {session.devices}")
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
