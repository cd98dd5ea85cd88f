"""How ways between workers are found: whom they lead to, and what is computed meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path as File

import numpy as np
import pytest

import caravan
from caravan.llm import Model, ModelParams
from caravan.stream.routes import Path, Route
from caravan.stream.ticket import Ticket
from caravan.wire.extension import PeerTarget
from e2e.processes import BOUND, closed_port, peer
from e2e.test_bit_equality import CASES, compare, observe
from wired import Side

CASE = "ubatch does not divide"

DIRECT, RELAY = Path.DIRECT, Path.RELAY


@pytest.fixture(scope="module")
def workers() -> Iterator[list[str]]:
    with caravan.LocalWorkers(3) as started:
        yield started.endpoints


@pytest.fixture(scope="module")
def alone(smollm2: File) -> dict[str, tuple[list[np.ndarray], str]]:
    with Model(smollm2, ModelParams(repack=False)) as model:
        return {CASE: observe(model, *CASES[CASE])}


def paths(cluster: caravan.Cluster) -> list[Path]:
    """From each device to the next one."""
    routes = cluster.routes()
    names = [device.name for device in cluster.devices]
    return [routes[pair].path for pair in itertools.pairwise(names)]


def check(endpoints: Sequence[str], expected: list[Path], smollm2: File, alone) -> None:
    with caravan.connect(endpoints) as cluster:
        assert paths(cluster) == expected
        compare(smollm2, cluster.devices, alone, ModelParams(), [CASE])
        assert paths(cluster) == expected


def test_within_and_between(workers, smollm2, alone):
    with caravan.Worker("CPU:1,CPU:1") as worker:
        check([workers[0], worker.endpoint, workers[1]], [DIRECT] * 3, smollm2, alone)


def test_over_unix_sockets(tmp_path, workers, smollm2, alone):
    with caravan.Worker("CPU:1", host=f"unix:{tmp_path}/w") as worker:
        check([workers[0], worker.endpoint, workers[1]], [DIRECT] * 2, smollm2, alone)


def test_with_servers_of_the_base_protocol_in_between(workers, smollm2, alone):
    with caravan.Worker("CPU:1,CPU:1", options=("--no-extension",)) as base:
        endpoints = [*workers[:2], base.endpoint, workers[2]]
        check(endpoints, [DIRECT, RELAY, RELAY, RELAY], smollm2, alone)


def test_while_the_ways_are_still_opening(workers, smollm2, alone):
    """The first copies are relayed, the later ones of the same prompt are not."""
    with caravan.connect(workers[:2]) as cluster:
        one, two = cluster.devices
        answer = Ticket("PEER_OPEN", 8, fatal=False)
        asked, seen = [], []
        ask = one.link.open_peer

        def open_peer(target: PeerTarget) -> Ticket:
            asked.append(target)
            return answer

        def copy(*arguments: object) -> None:
            seen.append(route.path)
            Route.copy(route, *arguments)
            if len(seen) == 3:
                answer.resolve(ask(asked[0]).wait(BOUND))

        one.link.open_peer = open_peer
        route = one._routes[one.link, two.link] = Route(one.link, two.link)
        route.copy = copy
        compare(smollm2, cluster.devices, alone, ModelParams(), [CASE])
        assert seen[:4] == [Path.UNKNOWN, Path.OPENING, Path.OPENING, DIRECT]
        assert set(seen[4:]) == {DIRECT}


def forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


# a peer that cannot be reached


class ForHeadsAlone:
    """A relay in front of a worker that takes one connection, the head's.

    Whoever comes later is refused, or accepted and never answered (`silent`).
    """

    def __init__(self, endpoint: str, silent: bool) -> None:
        host, _, port = endpoint.rpartition(":")
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets = [self._server]

        def serve() -> None:
            client, _ = self._server.accept()
            if not silent:
                self._server.close()
            target = socket.create_connection((host, int(port)))
            self._sockets += [client, target]
            back = threading.Thread(target=forward, args=(target, client))
            back.start()
            forward(client, target)
            back.join()

        self._side = Side(serve)

    def __enter__(self) -> ForHeadsAlone:
        return self

    def __exit__(self, *exc: object) -> None:
        self._side.join()
        for sock in self._sockets:
            sock.close()


@pytest.mark.parametrize(("silent", "reason"), [(False, "refused"), (True, "no answer in time")])
def test_a_worker_that_heads_alone_can_reach(silent, reason, workers, smollm2, alone):
    lost = closed_port()
    with (
        caravan.Worker("CPU:1", options=("--peer-address", lost)) as worker,
        ForHeadsAlone(worker.endpoint, silent) as door,
        caravan.connect([workers[0], door.endpoint, workers[1]]) as cluster,
    ):
        # while nobody knows yet, and afterwards
        compare(smollm2, cluster.devices, alone, ModelParams(), [CASE])
        assert paths(cluster) == [RELAY, DIRECT]
        route = cluster.routes()["RPC0", "RPC1"]
        assert route.reason.startswith(f"cannot connect to {lost}: connection refused; ")
        assert reason in route.reason
        compare(smollm2, cluster.devices, alone, ModelParams(), [CASE])


STRANGERS = {
    "nobody": lambda: contextlib.nullcontext(closed_port()),
    "somebody silent": lambda: peer(None),
    "somebody else": lambda: peer(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "another worker": lambda: another_worker(),
}


@contextlib.contextmanager
def another_worker() -> Iterator[str]:
    with caravan.Worker("CPU:1") as worker:
        yield worker.endpoint


@pytest.mark.parametrize("who", STRANGERS)
def test_who_is_not_at_its_address_is_looked_for_where_the_head_found_it(who, workers, smollm2):
    with (
        STRANGERS[who]() as address,
        caravan.Worker("CPU:1", options=("--peer-address", address)) as worker,
        caravan.connect([workers[0], worker.endpoint]) as cluster,
    ):
        assert paths(cluster) == [DIRECT]


def test_an_address_that_leads_there_is_used(workers, smollm2, alone):
    """As a port that a router forwards."""
    port = closed_port().rpartition(":")[2]
    worker = caravan.Worker("CPU:1", port=int(port), options=("--peer-address", "127.0.0.1"))
    with worker, caravan.connect([workers[0], worker.endpoint]) as cluster:
        (reach,) = {device.link.reach for device in cluster.devices[1:]}
        assert reach.addresses == (worker.endpoint,)
        assert paths(cluster) == [DIRECT]
