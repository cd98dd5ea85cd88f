"""What fails while copies go from worker to worker: a clear error that names it, and no hang."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import caravan
from caravan.errors import TransportTimeout, WorkerLost
from caravan.llm import Context, ContextParams, Model
from e2e.processes import children, closed_port, descriptors, kill, wait_for
from e2e.test_faults import (
    assert_tells,
    check,
    endpoints,
    press,
    serves,
    session_of,
    supervisor_of,
)
from relaying import Relay
from wired import Side

PARAMS = ContextParams(n_ctx=1024, n_ubatch=16, n_batch=1024)
N_PROMPT = 600
# the first copies, and so many that all workers are in the middle of theirs
MOMENTS = [1, 20]


@pytest.fixture
def three() -> Iterator[list[caravan.Worker]]:
    with caravan.LocalWorkers(3) as workers:
        yield workers.workers


@contextlib.contextmanager
def ready(
    workers: list[str], smollm2: Path, timeout: float = 30.0
) -> Iterator[tuple[caravan.Cluster, Context]]:
    """A context over the workers, all of whose copies go straight."""
    with (
        caravan.connect(workers, timeout=timeout) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        assert {route.path.value for route in cluster.routes().values()} == {"direct"}
        yield cluster, context


def at_copy(cluster: caravan.Cluster, number: int, act: Callable[[], object]) -> None:
    """Do `act` when the copy of that number has been posted to the last device."""
    source, target = cluster.devices[-2:]
    route = source.route_to(target)
    own, seen = route.copy, []

    def copy(*arguments: object) -> None:
        own(*arguments)
        seen.append(1)
        if len(seen) == number:
            act()

    route.copy = copy


def fails(context: Context, tokens: list[int]) -> WorkerLost:
    """What a prompt ends with, within the bound."""

    def decode() -> None:
        context.decode(tokens)
        context.synchronize()

    side = Side(decode)
    with pytest.raises(WorkerLost) as caught:
        side.join()
    return caught.value


@contextlib.contextmanager
def freezing(worker: caravan.Worker) -> Iterator[Callable[[], None]]:
    """What freezes the session of a worker, until the context is left."""
    frozen: list[int] = []

    def freeze() -> None:
        frozen.append(session_of(worker))
        kill(frozen[-1], signal.SIGSTOP)

    try:
        yield freeze
    finally:
        for pid in frozen:
            kill(pid, signal.SIGCONT)


def fails_between_steps(context: Context, tokens: list[int], victim: caravan.Worker) -> WorkerLost:
    """What decode steps end with when a session is killed after one of them."""
    context.decode(tokens[:20])
    context.decode_one(tokens[20])
    context.logits()
    kill(session_of(victim))
    with pytest.raises(WorkerLost) as caught:
        for token in tokens:
            context.decode_one(token)
            context.logits()
    return caught.value


def press_in_a_prompt(
    cluster: caravan.Cluster, context: Context, tokens: list[int], expected: np.ndarray
) -> None:
    """Ctrl-C surfaces at once, and costs no device."""
    for moment in MOMENTS:
        context.clear()
        at_copy(cluster, moment, press)
        with pytest.raises(KeyboardInterrupt):
            context.decode(tokens)
            context.synchronize()
        check(context, tokens, expected)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_session_that_is_killed_is_named(which, moment, three, smollm2, tokens, expected):
    with ready(endpoints(three), smollm2) as (cluster, context):
        check(context, tokens, expected)
        context.clear()
        at_copy(cluster, moment, lambda: kill(session_of(three[which])))
        error = fails(context, tokens)
        assert_tells(error, three[which].endpoint, f"RPC{which}")
        # nobody is left waiting for what will not come
        wait_for(lambda: all(device.link.stream.ended for device in cluster.devices[which:]))
    serves(endpoints(three), smollm2, tokens, expected)


@pytest.mark.parametrize("which", [0, 1])
def test_a_worker_that_is_killed_is_named(which, three, smollm2, tokens, expected):
    with ready(endpoints(three), smollm2) as (cluster, context):
        at_copy(cluster, 20, lambda: kill(supervisor_of(three[which])))
        error = fails(context, tokens)
        assert_tells(error, three[which].endpoint, f"RPC{which}")
    del three[which]
    serves(endpoints(three), smollm2, tokens, expected)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_that_is_killed_between_decode_steps(which, three, smollm2, tokens):
    with ready(endpoints(three), smollm2) as (_, context):
        error = fails_between_steps(context, tokens, three[which])
        assert_tells(error, three[which].endpoint, f"RPC{which}")


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_one_that_freezes_is_named(which, moment, three, smollm2, tokens, expected):
    with (
        freezing(three[which]) as freeze,
        ready(endpoints(three), smollm2, timeout=1.5) as (cluster, context),
    ):
        at_copy(cluster, moment, freeze)
        error = fails(context, tokens)
        assert_tells(error, three[which].endpoint, f"RPC{which}")
        assert isinstance(error.cause, TransportTimeout)
        # those that do not depend on it are none the worse
        assert not any(device.link.stream.lost for device in cluster.devices[:which])
    serves(endpoints(three), smollm2, tokens, expected)


def test_one_that_freezes_while_it_owes_nothing(three, smollm2, tokens):
    """Others depend on it, so it is watched all the same."""
    with (
        ready(endpoints(three), smollm2, timeout=1.0) as (cluster, context),
        freezing(three[1]) as freeze,
    ):
        context.decode(tokens[:40])
        context.logits()
        freeze()
        wait_for(lambda: cluster.devices[1].link.stream.lost)
        with pytest.raises(WorkerLost) as caught:
            context.decode(tokens[:4])
        assert_tells(caught.value, three[1].endpoint, "RPC1")


def test_a_way_that_breaks_between_workers_that_live(smollm2, tokens, expected):
    port = int(closed_port().rpartition(":")[2])
    with (
        Relay(f"127.0.0.1:{port}") as cut,
        caravan.Worker("CPU:1") as first,
        caravan.Worker("CPU:1", port=port, options=("--peer-address", cut.endpoint)) as second,
    ):
        with ready([first.endpoint, second.endpoint], smollm2) as (cluster, context):
            check(context, tokens, expected)
            context.clear()
            at_copy(cluster, 20, cut.cut)
            error = fails(context, tokens)
            assert_tells(error, second.endpoint, "RPC1")
            assert error.command == "TAKE"
            assert "a copy from the worker at 127.0.0.1:" in str(error)
            assert cluster.devices[0].link.stream.lost is None
        # a new session finds a new way
        serves([first.endpoint, second.endpoint], smollm2, tokens, expected)


def test_another_head_does_not_notice(three, smollm2, tokens, expected):
    """Sessions of two heads, on the same workers and with ways between the same."""
    with ready(endpoints(three), smollm2) as (_, context):
        check(context, tokens, expected)
        mine = {session_of(worker) for worker in three}
        with ready(endpoints(three), smollm2) as (cluster, other):
            theirs = next(pid for pid in map(session_of_another(mine), three[1:2]))
            at_copy(cluster, 20, lambda: kill(theirs))
            side = Side(lambda: fails(other, tokens))
            for _ in range(3):
                check(context, tokens, expected)
            assert_tells(side.join(), three[1].endpoint, "RPC1")
        check(context, tokens, expected)


def session_of_another(known: set[int]) -> Callable[[caravan.Worker], int]:
    """The session process that serves a head, of those that are not known."""

    def find(worker: caravan.Worker) -> int:
        return max(set(children(worker.pid)) - known, key=descriptors)

    return find


def test_ctrl_c_in_a_prompt_over_three(three, smollm2, tokens, expected):
    with ready(endpoints(three), smollm2) as (cluster, context):
        press_in_a_prompt(cluster, context, tokens, expected)


def test_leaving_in_the_middle_of_a_prompt(three, smollm2, tokens, expected):
    """Whatever is still on its way holds up nobody."""
    with ready(endpoints(three), smollm2) as (_, context):
        context.decode(tokens)
    for worker in three:
        wait_for(lambda pid=worker.pid: len(children(pid)) == 1)
    serves(endpoints(three), smollm2, tokens, expected)
