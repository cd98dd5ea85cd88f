"""A timeline of real workers and a real prompt: whole, in order, and free when nobody wants one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

import caravan
from caravan.backend import device, timeline, watched
from caravan.backend.timeline import Timeline
from caravan.errors import UsageError, WorkerLost
from caravan.stream import delivery
from caravan.trace import head
from caravan.trace.spans import Kind
from pictures import Event, check, machine_names, on_track, track_names
from wired import wait_until

N_TOKENS, N_UBATCH = 96, 16
PARAMS = caravan.ContextParams(n_ctx=128, n_ubatch=N_UBATCH)


@pytest.fixture(scope="module")
def endpoints() -> Iterator[list[str]]:
    with caravan.LocalWorkers(2, threads=1) as workers:
        yield workers.endpoints


def prompt(cluster: caravan.Cluster, path: Path, repetitions: int = 1) -> None:
    with (
        caravan.Model(path, devices=cluster.devices) as model,
        caravan.Context(model, PARAMS) as context,
    ):
        for _ in range(repetitions):
            context.clear()
            context.decode([37 * n % model.n_vocab for n in range(N_TOKENS)])
            context.synchronize()
        context.decode_one(5)
        context.logits()


def read(path: Path) -> Event:
    found: Event = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def recorded(endpoints: list[str], smollm2: Path, tmp_path_factory) -> Event:
    """A prompt of six micro-batches and a decode step, over two workers."""
    path = tmp_path_factory.mktemp("timeline") / "t.json"
    with Timeline(path) as recording, caravan.connect(endpoints) as cluster:
        prompt(cluster, smollm2)
    assert recording.notes == []
    return read(path)


def test_it_is_valid(recorded: Event, endpoints: list[str]) -> None:
    check(recorded)
    assert machine_names(recorded) == [
        "head",
        f"worker {endpoints[0]} (RPC0)",
        f"worker {endpoints[1]} (RPC1)",
    ]
    names = set(track_names(recorded).values())
    assert {"RPC0", "RPC1", "RPC0 in", "to RPC0", "from RPC1", "callbacks (MainThread)"} <= names


def graphs(recorded: Event, device: str) -> list[Event]:
    return [span for span in on_track(recorded, device) if span["name"].startswith("graph")]


@pytest.mark.parametrize("device", ["RPC0", "RPC1"])
def test_every_graph_is_there_and_none_overlaps_another(recorded: Event, device: str) -> None:
    found = graphs(recorded, device)
    expected = [*range(N_TOKENS // N_UBATCH), None]
    assert [span["args"].get("ubatch") for span in found] == expected
    assert all(span["args"]["nodes"] > 100 for span in found)
    for one, other in pairwise(found):
        assert one["ts"] + one["dur"] <= other["ts"]


def test_no_graph_starts_before_its_input_was_computed(recorded: Event) -> None:
    doubt = sum(clock["uncertainty_us"] for clock in recorded["otherData"]["clocks"].values())
    for one, two in zip(graphs(recorded, "RPC0"), graphs(recorded, "RPC1"), strict=True):
        assert one["ts"] + one["dur"] <= two["ts"] + doubt


def test_no_graph_starts_before_it_was_sent(recorded: Event) -> None:
    calls = [
        span
        for span in on_track(recorded, "callbacks (MainThread)")
        if span["name"] == "backend.graph_compute" and span["args"]["device"] == "RPC0"
    ]
    doubt = max(clock["uncertainty_us"] for clock in recorded["otherData"]["clocks"].values())
    for call, graph in zip(calls, graphs(recorded, "RPC0"), strict=True):
        assert call["ts"] <= graph["ts"] + doubt


def test_the_two_stages_work_at_the_same_time(recorded: Event) -> None:
    first, last = graphs(recorded, "RPC0")[:-1], graphs(recorded, "RPC1")[:-1]
    # had they taken turns, the second would have started its first when the first was through
    assert last[0]["ts"] < first[-1]["ts"]


def test_calls_of_the_engine_hold_its_callbacks(recorded: Event) -> None:
    spans = on_track(recorded, "callbacks (MainThread)")
    decodes = [span for span in spans if span["name"] == "decode"]
    assert [span["args"]["tokens"] for span in decodes] == [N_TOKENS, 1]
    for decode in decodes:
        inside = [
            span["name"]
            for span in spans
            if decode["ts"] <= span["ts"] and span["ts"] <= decode["ts"] + decode["dur"]
        ]
        assert inside.count("backend.graph_compute") in (2, 2 * N_TOKENS // N_UBATCH)


def test_lookups_are_left_out(recorded: Event) -> None:
    names = {span["name"] for span in on_track(recorded, "callbacks (MainThread)")}
    assert {"backend.graph_compute", "backend.cpy_tensor_async", "buffer.set_tensor"} <= names
    assert not names & {"device.supports_buft", "buffer_type.get_name", "backend.get_name"}


def test_without_a_timeline_nothing_is_asked_or_kept(
    endpoints: list[str], smollm2: Path, tmp_path: Path, monkeypatch
) -> None:
    """A recorded run sends the same commands as one that is not, and the questions of its own."""
    monkeypatch.setattr(timeline, "_INTERVAL", 1000.0)
    # how many commands there are else depends on how fast they are
    monkeypatch.setattr(delivery, "_MOST_PIECE", delivery.PIECE)
    monkeypatch.setattr(device, "_MEMORY_SECONDS", 1000.0)
    questions: list[str] = []
    for name in ("ask_clock", "ask_timeline"):
        asked = getattr(watched, name)
        monkeypatch.setattr(
            watched, name, lambda *args, asked=asked: questions.append("") or asked(*args)
        )
    counts = []
    for wanted in (False, True):
        with ExitStack() as stack:
            if wanted:
                stack.enter_context(Timeline(tmp_path / "t.json"))
            cluster = stack.enter_context(caravan.connect(endpoints))
            streams = [device.link.stream for device in cluster.devices]
            before = [stream.commands for stream in streams]
            prompt(cluster, smollm2)
            counts.append([s.commands - n for s, n in zip(streams, before, strict=True)])
        # for each worker: the clock before and after, the timeline switched on and off
        assert len(questions) == (8 if wanted else 0)
    assert counts[0] == counts[1]


def test_callbacks_are_plain_again_afterwards(endpoints: list[str], tmp_path: Path) -> None:
    with Timeline(tmp_path / "t.json"):
        assert head.recording is not None
    assert head.recording is None
    with caravan.connect(endpoints) as cluster:
        plugin = cluster.devices[0].plugin
        assert not plugin._recorded


def test_it_is_written_after_a_failure_too(
    endpoints: list[str], smollm2: Path, tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    with (
        pytest.raises(KeyboardInterrupt),
        Timeline(path),
        caravan.connect(endpoints) as cluster,
    ):
        prompt(cluster, smollm2)
        raise KeyboardInterrupt
    found = read(path)
    check(found)
    assert len(graphs(found, "RPC1")) == N_TOKENS // N_UBATCH + 1
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


def test_what_a_lost_worker_had_told_is_there(smollm2: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(timeline, "_INTERVAL", 0.01)
    path = tmp_path / "t.json"
    with (
        caravan.Worker("CPU:1") as worker,
        pytest.raises(WorkerLost),
        Timeline(path) as recording,
        caravan.connect([worker.endpoint]) as cluster,
    ):
        endpoint = worker.endpoint
        prompt(cluster, smollm2)
        (kept,) = recording._workers
        wait_until(lambda: any(span.kind == Kind.GRAPH for span in kept.record.devices[0].spans))
        worker.close()
        wait_until(lambda: cluster.devices[0].link.stream.ended)
        cluster.check()
    found = read(path)
    check(found)
    assert graphs(found, "RPC0")
    (note,) = recording.notes
    assert note == f"{endpoint} was lost: its timeline ends before the run did"


def test_a_worker_of_the_base_protocol_gives_the_heads_part(
    endpoints: list[str], smollm2: Path, tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    with (
        Timeline(path) as recording,
        caravan.connect(endpoints[:1], extension=False) as cluster,
    ):
        assert cluster.stats() == {}
        prompt(cluster, smollm2)
    found = read(path)
    check(found)
    assert recording.notes == [
        f"{endpoints[0]} speaks llama.cpp's protocol, which has no timelines"
    ]
    assert machine_names(found)[1] == f"worker {endpoints[0]} (RPC0): no timeline"
    assert on_track(found, "to RPC0")


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"), Timeline(tmp_path / "nowhere" / "t.json"):
        raise AssertionError
    assert head.recording is None


def test_only_one_at_a_time(tmp_path: Path) -> None:
    with (
        Timeline(tmp_path / "one.json"),
        pytest.raises(UsageError, match=r"already, to .*one\.json"),
        Timeline(tmp_path / "two.json"),
    ):
        raise AssertionError
    assert [file.name for file in tmp_path.iterdir()] == ["one.json"]


def test_stats_are_those_of_the_devices(endpoints: list[str], smollm2: Path) -> None:
    with caravan.connect(endpoints) as cluster:
        before = cluster.stats()
        prompt(cluster, smollm2, repetitions=2)
        after = cluster.stats()
    assert list(after) == ["RPC0", "RPC1"]
    for name, stats in after.items():
        first = before[name]
        passed = stats.now - first.now
        spent = [
            getattr(stats, field) - getattr(first, field)
            for field in ("computing", "waiting", "sending")
        ]
        assert all(ns >= 0 for ns in spent)
        assert 0 < sum(spent) <= passed
        assert stats.graphs - first.graphs == 2 * N_TOKENS // N_UBATCH + 1
        assert stats.bytes_in > first.bytes_in and stats.bytes_out > first.bytes_out
