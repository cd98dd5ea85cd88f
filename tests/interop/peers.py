"""llama.cpp's own client and server as peers: where they are, and servers as child processes.

Used by the tests of this folder and by `benchmarks/pairs.py`. What `build.py` has installed is
found without being imported; a server is `server.py` in a process of its own.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

HERE = Path(__file__).parent
_START_SECONDS = 60.0


def libraries() -> Path | None:
    """The folder of llama.cpp's libraries with RPC of protocol 7; None if it is not installed."""
    spec = importlib.util.find_spec("llama_cpp")
    for place in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(place, "lib")
        if (folder / "libggml-rpc.so.0").is_file():
            return folder
    return None


class CppServer:
    """llama.cpp's RPC server with CPU devices, one thread each by default.

    Args:
        folder: of llama.cpp's libraries; that of `libraries()` by default.
        devices: how many devices its clients see; they are all the one CPU.
        cache: a directory for weights.

    Attributes:
        endpoint: `127.0.0.1:PORT`.
        pid: of the process.
    """

    def __init__(
        self,
        *,
        folder: Path | None = None,
        threads: int = 1,
        devices: int = 1,
        cache: Path | None = None,
        port: int = 0,
    ) -> None:
        folder = folder or libraries()
        assert folder is not None, "llama.cpp's RPC is not installed: make interop"
        self.endpoint = f"127.0.0.1:{port or free_port()}"
        arguments: Sequence[str] = (
            *(str(folder), self.endpoint, "--threads", str(threads), "--devices", str(devices)),
            *(("--cache", str(cache)) if cache is not None else ()),
        )
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.pid = self._process.pid
        self._await()

    def _await(self) -> None:
        """Until it listens. It serves one client at a time, so none is sent to find out."""
        port = int(self.endpoint.rpartition(":")[2])
        deadline = time.monotonic() + _START_SECONDS
        while port not in _listening():
            assert self._process.poll() is None, "the C++ server has ended"
            assert time.monotonic() < deadline, "the C++ server does not listen"
            time.sleep(0.01)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> CppServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _listening() -> set[int]:
    """The TCP ports on which somebody listens here."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
