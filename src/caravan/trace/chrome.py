"""`ChromeTrace`: a timeline in the JSON object format of Chrome and Perfetto (ui.perfetto.dev).

A process of the format is a machine, a thread of it a track. Times go in as nanoseconds of one
clock, and come out as microseconds since the first of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

Args = dict[str, int | float | str]


@dataclass(frozen=True, slots=True)
class Track:
    """A row: `pid` and `tid` are numbers of the file alone."""

    pid: int
    tid: int


class ChromeTrace:
    """Collects events; `write` puts them in order.

    Attributes:
        missing: what it does not show, for people.
        notes: further facts for the file.
    """

    def __init__(self) -> None:
        self._names: list[dict[str, Any]] = []
        # (time in ns, event): the time is filled in when the first one is known
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._tracks: dict[int, int] = {}
        self._arrows = 0
        self.missing: list[str] = []
        self.notes: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._events)

    def machine(self, name: str) -> int:
        """A new machine, below those that are there; its `pid`."""
        pid = len(self._tracks) + 1
        self._tracks[pid] = 0
        self._name(pid, 0, "process_name", name=name)
        self._name(pid, 0, "process_sort_index", sort_index=pid)
        return pid

    def track(self, pid: int, name: str) -> Track:
        """A new track of a machine, below those that it has."""
        self._tracks[pid] += 1
        tid = self._tracks[pid]
        self._name(pid, tid, "thread_name", name=name)
        self._name(pid, tid, "thread_sort_index", sort_index=tid)
        return Track(pid, tid)

    def span(self, track: Track, name: str, start: int, end: int, args: Args) -> None:
        """Something that took from `start` to `end`."""
        event = {"ph": "X", "name": name, "dur": max(0, end - start) / 1000, "args": args}
        self._add(track, start, event)

    def instant(self, track: Track, name: str, at: int, args: Args) -> None:
        """Something that took no time."""
        self._add(track, at, {"ph": "i", "name": name, "s": "t", "args": args})

    def arrow(self, name: str, source: Track, left: int, target: Track, arrived: int) -> None:
        """From the span of `source` that goes on at `left` to that of `target` at `arrived`."""
        self._arrows += 1
        same = {"cat": name, "name": name, "id": self._arrows}
        self._add(source, left, {"ph": "s", **same})
        self._add(target, max(left, arrived), {"ph": "f", "bp": "e", **same})

    def write(self, out: TextIO) -> None:
        """The whole file."""
        out.write('{"displayTimeUnit": "ms",\n"otherData": ')
        json.dump({"notes": self.missing, **self.notes}, out)
        out.write(',\n"traceEvents": [')
        for number, event in enumerate(self._ordered()):
            out.write(",\n" if number else "\n")
            json.dump(event, out)
        out.write("\n]}\n")

    def _ordered(self) -> Iterator[dict[str, Any]]:
        yield from self._names
        self._events.sort(key=lambda item: item[0])
        first = self._events[0][0] if self._events else 0
        for at, event in self._events:
            yield {**event, "ts": (at - first) / 1000}

    def _name(self, pid: int, tid: int, kind: str, **args: int | str) -> None:
        self._names.append({"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args})

    def _add(self, track: Track, at: int, event: dict[str, Any]) -> None:
        self._events.append((at, {**event, "pid": track.pid, "tid": track.tid}))
