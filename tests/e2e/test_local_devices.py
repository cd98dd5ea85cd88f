"""Devices of the head's own machine in a pipeline: the right text, their death, nothing left."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import caravan
from caravan.errors import WorkerLost
from caravan.llm import Context, ContextParams, Model, ModelParams
from e2e.processes import assert_one_line, children, kill, running, wait_for
from e2e.processes import caravan as run_caravan

CPU = "local:CPU:1"
PARAMS = ContextParams(n_ctx=256, n_ubatch=27)
TEXT = "The caravan left the oasis before dawn, and nobody looked back. " * 20
LONG = TEXT * 5


@pytest.fixture(scope="module")
def worker() -> Iterator[caravan.Worker]:
    with caravan.Worker("CPU:1") as started:
        yield started


@pytest.fixture(scope="module")
def alone(smollm2) -> list[np.ndarray]:
    with Model(smollm2, ModelParams(repack=False)) as model:
        return observe(model)


def observe(model: Model) -> list[np.ndarray]:
    """The logits after a prompt, and after each of some greedy steps."""
    seen = []
    with Context(model, PARAMS) as context:
        context.decode(model.tokenize(TEXT)[:100])
        for _ in range(4):
            seen.append(context.logits())
            context.decode([int(seen[-1].argmax())])
        return [*seen, context.logits()]


def words(smollm2, *more: str) -> tuple[str, ...]:
    return ("run", "-m", str(smollm2), "--temp", "0", "--split=memory", *more)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "relay"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0)], ids=str)
def test_logits_are_the_engines_own(order, direct, worker, alone, smollm2):
    places = [(CPU, worker.endpoint)[which] for which in order]
    with (
        caravan.connect(places, direct_copies=direct) as cluster,
        Model(smollm2, ModelParams(n_gpu_layers=31), devices=cluster.devices) as model,
    ):
        ways = [cluster.devices[0].route_to(d).settle().value for d in cluster.devices[1:]]
        assert set(ways) == {"direct" if direct else "relay"}
        for ours, theirs in zip(observe(model), alone, strict=True):
            assert np.array_equal(ours, theirs)


def test_run_gives_the_text_of_the_engine_alone(worker, smollm2):
    prompt = ("-p", "The capital of France is", "-n", "12")
    expected = run_caravan(*words(smollm2, *prompt, "-dev", "none", "--no-repack"))
    assert expected.returncode == 0
    for more in ((), ("--no-direct-copies",)):
        done = run_caravan(
            *words(smollm2, *prompt, "--rpc", worker.endpoint, "-dev", f"{CPU},RPC0", *more)
        )
        assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
        first, second = done.stderr.splitlines()[-2:]
        assert first.startswith(f"{CPU} (") and "unix:" not in first
        assert second.startswith(f"RPC0 ({worker.endpoint}): ")


def test_a_device_that_is_not_here(smollm2):
    done = run_caravan(*words(smollm2, "-p", "x", "-dev", "local:CUDA7"))
    assert_one_line(done, "a local worker did not start: unknown device 'CUDA7'")


@pytest.mark.parametrize("victim", ["session", "supervisor"])
def test_its_death_is_named(victim, worker, smollm2, scratch):
    with caravan.connect([worker.endpoint, CPU], timeout=5.0) as cluster:
        (pid,) = (pid for pid in local_workers() if pid != worker.pid)
        victims = children(pid) if victim == "session" else [pid]
        with (
            Model(smollm2, devices=cluster.devices) as model,
            Context(model, PARAMS) as context,
        ):
            context.decode([1, 2, 3])
            context.logits()
            for member in victims:
                kill(member)
            with pytest.raises(WorkerLost) as caught:
                for token in itertools.cycle(range(100, 200)):
                    context.decode([token])
                    context.synchronize()
                    context.rewind(3)
        assert (caught.value.device, caught.value.endpoint) == (CPU, cluster.endpoints[1])
    assert list(scratch.iterdir()) == []


def local_workers() -> list[int]:
    """The workers that this process has started."""
    return children(os.getpid())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_a_head_that_is_ended_leaves_nothing(number, worker, smollm2, scratch):
    more = ("-p", LONG, "-n", "2000", "-c", "4096", "-ub", "32")
    devices = ("-dev", f"{CPU}/RPC0/{CPU}", "--rpc", worker.endpoint)
    with running(*words(smollm2, *more, *devices)) as head:
        wait_for(lambda: len(list(scratch.glob("*/socket"))) == 2)
        wait_for(lambda: len(head.meet_family()) >= 4)
        kill(head.process.pid, number)
        assert head.finish() == (130 if number == signal.SIGINT else -number)
        if number == signal.SIGINT:
            assert head.lines[-1] == "caravan: interrupted"
        wait_for(lambda: not list(scratch.iterdir()))
    wait_for(lambda: len(children(worker.pid)) == 1)


def test_ctrl_c_while_they_start_leaves_nothing(smollm2, scratch):
    with running(*words(smollm2, "-p", "x", "-dev", f"{CPU}/{CPU}")) as head:
        wait_for(lambda: list(scratch.iterdir()))
        head.interrupt()
        assert head.finish() == 130
    wait_for(lambda: not list(scratch.iterdir()))


def test_two_heads_at_the_same_time(worker, smollm2, scratch):
    """Each has workers of its own, and both share one."""
    prompt = ("-p", TEXT, "-n", "8", "--rpc", worker.endpoint, "-dev", f"{CPU}/RPC0/{CPU}")
    done: list = [None, None]

    def run(which: int) -> None:
        done[which] = run_caravan(*words(smollm2, *prompt))

    threads = [threading.Thread(target=run, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    assert done[0].stdout == done[1].stdout != ""
    assert list(scratch.iterdir()) == []


def test_a_head_that_forgot_to_close_leaves_nothing(smollm2, scratch):
    script = (
        "import sys, caravan\n"
        f"cluster = caravan.connect([{CPU!r}])\n"
        "model = caravan.Model(sys.argv[1], devices=cluster.devices)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(smollm2)], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    wait_for(lambda: not list(scratch.iterdir()))
