"""What fails while our head uses llama.cpp's servers: an error that names it, and no hang."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import caravan
from caravan.errors import ConnectError, TransportTimeout, WorkerLost
from caravan.llm import Context, ContextParams, Model
from e2e.processes import assert_one_line, kill, running, wait_for
from e2e.processes import caravan as command
from e2e.test_direct_faults import at_copy, fails
from e2e.test_faults import assert_tells
from interop.cases import TEXT
from interop.peers import CppClient, CppServer

# small graphs: one that takes long is silence to the head
PARAMS = ContextParams(n_ctx=256, n_ubatch=8)


@contextmanager
def servers(count: int) -> Iterator[list[CppServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(CppServer()) for _ in range(count)]


@contextmanager
def ready(
    endpoints: list[str], smollm2: Path, timeout: float = 30.0
) -> Iterator[tuple[caravan.Cluster, Context, list[int]]]:
    """A context over them, which has been in use, and a prompt."""
    with (
        caravan.connect(endpoints, timeout=timeout) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        context.decode([1])
        context.logits()
        context.clear()
        yield cluster, context, model.tokenize(TEXT)[:200]


@pytest.mark.parametrize("which", [0, 1])
def test_killed_during_load(which, smollm2):
    calls: list[float] = []
    with servers(2) as two, caravan.connect([s.endpoint for s in two]) as cluster:

        def progress(fraction: float) -> bool:
            calls.append(fraction)
            if len(calls) == 40:
                two[which].kill()
            return True

        with pytest.raises(WorkerLost) as caught:
            Model(smollm2, devices=cluster.devices, progress=progress)
        assert_tells(caught.value, two[which].endpoint, f"RPC{which}")
        assert len(calls) >= 40
        assert max(calls) < 1


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("moment", [1, 15])
def test_killed_in_a_prompt(which, moment, smollm2):
    with (
        servers(2) as two,
        ready([server.endpoint for server in two], smollm2) as (cluster, context, tokens),
    ):
        at_copy(cluster, moment, two[which].kill)
        assert_tells(fails(context, tokens), two[which].endpoint, f"RPC{which}")
        with pytest.raises(WorkerLost):
            context.decode([1])


@pytest.mark.parametrize("which", [0, 1])
def test_killed_between_decode_steps(which, smollm2):
    with (
        servers(2) as two,
        ready([server.endpoint for server in two], smollm2) as (_, context, tokens),
    ):
        context.decode(tokens[:20])
        context.logits()
        two[which].kill()
        with pytest.raises(WorkerLost) as caught:
            for token in tokens[20:]:
                context.decode_one(token)
                context.logits()
        assert_tells(caught.value, two[which].endpoint, f"RPC{which}")


def test_killed_in_the_middle_of_workers(smollm2):
    with (
        caravan.LocalWorkers(2) as workers,
        CppServer() as server,
        ready([workers.endpoints[0], server.endpoint, workers.endpoints[1]], smollm2) as (
            cluster,
            context,
            tokens,
        ),
    ):
        at_copy(cluster, 10, server.kill)
        assert_tells(fails(context, tokens), server.endpoint, "RPC1")
        assert cluster.devices[0].link.stream.lost is None


def test_frozen_in_a_prompt(smollm2):
    with servers(2) as two:
        endpoints = [server.endpoint for server in two]
        with ready(endpoints, smollm2, timeout=1.5) as (cluster, context, tokens):
            at_copy(cluster, 10, lambda: kill(two[1].pid, signal.SIGSTOP))
            error = fails(context, tokens)
        assert_tells(error, two[1].endpoint, "RPC1")
        assert isinstance(error.cause, TransportTimeout)


def test_killed_under_a_command(smollm2):
    options = ("-m", str(smollm2), "-p", "One, two,", "-n", "400", "--temp", "0")
    with (
        CppServer() as server,
        running("run", *options, "--no-resume", "--rpc", server.endpoint) as run,
    ):
        wait_for(lambda: run.text)
        server.kill()
        assert run.finish() == 1
        assert [line for line in run.lines if "error" in line] == [run.lines[-1]]
        assert f"lost RPC0 at {server.endpoint}" in run.lines[-1]


@contextmanager
def busy(folder: Path, smollm2: Path) -> Iterator[tuple[CppServer, CppClient]]:
    """A server that serves somebody else."""
    with CppServer() as server, CppClient(folder) as client:
        client.ask("connect", endpoints=[server.endpoint])
        client.ask("load", path=str(smollm2))
        yield server, client


def test_a_busy_server_says_so_and_serves_later(folder, smollm2):
    with busy(folder, smollm2) as (server, client), ExitStack() as stack:
        with pytest.raises(ConnectError, match="serves one client at a time") as caught:
            caravan.connect([server.endpoint], timeout=0.5)
        assert server.endpoint in str(caught.value)
        # as many as its system lets wait, and one more
        host, _, port = server.endpoint.rpartition(":")
        waiting = stack.enter_context(socket.socket())
        waiting.settimeout(0.5)
        assert waiting.connect_ex((host, int(port))) in (0, 11)
        with pytest.raises(ConnectError, match="serves one client at a time") as caught:
            caravan.connect([server.endpoint], timeout=0.5)
        assert server.endpoint in str(caught.value)
        client.close()
        stack.close()
        with ready([server.endpoint], smollm2) as (_, context, tokens):
            context.decode(tokens[:8])
            context.logits()


@pytest.mark.parametrize("name", ["devices", "run", "bench"])
def test_a_busy_server_in_a_command(name, folder, smollm2):
    options = () if name == "devices" else ("-m", str(smollm2), "-p", "1")
    with busy(folder, smollm2) as (server, _):
        done = command(name, *options, "--rpc", server.endpoint, "--timeout", "0.5")
    assert_one_line(done, server.endpoint, "serves one client at a time")
