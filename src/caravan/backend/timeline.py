"""`Timeline`: records what a cluster's workers and this head do, and writes one file of it.

    with Timeline("trace.json") as timeline:
        with connect(endpoints) as cluster, timeline.watching(cluster):
            ...

It begins before the workers are connected, so that the engine's callbacks are recorded too, and the
file is written at the end, whatever ended it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from caravan.backend.cluster import Cluster
from caravan.backend.device import RemoteDevice
from caravan.backend.watched import WatchedWorker
from caravan.trace import head
from caravan.trace.draw import draw
from caravan.trace.output import OutputFile

_INTERVAL = 1.0


class Timeline:
    """One for the process at a time. Raises UsageError if `path` cannot be written.

    Attributes:
        notes: once it is closed, what the file does not show.
    """

    def __init__(self, path: str | Path) -> None:
        self.notes: list[str] = []
        self._file = OutputFile(path)
        self._workers: list[WatchedWorker] = []
        self._recorder = head.start()
        self._closed = False

    def __enter__(self) -> Timeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def watching(self, cluster: Cluster) -> Iterator[None]:
        """Record the cluster's workers until the context is left."""
        workers = [WatchedWorker(devices) for devices in _by_worker(cluster)]
        self._workers += workers
        for worker in workers:
            worker.begin(self._recorder)
        collector = _Collector(workers)
        try:
            yield
        finally:
            collector.close()
            for worker in workers:
                worker.end()

    def close(self) -> None:
        """Stop, and write the file; raises CaravanError if it cannot be any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if head.recording is self._recorder:
            head.stop()
        try:
            trace = draw(self._recorder, [worker.record for worker in self._workers])
            self.notes = trace.missing
            self._file.write(trace.write)
        finally:
            self._file.close()


class _Collector:
    """A thread that asks workers for their spans before they have to drop them."""

    def __init__(self, workers: list[WatchedWorker]) -> None:
        self._workers = workers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caravan-timeline", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL):
            for worker in self._workers:
                worker.collect()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def _by_worker(cluster: Cluster) -> list[list[RemoteDevice]]:
    groups: dict[str, list[RemoteDevice]] = {}
    for device in cluster.devices:
        groups.setdefault(device.endpoint, []).append(device)
    return list(groups.values())
