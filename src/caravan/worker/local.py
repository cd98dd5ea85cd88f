"""`Worker`, `LocalWorkers` and `LocalDevices`: worker processes on this machine.

They are real workers behind real sockets, started as `caravan worker`, quiet, and bound to this
process: they end with it even when it is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TypeVar

from caravan import child
from caravan.errors import WorkerStartError
from caravan.transport.endpoint import Endpoint
from caravan.trust.token import VARIABLE

_START_TIMEOUT = 120.0
_STOP_TIMEOUT = 6.0
_READ_TIMEOUT = 2.0
_T = TypeVar("_T")
_READY = "worker ready on "
# The path of a Unix socket has room for about 100 bytes.
_LONGEST_BASE = 70


class Worker:
    """A worker process of our own.

    Args:
        devices: as for `caravan worker -d`; the default lends what `caravan worker` would.
        threads: compute threads of CPU devices that name none.
        port: 0 picks a free one.
        options: further options of `caravan worker`. Without `--cache DIR` it keeps no weights: it
            would keep them on the disk that they come from.
        private: listen on a Unix socket that only this user can reach, instead of host and port.
            Its directory goes with the worker.
        verbose: pass the worker's own messages on to stderr.

    Where only this machine can connect, it wants no token unless `options` say so; elsewhere it
    wants that of CARAVAN_TOKEN. Raises WorkerStartError when it does not come up.

    Attributes:
        endpoint: where it listens; empty once it is closed.
    """

    def __init__(
        self,
        devices: str = "",
        *,
        threads: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        options: tuple[str, ...] = (),
        private: bool = False,
        verbose: bool = False,
    ) -> None:
        self.endpoint = ""
        self._directory = _private_directory() if private else ""
        self._verbose = verbose
        self._changing = threading.RLock()
        self._closed = False
        self._tail: deque[str] = deque(maxlen=20)
        self._process: subprocess.Popen[str] | None = None
        self._parent = -1
        self._readers: list[threading.Thread] = []
        if private:
            host = f"unix:{self._directory}/socket"
            options = ("--own-directory", self._directory, *options)
        self._host, self._port = host, port
        self._options: list[str] = []
        if devices:
            self._options += ["--device", devices]
        if threads:
            self._options += ["--threads", str(threads)]
        if not any(option.split("=")[0] in ("-c", "--cache") for option in options):
            self._options += ["--no-cache"]
        self._options += options
        try:
            self.endpoint = self._start()
        except BaseException:
            self.close()
            raise
        _ours[self.endpoint] = self

    def __repr__(self) -> str:
        return f"<Worker {self.endpoint or 'closed'}, pid {self.pid}>"

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    @property
    def pid(self) -> int:
        """The supervisor's process id; 0 once it is closed."""
        return self._process.pid if self._process is not None else 0

    def messages(self) -> list[str]:
        """The last lines that the worker wrote on stderr."""
        return list(self._tail)

    def restart(self) -> None:
        """Start it again where it was, if its process has ended by itself. Blocks until it is
        ready; raises WorkerStartError. Does nothing to one that was closed."""
        with self._changing:
            process = self._process
            if process is None or process.poll() is None:
                return
            self._end(process)
            if self._directory:
                # what a killed worker has left
                shutil.rmtree(self._directory, ignore_errors=True)
                with contextlib.suppress(OSError):
                    os.mkdir(self._directory, 0o700)
            self._port = 0 if self._directory else int(self.endpoint.rpartition(":")[2])
            try:
                self._start()
            finally:
                if self._closed:
                    self.close()

    def close(self) -> None:
        """Tell it to end, and see to it that it does. Idempotent."""
        self._closed = True
        process = getattr(self, "_process", None)
        if process is None:
            self._remove_directory()
            return
        # one that is just being started again must not be waited for
        self._let_go()
        with self._changing:
            process, self._process = self._process, None
            if process is not None:
                self._end(process)
            _ours.pop(self.endpoint, None)
            self.endpoint = ""
            self._remove_directory()

    def _remove_directory(self) -> None:
        directory, self._directory = getattr(self, "_directory", ""), ""
        if directory:
            # the worker does it, unless it was killed
            shutil.rmtree(directory, ignore_errors=True)

    def _end(self, process: subprocess.Popen[str]) -> None:
        # the end of the pipe ends it at once, whatever it was told to wait for
        self._let_go()
        try:
            process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for reader, pipe in zip(self._readers, (process.stdout, process.stderr), strict=False):
            # not joinable from the finaliser of an interpreter that is ending
            with contextlib.suppress(RuntimeError):
                reader.join(_READ_TIMEOUT)
            # who reads on, because a session process froze, closes it later; we would wait here
            if pipe is not None and not reader.is_alive():
                pipe.close()

    def _start(self) -> str:
        """Start the process, and wait until it is ready; its endpoint."""
        command = [sys.executable, "-m", "caravan", "worker", "--host", self._host]
        here = self._host.startswith("unix:") or Endpoint(self._host, self._port).is_here
        command += ["--port", str(self._port), *self._options]
        self._spawn(command, child.environment((VARIABLE,) if here else ()))
        return self._await_ready()

    def _spawn(self, command: list[str], environment: dict[str, str]) -> None:
        """The worker holds the read end of a pipe whose only write end is ours."""
        theirs, self._parent = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, "--parent-fd", str(theirs)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(theirs,),
                env=environment,
                text=True,
                errors="replace",
                # Ctrl-C is for us; we end the worker when we are done with it.
                start_new_session=True,
            )
        except OSError as exc:
            self._let_go()
            raise WorkerStartError(f"cannot start a worker: {exc.strerror or exc}") from exc
        finally:
            os.close(theirs)

    def _let_go(self) -> None:
        """Close the end of the pipe by which the worker knows that we live."""
        parent, self._parent = self._parent, -1
        if parent >= 0:
            os.close(parent)

    def _await_ready(self) -> str:
        process = self._process
        assert process is not None
        ready = threading.Event()
        told: list[str] = []
        self._readers = [
            threading.Thread(target=_read_output, args=(process, told, ready), daemon=True),
            threading.Thread(target=self._read_errors, args=(process,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        ready.wait(_START_TIMEOUT)
        if told:
            return told[0]
        if process.poll() is None and ready.is_set():
            # it closed its output and is about to end
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT)
        self._readers[1].join(1.0)
        last = self._tail[-1] if self._tail else "it did not say why"
        raise WorkerStartError(f"a local worker did not start: {_plain(last)}")

    def _read_errors(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                self._tail.append(line.rstrip("\n"))
                if self._verbose:
                    sys.stderr.write(line)


# those of this process, by their endpoints
_ours: weakref.WeakValueDictionary[str, Worker] = weakref.WeakValueDictionary()


def restart(endpoint: str) -> None:
    """Start the worker at `endpoint` again, if it is one of this process and has ended by itself.

    Raises WorkerStartError.
    """
    worker = _ours.get(endpoint)
    if worker is not None:
        worker.restart()


def _read_output(process: subprocess.Popen[str], told: list[str], ready: threading.Event) -> None:
    """Puts the endpoint into `told`."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if line.startswith(_READY):
                # a path may have blanks, what follows has no parenthesis
                told.append(line[len(_READY) :].rpartition(" (")[0])
                ready.set()
    ready.set()


class _Several:
    """Workers that are started and ended side by side.

    Attributes:
        workers: in the order of `starts`.
    """

    def __init__(self, starts: Sequence[Callable[[], Worker]]) -> None:
        self.workers: list[Worker] = []
        started: dict[int, Worker] = {}
        failures: list[BaseException] = []

        def start(number: int) -> None:
            try:
                started[number] = starts[number]()
            except BaseException as exc:
                failures.append(exc)

        starters = [threading.Thread(target=start, args=(n,)) for n in range(len(starts))]
        try:
            for starter in starters:
                starter.start()
            for starter in starters:
                starter.join()
        except BaseException:
            # Ctrl-C: what is still starting must not outlive us
            for starter in starters:
                if starter.ident is not None:
                    starter.join()
            self.workers = list(started.values())
            self.close()
            raise
        self.workers = [started[number] for number in sorted(started)]
        if failures:
            self.close()
            raise failures[0]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(self.endpoints)}>"

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def endpoints(self) -> list[str]:
        """`HOST:PORT`, or `unix:PATH`, of each."""
        return [worker.endpoint for worker in self.workers]

    def close(self) -> None:
        """End them all, side by side. Idempotent."""
        closers = [threading.Thread(target=worker.close) for worker in self.workers]
        self.workers = []
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()


class LocalWorkers(_Several):
    """`n` workers on this machine, on ports of its loopback interface.

    Args:
        n: how many, each with one CPU device.
        threads: compute threads of each.
    """

    def __init__(self, n: int, threads: int = 1) -> None:
        super().__init__([partial(Worker, f"CPU:{threads}")] * n)


class LocalDevices(_Several):
    """A private worker for each of several devices of this machine.

    Args:
        devices: one of `caravan worker -d` each, as in `CPU:1`.
        threads: compute threads of CPU devices that name none.
    """

    def __init__(self, devices: Sequence[str], threads: int = 1) -> None:
        super().__init__(
            [partial(Worker, device, threads=threads, private=True) for device in devices]
        )


def _private_directory() -> str:
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > _LONGEST_BASE:
        base = "/tmp"
    return tempfile.mkdtemp(prefix="caravan-", dir=base)


def _plain(line: str) -> str:
    """A worker's own error line without its name in front."""
    for prefix in ("caravan: error: ", "caravan worker: "):
        if line.startswith(prefix):
            return line[len(prefix) :]
    return line
