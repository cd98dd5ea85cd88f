"""`Timeline`: records what workers and this head do, and writes one file of it at the end.

    with Timeline("trace.json"), connect(endpoints) as cluster:
        ...

Every cluster that is connected while it is open is recorded. The file is written whatever ended the
run; what a lost worker had told by then is in it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from caravan.backend.device import RemoteDevice
from caravan.backend.watched import WatchedWorker
from caravan.errors import CaravanError, UsageError
from caravan.trace import head
from caravan.trace.draw import draw
from caravan.trace.output import OutputFile

_INTERVAL = 1.0


class Timeline:
    """See the module. One at a time; to be entered once.

    Entering raises UsageError if the file cannot be written, leaving raises CaravanError if it
    cannot any more and nothing else was raised.

    Attributes:
        path: of the file, in the JSON format of Chrome's tracing and of Perfetto.
        notes: once it is written, what it does not show.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.notes: list[str] = []
        self._workers: list[WatchedWorker] = []

    def __enter__(self) -> Timeline:
        global _current
        if _current is not None:
            raise UsageError(f"a timeline is being recorded already, to {_current.path}")
        self._file = OutputFile(self.path)
        self._recorder = head.start()
        _current = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _current
        _current = None
        head.stop()
        try:
            trace = draw(self._recorder, [worker.record for worker in self._workers])
            self.notes = trace.missing
            self._file.write(trace.write)
        except CaravanError:
            # what ended the run is the news
            if value is None:
                raise
        finally:
            self._file.close()

    def watch(self, devices: Sequence[RemoteDevice]) -> Watch:
        """Record the workers of these devices until the watch is closed."""
        groups: dict[str, list[RemoteDevice]] = {}
        for device in devices:
            groups.setdefault(device.endpoint, []).append(device)
        workers = [WatchedWorker(group) for group in groups.values()]
        self._workers += workers
        for worker in workers:
            worker.begin(self._recorder)
        return Watch(workers)


class Watch:
    """Asks workers for their spans now and then, before they have to drop them."""

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
        """Take over the rest, and let the workers stop recording. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        for worker in self._workers:
            worker.end()


_current: Timeline | None = None


def watch(devices: Sequence[RemoteDevice]) -> Watch | None:
    """Record these devices, if a timeline is being recorded."""
    return None if _current is None else _current.watch(devices)
