"""`WatchedWorker`: one worker whose timeline is being recorded: asked for it now and then.

A worker that fails costs its own part of the timeline from then on, never the run.
"""

from __future__ import annotations

from caravan.backend.device import RemoteDevice
from caravan.errors import CaravanError, RemoteError
from caravan.stream.dispatcher import Stream
from caravan.stream.telemetry import ask_clock, ask_timeline
from caravan.trace.clock import Alignment, Reading
from caravan.trace.draw import DeviceRecord, WorkerRecord
from caravan.trace.head import HeadRecorder

# An answer that takes longer does not hold up the end of a run.
_PATIENCE = 5.0
# Spans that are kept of each device, the newest ones.
_MOST_SPANS = 1 << 18


class WatchedWorker:
    """The devices of one worker, from `begin` to `end`.

    Attributes:
        record: what is known so far.
    """

    def __init__(self, devices: list[RemoteDevice]) -> None:
        # those of this session: another one, after a loss, would have another clock
        self._streams = [device.link.stream for device in devices]
        self._extension = devices[0].link.extension
        self._records = [DeviceRecord(device.name) for device in devices]
        self._first: Reading | None = None
        self.record = WorkerRecord(devices[0].endpoint, self._records)

    def begin(self, recorder: HeadRecorder) -> None:
        """Note the traffic with it, read its clock, and let it record."""
        for stream in dict.fromkeys(self._streams):
            _note_traffic(stream, recorder)
        if not self._extension:
            self._note("speaks llama.cpp's protocol, which has no timelines")
            return
        try:
            self._first = ask_clock(self._streams[0], _PATIENCE)
            self.record.alignment = Alignment(self._first)
            for stream in self._streams:
                ask_timeline(stream, True, _PATIENCE)
        except RemoteError:
            self._first = None
            self._note("is of a version without timelines")
        except CaravanError as exc:
            self._note(f"gave no timeline: {exc}")

    def collect(self, on: bool = True) -> None:
        """Take over what it has recorded."""
        if self._first is None:
            return
        for stream, record in zip(self._streams, self._records, strict=True):
            try:
                spans, dropped = ask_timeline(stream, on, _PATIENCE)
            except CaravanError:
                # the run says what happened to the worker
                self._first = None
                self._note("was lost: its timeline ends before the run did")
                return
            record.dropped += dropped
            record.spans += spans
            surplus = len(record.spans) - _MOST_SPANS
            if surplus > 0:
                del record.spans[:surplus]
                record.dropped += surplus

    def end(self) -> None:
        """Take over the rest; it stops recording."""
        self.collect(False)
        if self._first is None:
            return
        try:
            last = ask_clock(self._streams[0], _PATIENCE)
        except CaravanError:
            return
        self.record.alignment = Alignment(self._first, last)

    def _note(self, text: str) -> None:
        self.record.notes.append(f"{self.record.endpoint} {text}")


def _note_traffic(stream: Stream, recorder: HeadRecorder) -> None:
    """Every send and every arrival, on tracks of the head."""
    outward, inward = f"to {stream.device}", f"from {stream.device}"

    def sent(start: int, size: int) -> None:
        recorder.add(outward, "send", start, size=size)

    def received(at: int, size: int) -> None:
        recorder.add(inward, "arrival", at, at, size=size)

    stream.record(sent, received)
