"""Copies between devices, by every path: the engine's own logits, and no hang when a way fails."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

import caravan
from caravan.errors import WorkerLost
from caravan.llm import Context, ContextParams, Model, ModelParams
from caravan.stream.reach import Reach
from caravan.stream.routes import Path as Way
from e2e.processes import closed_port, kill, session_of
from wired import Side

PARAMS = ContextParams(n_ctx=512, n_ubatch=27)
N_PROMPT, STEPS = 131, 3
RUNS = 10


def observe(model: Model, tokens: list[int]) -> list[np.ndarray]:
    """The logits after a prompt and after each of some greedy steps."""
    with Context(model, PARAMS) as context:
        context.decode(tokens)
        seen = [context.logits()]
        for _ in range(STEPS):
            context.decode([int(seen[-1].argmax())])
            seen.append(context.logits())
        return seen


@pytest.fixture(scope="module")
def expected(smollm2: Path, tokens: list[int]) -> list[np.ndarray]:
    with Model(smollm2, ModelParams(repack=False)) as model:
        return observe(model, tokens)


def same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@contextmanager
def silent_port() -> Iterator[str]:
    """An endpoint that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


# name -> devices and options of each worker, direct copies or not, the ways of neighbours
CLUSTERS: dict[str, tuple[list[tuple[str, ...]], bool, list[Way]]] = {
    "between workers": ([("CPU:1",)] * 3, True, [Way.DIRECT] * 2),
    "within a worker": ([("CPU:1,CPU:1,CPU:1",)], True, [Way.DIRECT] * 2),
    "both": ([("CPU:1,CPU:1",), ("CPU:1",)], True, [Way.DIRECT] * 2),
    "relayed": ([("CPU:1",)] * 3, False, [Way.RELAY] * 2),
    "with a worker of the base protocol": (
        [("CPU:1",), ("CPU:1", "--no-extension"), ("CPU:1",)],
        True,
        [Way.RELAY] * 2,
    ),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_path_gives_the_engines_own_logits(name, smollm2, tokens, expected):
    workers, direct, ways = CLUSTERS[name]
    with ExitStack() as stack:
        endpoints = [
            stack.enter_context(caravan.Worker(devices, options=tuple(options))).endpoint
            for devices, *options in workers
        ]
        cluster = stack.enter_context(caravan.connect(endpoints, direct_copies=direct))
        routes = cluster.routes()
        assert [routes["RPC0", "RPC1"].path, routes["RPC1", "RPC2"].path] == ways
        params = ModelParams(repack=False)
        model = stack.enter_context(Model(smollm2, params, devices=cluster.devices))
        assert same(observe(model, tokens), expected)


@pytest.mark.parametrize("how", ["refuses", "is silent", "is another worker"])
def test_a_peer_that_cannot_be_reached_is_relayed_to(how, smollm2, tokens, expected, monkeypatch):
    # here the head's own way to the worker would do, which it does not behind NAT
    monkeypatch.setattr(Reach, "seen_from", lambda reach, other: list(reach.addresses))
    with ExitStack() as stack:
        if how == "refuses":
            address = closed_port()
        elif how == "is silent":
            address = stack.enter_context(silent_port())
        else:
            address = stack.enter_context(caravan.Worker("CPU:1")).endpoint
        first = stack.enter_context(caravan.Worker("CPU:1"))
        options = ("--peer-address", address)
        hidden = stack.enter_context(caravan.Worker("CPU:1", options=options))
        cluster = stack.enter_context(caravan.connect([first.endpoint, hidden.endpoint]))
        params = ModelParams(repack=False)
        model = stack.enter_context(Model(smollm2, params, devices=cluster.devices))
        # neither the first copies, which do not wait for the answer, nor the later ones differ
        assert same(observe(model, tokens), expected)
        routes = cluster.routes()
        assert (routes["RPC0", "RPC1"].path, routes["RPC1", "RPC0"].path) == (
            Way.RELAY,
            Way.DIRECT,
        )
        assert address in routes["RPC0", "RPC1"].reason
        assert same(observe(model, tokens), expected)


@pytest.fixture
def three() -> Iterator[list[caravan.Worker]]:
    with caravan.LocalWorkers(3, threads=1) as workers:
        yield workers.workers


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_middle_of_three_fails_in_a_prompt(number, three, smollm2, tokens):
    """With direct copies it owes the head nothing, and is missed all the same."""
    endpoints = [worker.endpoint for worker in three]
    timeout = 2.0 if number == signal.SIGSTOP else 30.0
    with (
        caravan.connect(endpoints, timeout=timeout) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, ContextParams(n_ctx=2048, n_ubatch=16, n_batch=2048)) as context,
    ):
        cluster.routes()
        context.decode(tokens)
        context.synchronize()
        victim = session_of(three[1])
        timer = threading.Timer(0.2, kill, (victim, number))
        timer.start()
        try:
            with pytest.raises(WorkerLost) as caught:
                for _ in range(200):
                    context.clear()
                    context.decode(tokens * 12)
                    context.logits()
        finally:
            timer.join()
            kill(victim, signal.SIGCONT)
    assert (caught.value.endpoint, caught.value.device) == (endpoints[1], "RPC1")


def test_two_heads_at_once(three, smollm2, tokens, expected):
    endpoints = [worker.endpoint for worker in three[:2]]

    def head() -> bool:
        with (
            caravan.connect(endpoints) as cluster,
            Model(smollm2, ModelParams(repack=False), devices=cluster.devices) as model,
        ):
            cluster.routes()
            return all(same(observe(model, tokens), expected) for _ in range(3))

    sides = [Side(head) for _ in range(2)]
    assert [side.join() for side in sides] == [True, True]


@pytest.mark.parametrize("n", [3, 4])
def test_many_prompts_in_a_row(n, smollm2, tokens, expected):
    """The short version of benchmarks/endurance.py."""
    with (
        caravan.LocalWorkers(n, threads=1) as workers,
        caravan.connect(workers.endpoints) as cluster,
        Model(smollm2, ModelParams(repack=False), devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        for _ in range(RUNS):
            context.clear()
            context.decode(tokens)
            assert np.array_equal(context.logits(), expected[0])
