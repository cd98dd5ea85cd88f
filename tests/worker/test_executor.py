"""The device queue: order, claims, loans, and the bound on waiting bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from caravan.worker.executor import Budget, Executor


@pytest.fixture
def executor() -> Iterator[Executor]:
    executor = Executor("test")
    yield executor
    executor.close()


def test_jobs_run_in_order_of_arrival(executor) -> None:
    seen, done = [], threading.Event()
    for i in range(200):
        executor.submit(lambda i=i: seen.append(i))
    executor.submit(done.set)
    assert done.wait(5)
    assert seen == list(range(200))


def test_idle_queue_can_be_claimed_and_holds_back_later_jobs(executor) -> None:
    seen, done = [], threading.Event()
    assert executor.try_claim()
    executor.submit(lambda: seen.append("queued"))
    executor.submit(done.set)
    time.sleep(0.05)
    seen.append("claimed")
    executor.release()
    assert done.wait(5)
    assert seen == ["claimed", "queued"]


def test_busy_queue_cannot_be_claimed(executor) -> None:
    release = threading.Event()
    executor.submit(lambda: release.wait(5))
    assert not executor.try_claim()
    release.set()
    deadline = time.monotonic() + 5
    while not executor.try_claim():
        assert time.monotonic() < deadline
    executor.release()


def test_loan_comes_in_turn_and_holds_back_later_jobs(executor) -> None:
    seen, done = [], threading.Event()
    executor.submit(lambda: (time.sleep(0.05), seen.append("before")))
    loan = executor.lend()
    executor.submit(lambda: seen.append("after"))
    executor.submit(done.set)
    time.sleep(0.05)
    seen.append("loan")
    loan.end()
    assert done.wait(5)
    assert seen == ["before", "loan", "after"]


def test_a_failing_job_does_not_stop_the_queue(executor, capsys) -> None:
    done = threading.Event()
    executor.submit(lambda: 1 / 0)
    executor.submit(done.set)
    assert done.wait(5)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_budget_blocks_above_its_limit_and_lets_one_big_piece_pass() -> None:
    budget = Budget(100)
    budget.acquire(1000)
    passed = threading.Event()

    def second() -> None:
        budget.acquire(10)
        passed.set()

    threading.Thread(target=second, daemon=True).start()
    assert not passed.wait(0.05)
    budget.release(1000)
    assert passed.wait(5)
