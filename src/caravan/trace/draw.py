"""From what was recorded to a `ChromeTrace`: machines, tracks, spans, arrows.

Pure: the records of the head and of the workers go in as values, and a picture comes out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from caravan.trace.chrome import Args, ChromeTrace, Track
from caravan.trace.clock import Alignment
from caravan.trace.head import HeadRecorder, HeadSpan
from caravan.trace.spans import Kind, Span

GRAPH_CALL = "backend.graph_compute"
ENGINE_CALL = "decode"

# on which of its device's tracks a span lies: the device itself, or who works beside it
_TRACKS = {
    "": (Kind.GRAPH, Kind.WAIT, Kind.COPY_IN, Kind.COPY),
    " in": (Kind.SET, Kind.LOAD),
    " builds": (Kind.BUILD,),
    " out": (Kind.REPLY, Kind.COPY_OUT),
}
_NAMES = {
    Kind.GRAPH: "graph",
    Kind.BUILD: "build graph",
    Kind.SET: "receive",
    Kind.REPLY: "reply",
    Kind.COPY_OUT: "copy out",
    Kind.COPY_IN: "copy in",
    Kind.WAIT: "wait for input",
    Kind.COPY: "copy within",
    Kind.LOAD: "load from disk",
}


@dataclass(slots=True)
class DeviceRecord:
    """What a worker recorded of one device, in its own time; `dropped`: spans that are missing."""

    name: str
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0


@dataclass(slots=True)
class WorkerRecord:
    """One worker. `alignment` is None where its clock is not known; then it has no spans."""

    endpoint: str
    devices: list[DeviceRecord]
    alignment: Alignment | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A span of a worker where it was drawn, in the head's time."""

    track: Track
    start: int
    span: Span


def draw(recorder: HeadRecorder, workers: Sequence[WorkerRecord]) -> ChromeTrace:
    """Everything as one picture; what is missing is said in its notes."""
    trace = ChromeTrace()
    calls = _draw_head(trace, recorder)
    sources: dict[tuple[int, int], _Drawn] = {}
    targets: dict[tuple[int, int], _Drawn] = {}
    for worker in workers:
        drawn = _draw_worker(trace, worker, calls)
        for one in drawn:
            place = (one.span.detail, one.span.key)
            if one.span.kind == Kind.COPY_OUT and one.span.key:
                sources[place] = one
            elif one.span.kind == Kind.COPY_IN and one.span.key:
                targets[place] = one
    for place, source in sources.items():
        if place in targets:
            target = targets[place]
            trace.arrow("copy", source.track, source.start, target.track, target.start)
    _say_what_is_missing(trace, recorder, workers)
    return trace


@dataclass(slots=True)
class _GraphCall:
    """A graph as this head sent it off; `ubatch` is -1 where that is not known."""

    track: Track
    start: int
    ubatch: int = -1


def _draw_head(trace: ChromeTrace, recorder: HeadRecorder) -> dict[str, list[_GraphCall]]:
    """The head's own tracks; for every device, its graphs in the order in which they were sent."""
    pid = trace.machine("head")
    spans = sorted(recorder.spans, key=lambda span: (span.start, -span.end))
    tracks: dict[int | str, Track] = {}
    for place in _ordered({span.track for span in spans}):
        name = f"callbacks ({recorder.threads[place]})" if isinstance(place, int) else place
        tracks[place] = trace.track(pid, name)
    calls: dict[str, list[_GraphCall]] = defaultdict(list)
    current: dict[int | str, tuple[int, dict[str, list[_GraphCall]]]] = {}
    for span in spans:
        track = tracks[span.track]
        _draw_call(trace, track, span)
        if span.name == ENGINE_CALL:
            _number(current.get(span.track))
            current[span.track] = (span.end, defaultdict(list))
        elif span.name == GRAPH_CALL:
            call = _GraphCall(track, span.start)
            calls[span.device].append(call)
            end, inside = current.get(span.track, (0, {}))
            if span.end <= end:
                inside[span.device].append(call)
    for entry in current.values():
        _number(entry)
    return calls


def _ordered(places: Iterable[int | str]) -> list[int | str]:
    """Threads first, then the streams by name: RPC2 before RPC10."""
    return sorted(places, key=lambda place: (isinstance(place, str), len(str(place)), str(place)))


