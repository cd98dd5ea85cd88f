"""What this head itself does, for the timeline: callbacks of the engine, calls into it, sends.

One recorder for the process, as the plug-in is one. While nobody wants a timeline, `recording` is
None and nothing here costs anything; what has to be wrapped looks at it when it is set up.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import NamedTuple

LIMIT = 1 << 18


class HeadSpan(NamedTuple):
    """One record.

    Attributes:
        start, end: nanoseconds of time.perf_counter_ns.
        track: the thread that did it, or a text such as `send RPC0`.
        name: what, such as `backend.graph_compute`.
        device: the device concerned, if it is one's.
        size: bytes or tokens.
    """

    start: int
    end: int
    track: int | str
    name: str
    device: str
    size: int


class HeadRecorder:
    """A ring of the newest spans. Any thread may add.

    Attributes:
        threads: names of the threads that added spans, by the number in `HeadSpan.track`.
        dropped: spans that had to make room, to the nearest few.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.spans: deque[HeadSpan] = deque(maxlen=limit)
        self.threads: dict[int, str] = {}
        self.dropped = 0

    def add(
        self,
        track: int | str,
        name: str,
        start: int,
        end: int | None = None,
        device: str = "",
        size: int = 0,
    ) -> None:
        """Something that began at `start` and ended at `end`, or ends now."""
        if len(self.spans) == self.spans.maxlen:
            self.dropped += 1
        ended = time.perf_counter_ns() if end is None else end
        self.spans.append(HeadSpan(start, ended, track, name, device, size))

    def here(self) -> int:
        """The track of the calling thread."""
        ident = threading.get_ident()
        if ident not in self.threads:
            self.threads[ident] = threading.current_thread().name
        return ident


recording: HeadRecorder | None = None


def start() -> HeadRecorder:
    """Record from now on."""
    global recording
    recording = HeadRecorder()
    return recording


def stop() -> None:
    """Record no more."""
    global recording
    recording = None


class _Call:
    """A `call` that is going on."""

    def __init__(self, recorder: HeadRecorder, name: str, size: int) -> None:
        self._recorder = recorder
        self._name = name
        self._size = size
        self._start = 0

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._recorder.add(self._recorder.here(), self._name, self._start, size=self._size)


_NOTHING: AbstractContextManager[None] = nullcontext()


def call(name: str, size: int = 0) -> AbstractContextManager[None]:
    """Around a call into the engine: a span on the track of the caller's thread."""
    return _NOTHING if recording is None else _Call(recording, name, size)
