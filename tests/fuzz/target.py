"""The live worker under attack: its processes, what they hold, and a head that behaves."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np

from caravan.wire.commands import Ext
from caravan.worker.local import Worker
from worker.raw_client import BaseClient, ExtClient, linear_records, linear_rows

# A graph that asks for too much shall not take the machine along.
_ADDRESS_SPACE = 16 << 30
_MEMORY = 256 << 20
_BOUND = 60.0
_DEATH = re.compile(r"session process (\d+) died by signal (\w+)")


class Finding(Exception):
    """What must not happen has."""


class Heard(Worker):
    """A worker all of whose messages are kept."""

    def __init__(self, devices: str, options: tuple[str, ...]) -> None:
        self.heard: list[str] = []
        super().__init__(devices, options=options)

    def _read_errors(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                self.heard.append(line.rstrip("\n"))


class Control:
    """A head that behaves, on a session of its own: what it computes never changes by a bit."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.client = ExtClient(endpoint, timeout=_BOUND)
        _, self._base = self.client.alloc(1 << 16)
        rows, self._at = linear_rows(self._base)
        self.client.graph(rows, 2, uid=7)
        rng = np.random.default_rng(1)
        self._data = {n: rng.standard_normal(s, np.float32) for n, s in _SHAPES.items()}
        self._expected = self._compute()

    def _compute(self) -> bytes:
        client, base, at = self.client, self._base, self._at
        client.post(Ext.MEMSET, base + at["y"], 48, 0)
        for name, data in self._data.items():
            client.set(base + at[name], data.tobytes())
        client.post(Ext.GRAPH_RECOMPUTE, 7)
        return client.get(base + at["y"], 48)

    def check(self) -> None:
        """Raises Finding unless it gets what it got at first, in both protocols."""
        try:
            results = [self._compute(), self._base_result()]
        except Exception as exc:
            raise Finding(f"the head that behaves: {type(exc).__name__}: {exc}") from exc
        if any(result != self._expected for result in results):
            raise Finding("the head that behaves got another result")

    def _base_result(self) -> bytes:
        with BaseClient(self._endpoint, timeout=_BOUND) as client:
            handle, base = client.alloc(1 << 16)
            nodes, parts = linear_records(handle, base)
            for name, data in self._data.items():
                client.set(parts[name], data.tobytes())
            client.graph(nodes, list(parts.values()), uid=1)
            return client.get(parts["y"], 48)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.client.post(Ext.BYE)
        self.client.close()


_SHAPES = {"w": (4, 8), "x": (3, 8), "b": (4,)}


class Target:
    """A worker, and what is looked at after every piece.

    Attributes:
        deaths: of session processes so far, by signal.
    """

    def __init__(self, folder: Path) -> None:
        options = ("--cache", str(folder / "cache"), "--cache-size", "64MiB")
        limit = ("--max-memory", f"{_MEMORY >> 20}MiB")
        self.worker = Heard("CPU:1,CPU:1", (*options, *limit))
        self.deaths: Counter[str] = Counter()
        self._read = 0
        for pid in (self.worker.pid, *self.children()):
            resource.prlimit(pid, resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
        self.control = Control(self.endpoint)
        self.control.check()
        self.settle()
        self._files = self._descriptors()
        self.first_size = self.size()

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *exc: object) -> None:
        self.control.close()
        self.worker.close()

    @property
    def endpoint(self) -> str:
        return self.worker.endpoint

    def children(self) -> list[int]:
        pid = self.worker.pid
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def size(self) -> int:
        """The supervisor's memory, bytes."""
        words = Path(f"/proc/{self.worker.pid}/statm").read_text().split()
        return int(words[1]) * os.sysconf("SC_PAGE_SIZE")

    def _descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.worker.pid}/fd"))

    def news(self) -> list[str]:
        """What the worker has said since the last time; counts deaths."""
        lines = self.worker.heard[self._read :]
        self._read += len(lines)
        for line in lines:
            if death := _DEATH.search(line):
                self.deaths[death[2]] += 1
        return lines

    def settle(self) -> None:
        """Wait for the ends of sessions: only the control's and a spare process are left."""
        deadline = time.monotonic() + _BOUND
        while len(self.children()) > 2:
            if time.monotonic() > deadline:
                raise Finding(f"session processes are left: {self.children()}")
            time.sleep(0.01)

    def check(self) -> None:
        """Raises Finding for anything that the worker has lost or kept."""
        if not Path(f"/proc/{self.worker.pid}/fd").exists():
            raise Finding("the worker has ended")
        # the memory of sessions that are ending is still theirs
        self.settle()
        self.control.check()
        self.settle()
        if (files := self._descriptors()) > self._files + 1:
            raise Finding(f"the supervisor has {files} files open, and had {self._files}")
        if (size := self.size()) > self.first_size + (8 << 20):
            raise Finding(f"the supervisor has {size >> 10} KiB, and had {self.first_size >> 10}")
        self._check_memory()

    def _check_memory(self) -> None:
        """Of each device, all but the control's 64 KiB is to be had."""
        with ExtClient(self.endpoint, timeout=_BOUND) as client:
            free, _ = client.call(Ext.MEMORY)
            client.post(Ext.BYE)
        if free < _MEMORY - (1 << 20):
            raise Finding(f"{_MEMORY - free} bytes of the device's memory are missing")
