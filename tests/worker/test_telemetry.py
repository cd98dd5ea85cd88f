"""What a real worker tells of its device: while it computes, and when it is asked to record."""

from __future__ import annotations

import numpy as np
import pytest

from caravan.trace.spans import Kind, Span
from caravan.wire.commands import EXT, Ext
from caravan.wire.records import SPAN
from worker.raw_client import ADD, ExtClient, linear_rows, row

STATS = EXT[Ext.STATS].reply.names


@pytest.fixture
def client(worker):
    with ExtClient(worker.endpoint) as client:
        yield client


def stats(client: ExtClient) -> dict[str, int]:
    return dict(zip(STATS, client.call(Ext.STATS), strict=True))


def timeline(client: ExtClient, on: int) -> list[Span]:
    body = client.call_raw(Ext.TIMELINE, bytes([on])).body
    assert body[:8] == bytes(8)
    return [Span(*values) for values in np.frombuffer(body[8:], SPAN).tolist()]


def test_the_clock_goes_forward(client: ExtClient) -> None:
    times = [client.call(Ext.CLOCK)[0] for _ in range(3)]
    assert times == sorted(times)
    assert stats(client)["now"] >= times[-1]


def test_stats_count_what_is_done(client: ExtClient) -> None:
    before = stats(client)
    assert before["graphs"] == before["computing"] == 0
    _, base = client.alloc(1 << 16)
    rows, _ = linear_rows(base)
    client.set(base, bytes(1000))
    for uid in (0, 5):
        client.graph(rows, 2, uid)
    client.post(Ext.GRAPH_RECOMPUTE, 5)
    client.get(base, 300)
    after = stats(client)
    assert (after["graphs"], after["bytes_in"], after["bytes_out"]) == (3, 1000, 300)
    assert after["computing"] > 0
    spent = sum(after[name] for name in ("computing", "waiting", "sending"))
    assert 0 < spent <= after["now"] - before["now"] + before["waiting"] + before["sending"]


def test_all_is_answered_while_the_device_computes(client: ExtClient) -> None:
    size, n = 1 << 20, 1500
    _, base = client.alloc(9 * size)
    rows = [row((size,), base, ADD, (n if i == 0 else i - 1, n)) for i in range(n)]
    client.graph(np.stack([*rows, row((size,), base + 4 * size)]), n)
    fence = client.post(Ext.FENCE)
    asked = [client.post(number) for number in (Ext.CLOCK, Ext.STATS)]
    asked.append(client.post(Ext.TIMELINE, 0))
    answers = [client.answer_of() for _ in range(4)]
    assert [answer.seq for answer in answers] == [*asked, fence]
    first = dict(zip(STATS, EXT[Ext.STATS].reply.unpack(answers[1].body), strict=True))
    assert first["graphs"] == 0


def test_nothing_is_recorded_until_it_is_asked_for(client: ExtClient) -> None:
    _, base = client.alloc(1 << 16)
    rows, _ = linear_rows(base)
    client.graph(rows, 2)
    client.get(base, 10)
    assert timeline(client, 1) == []
    client.set(base, bytes(500))
    client.graph(rows, 2, uid=9)
    client.post(Ext.COPY, base, base + 100, 50)
    client.get(base, 10)
    spans = timeline(client, 0)
    assert {Kind(span.kind) for span in spans} == {
        Kind.SET,
        Kind.BUILD,
        Kind.GRAPH,
        Kind.COPY,
        Kind.REPLY,
    }
    by_kind = {span.kind: span for span in spans}
    assert (by_kind[Kind.GRAPH].key, by_kind[Kind.GRAPH].detail) == (9, 2)
    assert by_kind[Kind.BUILD].detail == 2
    assert by_kind[Kind.SET].size == 500
    assert by_kind[Kind.COPY].size == 50
    assert by_kind[Kind.REPLY].size == 16 + 10
    assert all(span.start <= span.end for span in spans)
    assert by_kind[Kind.BUILD].end <= by_kind[Kind.GRAPH].start
    client.get(base, 10)
    assert timeline(client, 0) == []


def test_a_copy_between_two_devices_has_one_ticket(worker) -> None:
    with ExtClient(worker.endpoint) as one, ExtClient(worker.endpoint, 1, one.key) as two:
        for client in (one, two):
            timeline(client, 1)
        _, source = one.alloc(4096)
        _, target = two.alloc(4096)
        one.set(source, b"from one" * 16)
        two.post(Ext.TAKE, 0, 0, 77, target, 128)
        one.post(Ext.PUSH, 0, 0, 77, source, 128)
        assert two.get(target, 128) == b"from one" * 16
        (out,) = [span for span in timeline(one, 0) if span.kind == Kind.COPY_OUT]
        spans = {span.kind: span for span in timeline(two, 0)}
        wait, came = spans[Kind.WAIT], spans[Kind.COPY_IN]
        assert [(span.key, span.detail, span.size) for span in (out, wait, came)] == [
            (77, 0, 128)
        ] * 3
        # one process, one clock: it came when it had left
        assert out.start <= came.start and wait.end <= came.start
        assert stats(two)["waiting"] > 0
