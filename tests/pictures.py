"""Reading a trace back, and what must hold of every one."""

from __future__ import annotations

import io
import json
from typing import Any

from caravan.trace.chrome import ChromeTrace

Event = dict[str, Any]


def written(trace: ChromeTrace) -> Event:
    """What the file of a trace holds."""
    out = io.StringIO()
    trace.write(out)
    read: Event = json.loads(out.getvalue())
    return read


def check(read: Event) -> None:
    """Every span has a place and a time, every track a name, and none overlaps another badly."""
    events = read["traceEvents"]
    names = track_names(read)
    spans = [event for event in events if event["ph"] == "X"]
    for event in events:
        assert event["ph"] in "XMisf"
        if event["ph"] != "M":
            assert (event["pid"], event["tid"]) in names
            assert event["ts"] >= 0
    for event in spans:
        assert event["dur"] >= 0
    for place in names:
        open_ends: list[float] = []
        here = [span for span in spans if (span["pid"], span["tid"]) == place]
        for span in sorted(here, key=lambda span: (span["ts"], -span["dur"])):
            start, end = span["ts"], round(span["ts"] + span["dur"], 3)
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], (names[place], span)
            open_ends.append(end)
    check_arrows(events)


def check_arrows(events: list[Event]) -> None:
    """Each begins and ends once, and never goes back in time."""
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    for number, begin in begins.items():
        assert begin["ts"] <= ends[number]["ts"]
        assert (begin["cat"], begin["name"]) == (ends[number]["cat"], ends[number]["name"])


def track_names(read: Event) -> dict[tuple[int, int], str]:
    """(pid, tid) of every track, and what it is called."""
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in read["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }


def machine_names(read: Event) -> list[str]:
    return [
        event["args"]["name"]
        for event in read["traceEvents"]
        if event["ph"] == "M" and event["name"] == "process_name"
    ]


def on_track(read: Event, name: str) -> list[Event]:
    """The spans of the track of that name, in order."""
    (place,) = [place for place, found in track_names(read).items() if found == name]
    spans = [
        event
        for event in read["traceEvents"]
        if event["ph"] == "X" and (event["pid"], event["tid"]) == place
    ]
    return sorted(spans, key=lambda span: float(span["ts"]))
