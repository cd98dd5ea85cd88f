"""What a picture shows of given records, and what it says that it does not show."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from caravan.trace.clock import Alignment, Reading
from caravan.trace.draw import DeviceRecord, WorkerRecord, draw
from caravan.trace.head import HeadRecorder
from caravan.trace.spans import Kind, Span
from pictures import check, machine_names, on_track, track_names, written

MAIN = 1
GRAPH_CALL = "backend.graph_compute"


def head_of(*calls: tuple[str, int, int, str, int]) -> HeadRecorder:
    recorder = HeadRecorder()
    recorder.threads[MAIN] = "MainThread"
    for name, start, end, device, size in calls:
        recorder.add(MAIN, name, start, end, device, size)
    return recorder


def worker_of(name: str, *spans: Span, ahead: int = 0) -> WorkerRecord:
    alignment = Alignment(Reading(0, ahead, 10))
    return WorkerRecord(f"{name}:1", [DeviceRecord(name, list(spans))], alignment)


def graph(start: int, end: int, uid: int = 5) -> Span:
    return Span(start, end, Kind.GRAPH, 30, 0, uid)


def test_a_workers_times_are_shown_on_the_heads_clock() -> None:
    head = head_of(("decode", 1000, 9000, "", 64))
    read = written(draw(head, [worker_of("RPC0", graph(502_000, 503_500), ahead=500_000)]))
    check(read)
    (span,) = on_track(read, "RPC0")
    assert (span["ts"], span["dur"]) == (1.0, 1.5)
    assert span["args"] == {"uid": 5, "nodes": 30}
    assert on_track(read, "callbacks (MainThread)")[0]["args"] == {"tokens": 64}
    assert machine_names(read) == ["head", "worker RPC0:1 (RPC0)"]


def test_graphs_are_numbered_by_micro_batch_where_that_is_known() -> None:
    sent = [(GRAPH_CALL, at, at + 1, device, 0) for at in (10, 20, 30) for device in ("A", "B")]
    head = head_of(("decode", 0, 100, "", 96), *sent)
    graphs = [graph(at, at + 10) for at in (40, 50, 60)]
    read = written(draw(head, [worker_of("A", *graphs), worker_of("B", *graphs)]))
    check(read)
    for device in "AB":
        spans = on_track(read, device)
        assert [span["args"]["ubatch"] for span in spans] == [0, 1, 2]
        assert [span["name"] for span in spans] == ["graph 0", "graph 1", "graph 2"]
    assert sum(event["ph"] == "s" for event in read["traceEvents"]) == 6


def test_graphs_are_not_numbered_by_guesswork() -> None:
    one_more = [(GRAPH_CALL, at, at + 1, "A", 0) for at in (10, 20)]
    head = head_of(("decode", 0, 100, "", 96), *one_more, (GRAPH_CALL, 30, 31, "B", 0))
    uneven = draw(head, [worker_of("A", graph(40, 50), graph(50, 60)), worker_of("B", graph(0, 1))])
    lost = draw(head, [worker_of("A", graph(40, 50))])
    step = head_of(("decode", 0, 100, "", 1), (GRAPH_CALL, 10, 11, "A", 0))
    alone = draw(step, [worker_of("A", graph(40, 50))])
    for trace, arrows in ((uneven, 3), (lost, 0), (alone, 1)):
        read = written(trace)
        check(read)
        assert {span["name"] for span in on_track(read, "A")} == {"graph"}
        assert all("ubatch" not in event.get("args", {}) for event in read["traceEvents"])
        assert sum(event["ph"] == "s" for event in read["traceEvents"]) == arrows


def test_a_copy_is_an_arrow_from_where_it_left_to_where_it_came() -> None:
    out = Span(100, 200, Kind.COPY_OUT, 3, 4096, 77)
    other = Span(200, 300, Kind.COPY_OUT, 4, 4096, 77)
    came = Span(1250, 1300, Kind.COPY_IN, 3, 4096, 77)
    wait = Span(1000, 1250, Kind.WAIT, 3, 4096, 77)
    read = written(
        draw(head_of(), [worker_of("A", out, other), worker_of("B", wait, came, ahead=1000)])
    )
    check(read)
    (begin,) = [event for event in read["traceEvents"] if event["ph"] == "s"]
    (end,) = [event for event in read["traceEvents"] if event["ph"] == "f"]
    names = track_names(read)
    assert names[begin["pid"], begin["tid"]] == "A out"
    assert names[end["pid"], end["tid"]] == "B"
    # 0 is when B began to wait; its input left 100 ns after that and came 150 ns later
    assert (begin["ts"], end["ts"]) == (0.1, 0.25)
    assert on_track(read, "A out")[0]["args"] == {"bytes": 4096, "ticket": 77, "route": 3}
    assert [span["name"] for span in on_track(read, "B")] == ["wait for input", "copy in"]


def test_what_happens_at_the_same_time_gets_tracks_of_its_own() -> None:
    builds = [Span(start, start + 30, Kind.BUILD, 9, 0, 0) for start in (0, 10, 20, 40)]
    read = written(draw(head_of(), [worker_of("A", *builds, graph(5, 50))]))
    check(read)
    assert list(track_names(read).values()) == ["A", "A builds", "A builds 2", "A builds 3"]


def test_what_is_missing_is_said() -> None:
    head = head_of()
    head.dropped = 7
    mute = WorkerRecord("b:1", [DeviceRecord("B")], None, ["b:1 has no timeline"])
    full = worker_of("A", graph(0, 1))
    full.devices[0].dropped = 3
    trace = draw(head, [full, mute])
    assert trace.missing == [
        "b:1 has no timeline",
        "head: the 7 oldest spans did not fit",
        "A: the 3 oldest spans did not fit",
    ]
    read = written(trace)
    assert read["otherData"]["notes"] == trace.missing
    assert read["otherData"]["clocks"] == {"A:1": {"uncertainty_us": 0.01}}
    assert machine_names(read)[-1] == "worker b:1 (B): no timeline"


def test_a_picture_of_nothing_is_valid() -> None:
    check(written(draw(HeadRecorder(), [])))


times = st.integers(0, 10**6)
anything = st.builds(
    lambda start, length, kind, detail, size, key: Span(
        start, start + length, kind, detail, size, key
    ),
    times,
    times,
    st.sampled_from(Kind),
    st.integers(0, 3),
    times,
    st.integers(0, 3),
)


@given(st.lists(anything, max_size=20), st.lists(anything, max_size=20), times)
def test_any_records_give_a_valid_picture(one: list[Span], two: list[Span], ahead: int) -> None:
    head = head_of((GRAPH_CALL, 10, 11, "A", 0), ("decode", 5, 50, "", 1))
    check(written(draw(head, [worker_of("A", *one), worker_of("B", *two, ahead=ahead)])))
