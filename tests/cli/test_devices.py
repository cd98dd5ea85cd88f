"""`caravan devices`: what it tells people, programs, and of which devices and ways."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations

import pytest

from caravan.cli import devices as devices_module
from caravan.cli import main as cli_main
from caravan.llm import opening
from caravan.llm.survey import CopyFacts, DeviceFacts, Survey, survey
from caravan.plan.cluster import parse_cluster
from caravan.worker.local import Worker
from llm.fakes import FakeDevice
from servers import address_elsewhere

GIB = 1 << 30
LONG = "unix:/tmp/" + "d" * 70
FOUND = Survey(
    [
        DeviceFacts(
            "RPC0", "lab1:50052", "GPU", "Some GPU", "0.26.0", None, 9 * GIB, 10 * GIB, "8.0.0", 1
        ),
        DeviceFacts(
            "RPC1", "lab2:50052", None, "lab2:50052", None, None, GIB, 2 * GIB, "7.0.0", None
        ),
        DeviceFacts("local:CPU:1", LONG, "CPU", "My CPU", "0.26.0", 1, GIB, GIB, "8.0.0", 1),
        DeviceFacts("CPU", None, "CPU", "My CPU", "0.26.0", 2, GIB, GIB, None, None),
    ],
    [
        CopyFacts("RPC0", "local:CPU:1", "relay", None, "no address to reach it"),
        CopyFacts("local:CPU:1", "RPC0", "direct", 1_234_567, ""),
        CopyFacts("RPC0", "RPC1", "within", None, ""),
        CopyFacts("RPC1", "RPC0", "relay", None, " ".join(["cannot connect to it;"] * 6)),
    ],
)
TOLD = """\
NAME         KIND  THREADS  FREE MiB  TOTAL MiB  ENGINE  PROTOCOL
RPC0         GPU         -      9216      10240  0.26.0  extension 1
  Some GPU at lab1:50052
RPC1         -           -      1024       2048  -       RPC 7.0.0
  at lab2:50052
local:CPU:1  CPU         1      1024       1024  0.26.0  extension 1
  My CPU
  at LONG
CPU          CPU         2      1024       1024  0.26.0  -
  My CPU, in this process

FROM         TO           COPIES
RPC0         local:CPU:1  relay: no address to reach it
local:CPU:1  RPC0         direct, round trip 1.23 ms
RPC0         RPC1         within the worker
RPC1         RPC0         relay: cannot connect to it; cannot connect to it;
                          cannot connect to it; cannot connect to it; cannot
                          connect to it; cannot connect to it;
