"""Local devices among the endpoints, and lists of devices of every kind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import caravan
from caravan.errors import ConnectError, UsageError, WorkerStartError
from caravan.llm import connecting, opening
from caravan.llm.devices import pick
from caravan.trust.token import Token
from llm.fakes import FakeDevice

CPU = "local:CPU:1"


def test_the_devices_come_in_the_order_of_the_endpoints(scratch):
    with (
        caravan.Worker("CPU:1,CPU:2") as worker,
        caravan.connect([CPU, worker.endpoint, CPU]) as cluster,
    ):
        names = [device.name for device in cluster.devices]
        assert names == [CPU, "RPC0", "RPC1", f"{CPU}#2"]
        assert [device.link.info.threads for device in cluster.devices] == [1, 1, 2, 1]
        assert cluster.endpoints[1] == worker.endpoint
        assert len(list(scratch.iterdir())) == 2
        cluster.close()
        assert list(scratch.iterdir()) == []


def test_threads_that_nobody_names(scratch, monkeypatch):
    monkeypatch.setattr(connecting, "physical_cores", lambda: 7)
    assert connecting.share(["local:CPU", CPU, "local:CPU"]) == 3
    assert connecting.share(["local:CPU", CPU], others=2) == 2
    assert connecting.share([CPU]) == 7
    for given, expected in ((0, 7), (2, 2)):
        with caravan.connect(["local:CPU"], threads=given) as cluster:
            assert cluster.devices[0].link.info.threads == expected


def test_a_failure_ends_what_was_started(scratch):
    with pytest.raises(ConnectError, match="refused"):
        caravan.connect([CPU, "127.0.0.1:1"])
    with pytest.raises(WorkerStartError, match="unknown device 'CUDA7'"):
        caravan.connect([CPU, "local:CUDA7"])
    with pytest.raises(UsageError, match="threads must be a number"):
        caravan.connect([CPU, "local:CPU:x"])
    assert list(scratch.iterdir()) == []


def test_the_ways_are_opened_along_the_pipeline(scratch, monkeypatch):
    opened = []
    monkeypatch.setattr(opening, "open_routes", lambda found: opened.append([*found]))
    wanted = opening.Workers(local_workers=1)
    with opening.open_devices(wanted, [CPU, "RPC0", CPU]) as devices:
        assert [device.name for device in devices] == [CPU, "RPC0", f"{CPU}#2"]
        assert opened == [devices]


def test_the_engines_own_devices_stand_in_the_same_list(monkeypatch):
    """They are used as they are: no worker is started for them."""
    cuda = FakeDevice("CUDA0")
    monkeypatch.setattr(opening, "local_devices", lambda: [cuda])
    monkeypatch.setattr(
        opening, "connect", lambda endpoints, **options: FakeCluster(list(endpoints))
    )
    with opening.open_devices(opening.Workers(["a:1"]), ["CUDA0", CPU, "RPC0"]) as devices:
        assert devices[0] is cuda
        assert [device.name for device in devices] == ["CUDA0", CPU, "RPC0"]
    with opening.open_devices(opening.Workers(), ["CUDA0"]) as devices:
        assert devices == [cuda]
    with opening.open_devices(opening.Workers(["a:1"])) as devices:
        assert [device.name for device in devices] == ["RPC0", "CUDA0"]


@pytest.mark.parametrize("direct", [True, False])
def test_what_the_workers_are_connected_with(direct, monkeypatch):
    seen = []

    def connect(endpoints, **options):
        seen.append((endpoints, options))
        return FakeCluster(endpoints)

    monkeypatch.setattr(opening, "connect", connect)
    token = Token("a token of 24 characters")
    wanted = opening.Workers(["a:1"], 0, [CPU, "local:CPU"], 5, 2.0, direct, "f16", 30, token)
    with opening.open_workers(wanted) as devices:
        assert [device.name for device in devices] == ["RPC0", CPU, "local:CPU"]
    (given,) = seen
    assert given == (
        ["a:1", CPU, "local:CPU"],
        {
            "timeout": 2.0,
            "direct_copies": direct,
            "wire_dtype": "f16",
            "poll": 30,
            "threads": 5,
            "token": token,
            "tls": None,
        },
    )


class FakeCluster(SimpleNamespace):
    def __init__(self, endpoints):
        names = [text if text.startswith("local:") else "RPC0" for text in endpoints]
        super().__init__(devices=[FakeDevice(name) for name in names], notes=[])

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass


def test_what_a_list_cannot_name():
    known = [FakeDevice("RPC0"), FakeDevice("CUDA0")]
    assert pick(["CUDA0", "RPC0"], known) == known[::-1]
    with pytest.raises(UsageError, match="no device 'RPC1'; there are: RPC0, CUDA0"):
        pick(["RPC0", "RPC1"], known)
    with pytest.raises(UsageError, match="CPU computes what is on no device"):
        pick(["CPU"], known)
    with pytest.raises(UsageError, match="there are: none"):
        pick(["RPC0"], [])
