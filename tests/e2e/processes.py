"""What the fault tests share: commands as child processes, their families, peers that misbehave."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

# An upper bound that says "it hangs", far above what anything here takes.
BOUND = 25.0


def wait_for(condition: Callable[[], object], timeout: float = BOUND) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


def family(pid: int) -> list[int]:
    """The descendants of a process."""
    return [member for child in children(pid) for member in (child, *family(child))]


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


class HasPid(Protocol):
    """A worker, or its process."""

    @property
    def pid(self) -> int: ...


def session_of(worker: HasPid) -> int:
    """The process that serves its head: it has more connections than the spare, which has none."""
    return max(children(worker.pid), key=descriptors)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    assert pid > 0, "that would be the tests' own process group"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "caravan", *arguments]


def caravan(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Run the command to its end."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.run(command(*arguments), timeout=60, **options)


def assert_one_line(done: subprocess.CompletedProcess, *words: str) -> None:
    """It failed as it should: exit code 1, one line on stderr that has `words`."""
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (1, 1), (done.returncode, done.stderr)
    assert lines[0].startswith("caravan: error: "), lines
    for word in words:
        assert word in lines[0], lines


class Command:
    """A running command with a family, all of which must end with it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.family: set[int] = set()
        self.lines: list[str] = []
        self.text = ""
        self._readers = [
            threading.Thread(target=self._read_errors),
            threading.Thread(target=self._read_text),
        ]
        for reader in self._readers:
            reader.start()

    def _read_errors(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def _read_text(self) -> None:
        while text := self.process.stdout.read(1):
            self.text += text

    def meet_family(self) -> list[int]:
        self.family.update(family(self.process.pid))
        return sorted(self.family)

    def says(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def interrupt(self) -> None:
        self.meet_family()
        kill(self.process.pid, signal.SIGINT)

    def finish(self) -> int:
        """Its exit code; everything that it started has ended too."""
        code = self.process.wait(BOUND)
        wait_for(lambda: not any(map(alive, self.family)), 10.0)
        for reader in self._readers:
            reader.join(BOUND)
        return code


@contextmanager
def running(*arguments: str) -> Iterator[Command]:
    started = Command(arguments)
    try:
        yield started
    finally:
        for pid in (started.process.pid, *started.meet_family()):
            if alive(pid):
                kill(pid)
        started.finish()
        for pipe in (started.process.stdout, started.process.stderr):
            pipe.close()


@contextmanager
def peer(answer: bytes | None) -> Iterator[str]:
    """A listener that answers every client's first words with `answer`; None: with silence."""
    clients: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                clients.append(client)
                if answer is not None:
                    client.recv(4096)
                    client.sendall(answer)
                    client.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for client in clients:
                client.close()


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"