"""


def told(capsys: pytest.CaptureFixture[str], *words: str) -> Survey:
    """What it prints as JSON."""
    assert cli_main.main(["devices", "--json", "--no-measure", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    return Survey(
        [DeviceFacts(**device) for device in found["devices"]],
        [CopyFacts(**copy) for copy in found["copies"]],
    )


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("CARAVAN_RPC", raising=False)
    monkeypatch.delenv("LLAMA_ARG_RPC", raising=False)


def test_for_people():
    assert "\n".join(devices_module._told(FOUND, 80)) + "\n" == TOLD.replace("LONG", LONG)


def test_for_programs():
    lines = [line.split("\t") for line in devices_module._columns(FOUND)]
    assert lines[4] == [""]
    assert {len(line) for line in lines[:4]} == {19}
    assert {len(line) for line in lines[5:]} == {7}
    assert lines[3][:8] == ["CPU", "-", "CPU", "My CPU", "0.26.0", "2", str(GIB), str(GIB)]
    assert set(lines[3][8:]) == {"-"}
    assert lines[6] == ["local:CPU:1", "RPC0", "direct", "1234567", "-", "-", "-"]


def test_without_workers_it_lists_this_machines_own(capsys):
    assert cli_main.main(["devices"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split("\t")[:3] == ["CPU", "-", "CPU"]
    assert told(capsys, "-dev", "none").devices == told(capsys).devices


def test_workers_and_local_devices_and_the_ways_between_them(capsys, scratch):
    with Worker("CPU:1,CPU:2") as worker, Worker("CPU:1", options=("--no-extension",)) as plain:
        rpc = ("--rpc", f"{worker.endpoint},{plain.endpoint}")
        found = told(capsys, *rpc, "-dev", "local:CPU:1,RPC0/RPC1/RPC2")
        assert [(d.name, d.kind, d.threads, d.extension) for d in found.devices] == [
            ("local:CPU:1", "CPU", 1, 1),
            ("RPC0", "CPU", 1, 1),
            ("RPC1", "CPU", 2, 1),
            ("RPC2", None, None, None),
        ]
        assert found.devices[0].endpoint.startswith("unix:")
        assert found.devices[1].endpoint == worker.endpoint
        assert found.devices[3].engine is None and found.devices[3].protocol == "8.0.0"
        ways = {(copy.source, copy.target): copy for copy in found.copies}
        assert list(ways) == list(permutations(["local:CPU:1", "RPC0", "RPC1", "RPC2"], 2))
        assert ways["RPC0", "RPC1"].way == ways["RPC1", "RPC0"].way == "within"
        for pair in (("local:CPU:1", "RPC0"), ("RPC1", "local:CPU:1")):
            assert ways[pair].way == "direct"
            assert ways[pair].round_trip_ns > 0
            assert ways[pair].reason == ""
        assert ways["RPC2", "RPC0"].reason == "a llama.cpp server has no direct copies"
        off = told(capsys, *rpc, "--no-direct-copies")
        assert [d.name for d in off.devices] == ["RPC0", "RPC1", "RPC2", "CPU"]
        ways = {(copy.source, copy.target): copy.way for copy in off.copies}
        # what stays in a worker does not pass this process
        assert ways.pop(("RPC0", "RPC1")) == ways.pop(("RPC1", "RPC0")) == "within"
        assert set(ways.values()) == {"relay"}
        off = told(capsys, *rpc, "-dev", "local:CPU:1,RPC0", "--no-direct-copies")
        reasons = {c.reason for c in off.copies if (c.source, c.target) == ("local:CPU:1", "RPC0")}
        assert reasons == {"direct copies are off"}
    assert list(scratch.iterdir()) == []


def test_a_simulated_device_says_so(capsys, scratch):
    (device,) = told(capsys, "-dev", "local:sim:GFLOPS=10,GBPS=5").devices
    assert (device.name, device.kind) == ("local:sim:GFLOPS=10,GBPS=5", "sim")


def test_a_worker_elsewhere_cannot_reach_a_local_device(capsys, scratch):
    """This machine counts as another one under an address that others know it by."""
    with Worker("CPU:1", host=address_elsewhere(), options=("--insecure",)) as worker:
        there, back = told(capsys, "--rpc", worker.endpoint, "-dev", "local:CPU:1,RPC0").copies
    assert (there.way, back.way) == ("direct", "relay")
    assert back.reason.endswith("/socket is an address for this machine alone")


def test_it_lists_what_bench_lists(capsys, scratch):
    words = ("--local-workers", "1", "-dev", "RPC0/local:CPU:1")
    names = [device.name for device in told(capsys, *words).devices]
    assert cli_main.main(["bench", "--list-devices", *words]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.rpartition(": ")[0].strip() for line in lines] == names


def test_a_device_of_this_process_has_no_way_of_its_own(monkeypatch):
    monkeypatch.setattr("caravan.llm.survey._own_facts", lambda device: device.name)
    found = survey([FakeDevice("CUDA0"), FakeDevice("CUDA1")])
    assert found.devices == ["CUDA0", "CUDA1"]
    assert [(c.way, c.reason) for c in found.copies] == [
        ("relay", "CUDA0 is a device of this process"),
        ("relay", "CUDA1 is a device of this process"),
    ]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--rpc", "a:1", "--local-workers", "2"], "exclude each other"),
        (["--rpc", "a:x"], "port 'x'"),
        (["-dev", "local:CPU:0"], "--device: device 'CPU:0': threads"),
        (["-dev", "RPC0,"], "empty device name"),
        (["-dev", "none,RPC0"], "none stands alone"),
        (["-dev", "RPC0,RPC0"], "'RPC0' is named twice"),
        (["--timeout", "0"], "not a time"),
        (["stray"], "stray"),
    ],
)
def test_wrong_usage(args, words, capsys, monkeypatch):
    def start(*arguments, **options):
        raise AssertionError("started")

    monkeypatch.setattr(opening, "LocalWorkers", start)
    monkeypatch.setattr(opening, "connect", start)
    assert cli_main.main(["devices", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_an_unknown_device_and_a_worker_that_is_not_there(capsys):
    assert cli_main.main(["devices", "-dev", "RPC0"]) == 2
    assert "no device 'RPC0'; there are: none" in capsys.readouterr().err
    assert cli_main.main(["devices", "--rpc", "127.0.0.1:1"]) == 1
    assert "refused" in capsys.readouterr().err


MEASURED = replace(
    FOUND,
    devices=[
        replace(
            FOUND.devices[0],
            host="lab1",
            gflops=12345.6,
            gbps=412.34,
            graph_ns=12000,
            turn_ns=45000,
            check_ns=1_300_000,
            check_node_ns=1200,
            round_trip_ns=234_567,
            bytes_per_second=117e6,
        ),
        *FOUND.devices[1:],
    ],
    copies=[
        *FOUND.copies[:1],
        replace(FOUND.copies[1], latency_ns=60_000, bytes_per_second=1.5e9),
        replace(FOUND.copies[2], latency_ns=60_000, bytes_per_second=5e9),
    ],
)
TOLD_MEASURED = """\

