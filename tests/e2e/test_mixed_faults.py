"""What fails where one of three workers speaks the base protocol alone, and so is relayed to.

It cannot be asked for a sign of life, and that it waits for others must not count as its silence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import caravan
from caravan.errors import TransportTimeout, WorkerLost
from caravan.llm import Context, ContextParams, Model
from e2e.processes import children, kill, wait_for
from e2e.test_direct_faults import (
    at_copy,
    fails,
    fails_between_steps,
    freezing,
    press_in_a_prompt,
)
from e2e.test_faults import (
    assert_tells,
    endpoints,
    serves,
    session_of,
    supervisor_of,
)

# small graphs: one that takes long is silence to the head
PARAMS = ContextParams(n_ctx=512, n_ubatch=8)
N_PROMPT = 176
FIRST, MIDDLE, LAST = range(3)


@contextlib.contextmanager
def two_and_one() -> Iterator[tuple[list[caravan.Worker], caravan.Worker]]:
    """Two that speak the extension, and one that does not."""
    with (
        caravan.LocalWorkers(2) as others,
        caravan.Worker("CPU:1", options=("--no-extension",)) as base,
    ):
        yield others.workers, base


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[list[caravan.Worker], caravan.Worker]]:
    with two_and_one() as workers:
        yield workers


@pytest.fixture
def three(started, base) -> list[caravan.Worker]:
    """Workers that outlive the tests; no session of an earlier one is left."""
    others, one = started
    workers = [*others[:base], one, *others[base:]]
    for worker in workers:
        wait_for(lambda pid=worker.pid: len(children(pid)) == 1)
    return workers


@contextlib.contextmanager
def ready(
    workers: list[caravan.Worker], smollm2: Path, timeout: float = 30.0
) -> Iterator[tuple[caravan.Cluster, Context]]:
    """A context over the workers, which has been in use; copies go straight where they can."""
    with (
        caravan.connect(endpoints(workers), timeout=timeout) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        for route in cluster.routes().values():
            assert route.path.value == ("relay" if "llama.cpp" in route.reason else "direct")
        context.decode([1])
        context.logits()
        context.clear()
        yield cluster, context


def assert_lost(
    error: WorkerLost, cluster: caravan.Cluster, workers: list[caravan.Worker], which: int
) -> None:
    """That one and those that build on it, all with the same reason."""
    assert_tells(error, workers[which].endpoint, f"RPC{which}")
    streams = [device.link.stream for device in cluster.devices]
    assert not any(stream.lost for stream in streams[:which])
    wait_for(lambda: all(stream.lost for stream in streams[which:]))
    assert {stream.lost.device for stream in streams[which:]} == {f"RPC{which}"}


# the worker of the base protocol, who fails, and at which copy
KILLED = [
    (FIRST, FIRST, 1),
    (FIRST, MIDDLE, 20),
    (MIDDLE, FIRST, 1),
    (MIDDLE, LAST, 20),
    (LAST, MIDDLE, 20),
]
FROZEN = [(MIDDLE, FIRST, 20), (MIDDLE, MIDDLE, 1), (LAST, FIRST, 20)]


@pytest.mark.parametrize(("base", "which", "moment"), KILLED)
def test_a_session_that_is_killed_is_named(which, moment, three, smollm2, tokens, expected):
    with ready(three, smollm2) as (cluster, context):
        at_copy(cluster, moment, lambda: kill(session_of(three[which])))
        assert_lost(fails(context, tokens), cluster, three, which)
    serves(endpoints(three), smollm2, tokens, expected)


@pytest.mark.parametrize(("base", "which", "moment"), FROZEN)
def test_one_that_freezes_is_named(which, moment, three, smollm2, tokens, expected):
    with (
        freezing(three[which]) as freeze,
        ready(three, smollm2, timeout=1.5) as (cluster, context),
    ):
        at_copy(cluster, moment, freeze)
        error = fails(context, tokens)
        assert_lost(error, cluster, three, which)
        assert isinstance(error.cause, TransportTimeout)
    serves(endpoints(three), smollm2, tokens, expected)


@pytest.mark.parametrize("base", [MIDDLE])
@pytest.mark.parametrize("which", [FIRST, MIDDLE, LAST])
def test_one_that_is_killed_between_decode_steps(which, three, smollm2, tokens):
    with ready(three, smollm2) as (_, context):
        error = fails_between_steps(context, tokens, three[which])
        assert_tells(error, three[which].endpoint, f"RPC{which}")


@pytest.mark.parametrize("base", [MIDDLE])
def test_ctrl_c_in_a_prompt(three, smollm2, tokens, expected):
    with ready(three, smollm2) as (cluster, context):
        press_in_a_prompt(cluster, context, tokens, expected)


def test_a_worker_that_is_killed_is_named(smollm2, tokens, expected):
    with two_and_one() as (others, base):
        three = [others[0], base, others[1]]
        with ready(three, smollm2) as (cluster, context):
            at_copy(cluster, 20, lambda: kill(supervisor_of(base)))
            assert_lost(fails(context, tokens), cluster, three, MIDDLE)
        serves(endpoints(others), smollm2, tokens, expected)
