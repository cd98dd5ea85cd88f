"""llama.cpp's own client and server as peers: where they are, and both as child processes.

Used by the tests of this folder and by `benchmarks/pairs.py`. What `build.py` has installed is
found without being imported; a server is `server.py` in a process of its own, a client `client.py`,
and Caravan's head, with any engine, `head.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

HERE = Path(__file__).parent
_START_SECONDS = 60.0
# of one step: a bound that says "it hangs"
_STEP_SECONDS = 100.0
_T = TypeVar("_T", bound="_Told")


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


class StepFailed(Exception):
    """A step raised an exception, whose class is `kind`."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(f"{kind}: {words}")
        self.kind = kind


class Ended(Exception):
    """The process ended in a step: with exit code `code`, after writing `words` on stderr."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(f"ended with {code}: {words}")
        self.code = code
        self.words = words


class _Told:
    """A process that is told step by step what to do; `steps.py` has the format."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self.pid = self._process.pid
        self._pending = 0
        self._read = b""

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Do a step and wait for its answer; raises StepFailed and Ended."""
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """Give it a step, whose `answer` is to be fetched later."""
        assert self._process.stdin is not None
        # who has ended is found out with the answer
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        self._pending += 1

    def answer(self, timeout: float = _STEP_SECONDS) -> dict[str, Any]:
        """The answer to the oldest step that has none yet; raises StepFailed and Ended."""
        assert self._pending, "nothing was asked"
        assert self.answers_within(timeout), "no answer in time"
        line, _, self._read = self._read.partition(b"\n")
        self._pending -= 1
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise StepFailed(answer["kind"], answer["error"])
        return answer

    def answers_within(self, timeout: float) -> bool:
        """Whether `answer` would return, or raise, after `timeout` seconds at most."""
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout
        while b"\n" not in self._read:
            if not select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            data = os.read(file, 1 << 20)
            if not data:
                raise Ended(self._process.wait(), self.words())
            self._read += data
        return True

    def words(self) -> str:
        """What it has written on stderr."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), size, 0).decode(errors="replace")

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self.close()

    def close(self, timeout: float = _STEP_SECONDS) -> int:
        """Let it come to its end, and return its exit code. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            return self._process.wait(timeout)
        finally:
            self._process.kill()
            self._process.wait()
            self._errors.close()

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # in the middle of a step it has no ear for the end of its stdin
        if kind is not None or self._pending:
            self._process.send_signal(signal.SIGKILL)
        self.close()


class CppClient(_Told):
    """llama.cpp's client."""

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or libraries()
        assert folder is not None, "llama.cpp's RPC is not installed: make interop"
        super().__init__([str(HERE / "client.py"), str(folder)])


class Head(_Told):
    """Caravan's head.

    Args:
        folder: of its engine; None for the default one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        with engine(folder):
            super().__init__([str(HERE / "head.py")])


@contextlib.contextmanager
def engine(folder: Path | None) -> Iterator[None]:
    """Inside, what is started of Caravan uses that engine; None: its default one."""
    before = os.environ.pop("CARAVAN_LIBRARY", None)
    if folder is not None:
        os.environ["CARAVAN_LIBRARY"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("CARAVAN_LIBRARY", None)
        if before is not None:
            os.environ["CARAVAN_LIBRARY"] = before


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def connections(pid: int) -> set[str]:
    """The established TCP connections over IPv4 that a process has, by their inodes."""
    found = {f"socket:[{row[9]}]" for row in _sockets() if row[3] == "01"}
    links = set()
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                links.add(os.readlink(file))
    return links & found


def _listening() -> set[int]:
    """The TCP ports on which somebody listens here."""
    return {int(row[1].rpartition(":")[2], 16) for row in _sockets() if row[3] == "0A"}


def _sockets() -> list[list[str]]:
    return [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