NAME          GFLOPS   GB/s  ROUND TRIP ms  TO IT MB/s
RPC0         12345.6  412.3           0.23         117
RPC1               -      -              -           -
local:CPU:1        -      -              -           -
CPU                -      -              -           -

FROM         TO           COPIES
RPC0         local:CPU:1  relay: no address to reach it
local:CPU:1  RPC0         direct, round trip 1.23 ms, 1500 MB/s
RPC0         RPC1         within the worker, 5000 MB/s
"""


def test_what_was_measured_for_people_and_for_programs():
    told_all = "\n".join(devices_module._told(MEASURED, 80)) + "\n"
    assert told_all.endswith(TOLD_MEASURED)
    assert max(map(len, TOLD_MEASURED.splitlines())) <= 80
    lines = [line.split("\t") for line in devices_module._columns(MEASURED)]
    speeds = ["12345.6", "412.34", "12000", "45000", "1300000", "1200", "234567", "117000000.0"]
    assert lines[0][10:] == ["lab1", *speeds]
    assert lines[6][5:] == ["60000", "1500000000.0"]


def test_devices_are_measured_and_can_be_planned_for(capsys, tmp_path, monkeypatch, scratch):
    """What it prints as JSON is a cluster."""
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path))
    words = ["devices", "--json", "-dev", "local:sim:GFLOPS=100,GBPS=50,local:CPU:1"]
    assert cli_main.main(words) == 0
    out, err = capsys.readouterr()
    assert err == "caravan: measuring, which takes a second for each device\n"
    found = json.loads(out)
    for device in found["devices"]:
        assert device["gflops"] > 0 and device["gbps"] > 0 and device["host"] == "localhost"
        assert device["round_trip_ns"] > 0 and device["bytes_per_second"] > 0
    assert [copy["bytes_per_second"] > 0 for copy in found["copies"]] == [True, True]
    cluster = parse_cluster(found)
    assert [d.name for d in cluster.devices] == [d["name"] for d in found["devices"]]
    assert cluster.link(0, 1).way == "direct"
    # what is known is not measured again, unless that is wanted
    assert cli_main.main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    again = json.loads(out)
    assert [d["gflops"] for d in again["devices"]] == [d["gflops"] for d in found["devices"]]
    assert cli_main.main([*words, "--fresh"]) == 0
    assert "measuring" in capsys.readouterr().err
