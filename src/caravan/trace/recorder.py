"""`Recorder`: what a worker notes of one device: always totals, spans when somebody asked for them.

Whoever works for the device does it `with recorder.during(Kind.WAIT, size):`.
"""

from __future__ import annotations

from types import TracebackType

from caravan.trace.activity import COMPUTING, IDLE, SENDING, WAITING, Activity
from caravan.trace.spans import Kind, Span, Spans

# By kind. What is no use of the device's time by itself counts as idle.
_COUNTS_AS = [IDLE] * (max(Kind) + 1)
_COUNTS_AS[Kind.GRAPH] = COMPUTING
for _kind in (Kind.WAIT, Kind.SET, Kind.COPY_IN, Kind.LOAD):
    _COUNTS_AS[_kind] = WAITING
_COUNTS_AS[Kind.REPLY] = _COUNTS_AS[Kind.COPY_OUT] = SENDING


class Recorder:
    """See the module. Any thread may call."""

    __slots__ = ("activity", "spans")

    def __init__(self) -> None:
        self.activity = Activity()
        self.spans = Spans()

    def during(self, kind: Kind, size: int = 0, key: int = 0, detail: int = 0) -> During:
        """A context for what happens in it; see `Span` for the numbers."""
        return During(self, kind, size, key, detail)

    def switch(self, on: bool) -> None:
        """Start or stop keeping spans. What is left of an earlier recording goes."""
        if on and not self.spans.on:
            self.spans.take()
        self.spans.on = on


class During:
    """Something that is going on; counted and recorded also when it fails.

    Attributes:
        size: see `Span`; for those who learn it only while it goes on.
    """

    __slots__ = ("_activity", "_detail", "_key", "_kind", "_spans", "_start", "_what", "size")

    def __init__(self, recorder: Recorder, kind: Kind, size: int, key: int, detail: int) -> None:
        self.size = size
        self._activity = recorder.activity
        self._spans = recorder.spans
        self._what = _COUNTS_AS[kind]
        self._kind = kind
        self._key = key
        self._detail = detail
        self._start = 0

    def __enter__(self) -> During:
        self._start = self._activity.begin(self._what)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end = self._activity.end(self._what)
        if self._spans.on:
            span = Span(self._start, end, self._kind, self._detail, self.size, self._key)
            self._spans.add(span)
