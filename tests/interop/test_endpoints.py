"""Endpoints as users write them, with real workers behind them, in every place that takes one."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import caravan
from caravan.transport.endpoint import DEFAULT_PORT
from e2e.processes import caravan as command
from interop.cases import SOME, assert_same, observe
from interop.peers import CppClient, engine


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="this system has no IPv6")


def _open_worker(host: str, port: int = 0) -> caravan.Worker:
    """One that lets everybody in, whoever can connect."""
    return caravan.Worker("CPU:1", host=host, port=port, options=("--insecure",))


@pytest.fixture(scope="module")
def ports(folder) -> Iterator[dict[str, int]]:
    """The port of a worker with llama.cpp's kernels on each of these hosts."""
    hosts = ["127.0.0.1", "localhost", "0.0.0.0", *(["::1", "::"] if _has_ipv6() else [])]
    with ExitStack() as stack:
        with engine(folder):
            workers = [stack.enter_context(_open_worker(host)) for host in hosts]
        yield {
            host: int(worker.endpoint.rpartition(":")[2])
            for host, worker in zip(hosts, workers, strict=True)
        }


# where a worker listens, and how it is written
WAYS = [
    ("127.0.0.1", "127.0.0.1:{port}"),
    ("127.0.0.1", "localhost:{port}"),
    ("localhost", "localhost:{port}"),
    ("localhost", "127.0.0.1:{port}"),
    ("0.0.0.0", "localhost:{port}"),
    pytest.param("::1", "[::1]:{port}", marks=IPV6),
    pytest.param("::", "[::1]:{port}", marks=IPV6),
    pytest.param("::", "127.0.0.1:{port}", marks=IPV6),
    pytest.param("::", "localhost:{port}", marks=IPV6),
]


@pytest.mark.parametrize(("host", "way"), WAYS)
@pytest.mark.parametrize("extension", [True, False], ids=["extension", "base"])
def test_connect(host, way, extension, ports):
    text = way.format(port=ports[host])
    with caravan.connect([text], extension=extension) as cluster:
        assert [device.endpoint for device in cluster.devices] == [text]
        assert cluster.devices[0].memory()[1] > 0


@IPV6
def test_workers_reach_each_other_where_the_head_reaches_them(ports, smollm2):
    """Also over IPv4 one that listens to both."""
    ends = [f"127.0.0.1:{ports['::']}", f"[::1]:{ports['::1']}", f"localhost:{ports['0.0.0.0']}"]
    with caravan.connect(ends) as cluster:
        assert {route.path.value for route in cluster.routes().values()} == {"direct"}


@pytest.mark.parametrize("name", ["devices", "bench", "run"])
def test_commands(name, ports, smollm2):
    ends = [f"localhost:{ports['127.0.0.1']}", f"127.0.0.1:{ports['localhost']}"]
    if "::" in ports:
        ends += [f"[::1]:{ports['::']}", f"[::1]:{ports['::1']}"]
    options = {
        "devices": (),
        "bench": ("-m", str(smollm2), "-p", "8", "-n", "0", "-r", "1", "-o", "json"),
        "run": ("-m", str(smollm2), "-p", "One, two,", "-n", "2", "-c", "64"),
    }
    done = command(name, *options[name], "--rpc", ",".join(ends))
    assert done.returncode == 0, done.stderr
    if name == "bench":
        assert json.loads(done.stdout)[0]["avg_ts"] > 0
    else:
        said = done.stdout + done.stderr
        assert [end for end in ends if end not in said] == []


def test_the_environment_has_endpoints_too(ports):
    end = f"localhost:{ports['127.0.0.1']}"
    environment = {k: v for k, v in os.environ.items() if k != "CARAVAN_RPC"}
    done = command("devices", env={**environment, "LLAMA_ARG_RPC": end})
    assert done.returncode == 0, done.stderr
    assert end in done.stdout


@pytest.mark.parametrize(
    ("host", "way"),
    [WAYS[0], WAYS[1], WAYS[4], pytest.param("::", "localhost:{port}", marks=IPV6)],
)
def test_llama_cpps_client(host, way, ports, folder, smollm2, alone):
    with CppClient(folder) as client:
        endpoint = way.format(port=ports[host])
        assert_same(observe(client, [endpoint], smollm2, SOME[:1]), alone)


def test_a_missing_port_is_that_of_llama_cpp():
    try:
        worker = _open_worker("::" if _has_ipv6() else "0.0.0.0", DEFAULT_PORT)
    except caravan.CaravanError:
        pytest.skip(f"port {DEFAULT_PORT} is taken")
    with worker:
        for text in ("localhost", "127.0.0.1", *(["::1", "[::1]"] if _has_ipv6() else [])):
            with caravan.connect([text]) as cluster:
                assert cluster.devices[0].endpoint.endswith(f":{DEFAULT_PORT}")
        done = command("devices", "--rpc", "localhost")
        assert done.returncode == 0, done.stderr
        assert f"localhost:{DEFAULT_PORT}" in done.stdout
