"""A worker's device, second by second: answers in time, late ones, none, a loss, and a return."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from caravan.serve.gauge import WorkerGauge
from caravan.wire.extension import Status
from serve.played import SECOND, Worker
from wired import wait_until


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture
def gauge(worker) -> WorkerGauge:
    return WorkerGauge(worker.device)


def second(gauge: WorkerGauge, worker: Worker, idle: bool = False, **more: int) -> list[str]:
    gauge.ask(idle)
    worker.work(**more)
    asked = worker.answer()
    gauge.collect()
    return asked


def test_the_share_of_a_second_by_the_workers_own_clock(gauge, worker):
    second(gauge, worker, computing=SECOND)
    assert gauge.busy[-1] is None
    second(gauge, worker, computing=SECOND // 4, bytes_in=5000, bytes_out=300)
    second(gauge, worker, now=3 * SECOND, computing=2 * SECOND, bytes_in=9000)
    facts = gauge.facts()
    assert facts["busy"][-3:] == [None, 0.25, pytest.approx(2 / 3, abs=1e-3)]
    assert facts["link"]["bytes_in"] == 3000 and facts["link"]["bytes_out"] == 0
    assert 0 < facts["link"]["round_trip"] < 30


def test_memory_is_asked_for_when_this_end_has_changed_it_and_else_rarely(gauge, worker):
    assert second(gauge, worker) == ["STATS", "MEMORY"]
    assert gauge.facts()["memory"] == {"free": 600, "total": 1000, "used": worker.used}
    assert second(gauge, worker, idle=True) == ["STATS"]
    worker.used["kv"] += 1
    assert second(gauge, worker) == ["STATS", "MEMORY"]
    gauge._memory_at -= 100.0
    assert second(gauge, worker) == ["STATS"]
    assert second(gauge, worker, idle=True) == ["STATS", "MEMORY"]


def test_one_that_does_not_answer_is_asked_no_second_question(gauge, worker):
    second(gauge, worker)
    for _ in range(5):
        gauge.ask(idle=False)
        gauge.collect()
    assert list(gauge.busy)[-5:] == [None] * 5
    assert len(worker.rig.stream._due) == 1
    # late, and the seconds between are counted in one
    worker.work(now=4 * SECOND, computing=SECOND)
    assert worker.answer() == ["STATS"]
    gauge.collect()
    assert gauge.busy[-1] == pytest.approx(0.25)


def test_one_that_does_not_count_is_asked_once(gauge, worker):
    worker.used = {}
    gauge._allocated_then = 0
    gauge.ask(idle=False)
    worker.rig.peer.reply(worker.rig.peer.request("STATS"), b"what?", Status.UNKNOWN_COMMAND)
    wait_until(lambda: not worker.rig.stream._due)
    gauge.collect()
    assert second(gauge, worker) == []
    assert gauge.facts()["link"] is None and gauge.facts()["cause"] == ""


def test_lost_and_back(gauge, worker):
    for _ in range(3):
        second(gauge, worker, computing=SECOND // 2)
    gauge.ask(idle=False)
    worker.rig.peer.close()
    wait_until(lambda: worker.rig.stream.lost)
    gauge.collect()
    facts = gauge.facts()
    assert facts["cause"] and facts["link"] is None and facts["busy"][-1] is None
    gauge.ask(idle=False)
    gauge.collect()
    worker.come_back()
    # a question of before is none of the new session's
    gauge.collect()
    second(gauge, worker)
    second(gauge, worker, computing=SECOND // 2)
    facts = gauge.facts()
    assert facts["cause"] == "" and facts["busy"][-2:] == [None, 0.5]
    assert facts["memory"]["free"] == 600


def test_a_link_that_is_full_is_left_alone(gauge, worker, monkeypatch):
    monkeypatch.setattr("caravan.stream.dispatcher.MAX_QUEUED", 10)
    worker.rig.near.set_capacity(0)
    worker.rig.set(b"x" * 100)
    gauge.ask(idle=True)
    gauge.collect()
    assert len(worker.rig.stream._due) == 0 and gauge.busy[-1] is None


def test_a_llama_cpp_server_is_asked_nothing():
    worker = Worker(extension=False)
    gauge = WorkerGauge(worker.device)
    assert second(gauge, worker, idle=True) == []
    facts = gauge.facts()
    assert facts["link"] is None and facts["memory"]["free"] == 800 - 150
    worker.close()