def _draw_call(trace: ChromeTrace, track: Track, span: HeadSpan) -> None:
    args: Args = {"device": span.device} if span.device else {}
    if span.size:
        args["tokens" if span.name == ENGINE_CALL else "bytes"] = span.size
    if span.start == span.end:
        trace.instant(track, span.name, span.start, args)
    else:
        trace.span(track, span.name, span.start, span.end, args)


def _number(entry: tuple[int, dict[str, list[_GraphCall]]] | None) -> None:
    """Say which micro-batch each graph of a call of the engine belongs to.

    The engine does not tell. But where every device got as many graphs, there was one for each;
    if it was one, as in a decode step, there is nothing to tell apart.
    """
    inside = entry[1] if entry else {}
    counts = {len(graphs) for graphs in inside.values()}
    if len(counts) == 1 and counts != {1}:
        for graphs in inside.values():
            for ubatch, graph in enumerate(graphs):
                graph.ubatch = ubatch


def _draw_worker(
    trace: ChromeTrace, worker: WorkerRecord, calls: dict[str, list[_GraphCall]]
) -> list[_Drawn]:
    names = ", ".join(device.name for device in worker.devices)
    nothing = ": no timeline" if worker.alignment is None else ""
    pid = trace.machine(f"worker {worker.endpoint} ({names}){nothing}")
    if worker.alignment is None:
        return []
    drawn = []
    for device in worker.devices:
        graphs = calls.get(device.name, [])
        computed = sum(span.kind == Kind.GRAPH for span in device.spans)
        # both count in order, so one that is missing would make all later ones wrong
        known = iter(graphs if computed == len(graphs) else ())
        for suffix, kinds in _TRACKS.items():
            rows = _Rows(trace, pid, device.name + suffix)
            if not suffix:
                rows.row(0)
            spans = [span for span in device.spans if span.kind in kinds]
            for span in sorted(spans, key=lambda span: span.start):
                call = next(known, None) if span.kind == Kind.GRAPH else None
                drawn.append(_draw_span(trace, rows, worker.alignment, span, call))
    return drawn


def _draw_span(
    trace: ChromeTrace,
    rows: _Rows,
    alignment: Alignment,
    span: Span,
    call: _GraphCall | None,
) -> _Drawn:
    start, end = alignment.to_head(span.start), alignment.to_head(span.end)
    track = rows.place(start, end)
    name = _NAMES[Kind(span.kind)]
    args = _args(span)
    if call is not None and call.ubatch >= 0:
        args["ubatch"] = call.ubatch
        name = f"graph {call.ubatch}"
    trace.span(track, name, start, end, args)
    if call is not None:
        trace.arrow("graph", call.track, call.start, track, start)
    return _Drawn(track, start, span)


def _args(span: Span) -> Args:
    if span.kind == Kind.GRAPH:
        return {"uid": span.key, "nodes": span.detail}
    if span.kind == Kind.BUILD:
        return {"nodes": span.detail}
    args: Args = {"bytes": span.size}
    if span.key:
        args.update(ticket=span.key, route=span.detail)
    return args


class _Rows:
    """The tracks for one sort of spans; several where they overlap, which a track cannot show."""

    def __init__(self, trace: ChromeTrace, pid: int, name: str) -> None:
        self._trace = trace
        self._pid = pid
        self._name = name
        self._tracks: list[Track] = []
        self._free: list[int] = []

    def place(self, start: int, end: int) -> Track:
        """The first track that is free at `start`; spans come in the order of their starts."""
        number = next((n for n, free in enumerate(self._free) if free <= start), len(self._free))
        track = self.row(number)
        self._free[number] = max(start, end)
        return track

    def row(self, number: int) -> Track:
        if number == len(self._tracks):
            name = self._name if not number else f"{self._name} {number + 1}"
            self._tracks.append(self._trace.track(self._pid, name))
            self._free.append(-(1 << 63))
        return self._tracks[number]


def _say_what_is_missing(
    trace: ChromeTrace, recorder: HeadRecorder, workers: Sequence[WorkerRecord]
) -> None:
    notes = [note for worker in workers for note in worker.notes]
    dropped = {device.name: device.dropped for worker in workers for device in worker.devices}
    for name, count in {"head": recorder.dropped, **dropped}.items():
        if count:
            notes.append(f"{name}: the {count} oldest spans did not fit")
    trace.missing = notes
    trace.notes["clocks"] = {
        worker.endpoint: {"uncertainty_us": worker.alignment.uncertainty / 1000}
        for worker in workers
        if worker.alignment is not None
    }
