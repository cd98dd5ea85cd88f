"""A slower link: a TCP relay on loopback with a delay and, if asked, a bandwidth.

    python benchmarks/link.py TARGET_PORT ONE_WAY_MS [MBIT_PER_S]

Prints the port that it listens on. Each direction of each connection has the delay and the
bandwidth for itself; bytes stay in order and none are lost. The kernel here has no netem.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

_CHUNK = 256 << 10


class Link:
    """A relay in a process of its own, which ends with `close` or with this process."""

    def __init__(self, target_port: int, one_way_ms: float, mbit: float = 0.0) -> None:
        command = [sys.executable, str(Path(__file__)), str(target_port), str(one_way_ms)]
        self._process = subprocess.Popen(
            [*command, str(mbit)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _carry(source: socket.socket, sink: socket.socket, delay: float, mbit: float) -> None:
    """One direction: a chunk leaves `delay` seconds after the link could have carried it."""
    chunks: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

    def arrive() -> None:
        free_at = 0.0
        while True:
            try:
                data = source.recv(_CHUNK)
            except OSError:
                data = b""
            now = time.perf_counter()
            free_at = max(free_at, now) + (len(data) * 8e-6 / mbit if mbit else 0.0)
            chunks.put((free_at + delay, data))
            if not data:
                return

    threading.Thread(target=arrive, daemon=True).start()
    while True:
        due, data = chunks.get()
        time.sleep(max(0.0, due - time.perf_counter()))
        try:
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)
        except OSError:
            return


def _serve(target_port: int, delay: float, mbit: float) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            near, _ = server.accept()
            try:
                far = socket.create_connection(("127.0.0.1", target_port))
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=_carry, args=(one, other, delay, mbit), daemon=True).start()


def main() -> None:
    target, one_way_ms, mbit = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    serving = threading.Thread(target=_serve, args=(target, one_way_ms / 1e3, mbit), daemon=True)
    serving.start()
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.read()  # until whoever started us is gone


if __name__ == "__main__":
    main()
