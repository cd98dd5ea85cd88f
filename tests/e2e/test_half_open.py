"""Connections of which one end does not know that the other is gone: both let go of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import caravan
from caravan.errors import TransportTimeout, WorkerLost
from caravan.llm import Context, Model
from e2e import tiny
from e2e.cable import Cable
from e2e.loads import is_spare
from e2e.processes import BOUND, children, kill, wait_for
from soaking import head

IDLE = 3.0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def worker() -> Iterator[caravan.Worker]:
    options = ("--idle-timeout", str(IDLE), "--max-memory", "24MiB")
    with caravan.Worker("CPU:1", options=options) as running:
        yield running


def sessions(worker: caravan.Worker) -> list[int]:
    return [pid for pid in children(worker.pid) if not is_spare(pid)]


def test_a_pulled_cable_frees_both_ends(worker, path):
    with (
        Cable(worker.endpoint) as cable,
        caravan.connect([cable.endpoint], timeout=4.0) as cluster,
        Model(path, devices=cluster.devices) as model,
        Context(model, head.PARAMS) as context,
    ):
        context.decode([5, 6, 7])
        context.synchronize()
        (session,) = sessions(worker)
        cable.pull()
        # each of them while nothing is asked, and without a word of the other
        wait_for(lambda: session not in children(worker.pid))
        wait_for(lambda: cluster.devices[0].link.stream.lost)
        with pytest.raises(WorkerLost) as caught:
            context.decode([5, 6, 7])
        assert isinstance(caught.value.cause, TransportTimeout)
        text = f"nothing came for {IDLE:g} s"
        wait_for(lambda: any(text in line for line in worker.messages()))


def test_an_idle_head_is_no_gone_one(worker, path):
    """For longer than the worker waits for a word; with a timeout that alone would be too long."""
    with (
        caravan.connect([worker.endpoint], timeout=600.0) as cluster,
        Model(path, devices=cluster.devices) as model,
        Context(model, head.PARAMS) as context,
    ):
        context.decode([5, 6, 7])
        before = context.logits()
        with pytest.raises(AssertionError):
            wait_for(lambda: cluster.devices[0].link.stream.lost, 1.5 * IDLE)
        context.clear()
        context.decode([5, 6, 7])
        assert (context.logits() == before).all()


HEAD = """
import sys, caravan
with (
    caravan.connect([sys.argv[2]]) as cluster,
    caravan.Model(sys.argv[1], devices=cluster.devices) as model,
    caravan.Context(model, caravan.ContextParams(n_ctx=64)) as context,
):
    context.decode([5, 6, 7])
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        context.decode([5, 6, 7])
        context.logits()
    except caravan.WorkerLost as exc:
        print(exc, flush=True)
"""


def test_a_frozen_head_is_gone_and_told_so_when_it_thaws(worker, path):
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD, str(path), worker.endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        (session,) = sessions(worker)
        kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: session not in children(worker.pid))
        kill(process.pid, signal.SIGCONT)
        told, _ = process.communicate("go on\n", timeout=BOUND)
    finally:
        process.kill()
        process.wait()
    assert told.startswith("lost RPC0 at")
    assert told.endswith(f"a connection to its head broke: nothing came for {IDLE:g} s\n")
