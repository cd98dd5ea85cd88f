"""Clusters from files: by hand, and as `caravan devices` prints them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from caravan.errors import UsageError
from caravan.plan.cluster import PRESETS, parse_cluster, read_cluster
from caravan.plan.profile import HEAD, LinkProfile

GPU = {"name": "gpu", "gflops": 20000, "gbps": 600, "memory_gib": 24}
GIB = 1 << 30


def test_a_device_is_all_that_it_takes():
    cluster = parse_cluster({"devices": [GPU]})
    (device,) = cluster.devices
    assert (device.name, device.gflops, device.gbps) == ("gpu", 20000.0, 600.0)
    assert device.memory_free == device.memory_total == 24 * GIB
    assert device.graph > 0 and device.turn > 0
    assert cluster.to_head == (PRESETS["1GbE"],)
    assert cluster.between == {}


def test_many_devices_of_one_kind():
    slow = {"name": "old", "gflops": 1.5, "gbps": 2, "memory_gib": 0.5, "turn_us": 300}
    data = {"devices": [{**GPU, "count": 16}, slow], "link": "10GbE"}
    cluster = parse_cluster(data)
    assert [d.name for d in cluster.devices] == [*(f"gpu{i}" for i in range(16)), "old"]
    assert cluster.devices[16].turn == pytest.approx(300e-6)
    assert len(cluster.between) == 17 * 16
    assert set(cluster.between.values()) == {PRESETS["10GbE"]}


def test_a_link_in_numbers():
    cluster = parse_cluster({"devices": [GPU], "link": {"ms": 5, "gbit": 0.2}})
    assert cluster.to_head == (LinkProfile(0.005, 25e6),)


def test_sites_and_links_between_them():
    data = {
        "devices": [
            {**GPU, "count": 2, "site": "lab"},
            {**GPU, "name": "den", "site": "home"},
            {**GPU, "name": "attic", "site": "home"},
        ],
        "link": "25GbE",
        "head": "home",
        "links": [
            {"between": ["lab", "home"], "link": "far"},
            {"between": ["home", "home"], "link": "wifi"},
            {"between": ["den", "gpu0"], "link": "1GbE"},
            {"between": ["head", "attic"], "link": "2.5GbE"},
        ],
    }
    cluster = parse_cluster(data)
    assert cluster.link(0, 1) == PRESETS["25GbE"]
    assert cluster.link(0, 3) == cluster.link(3, 0) == PRESETS["far"]
    assert cluster.link(0, 2) == cluster.link(2, 0) == PRESETS["1GbE"]
    assert cluster.link(2, 3) == PRESETS["wifi"]
    assert cluster.link(HEAD, 0) == PRESETS["far"]
    assert cluster.link(2, HEAD) == PRESETS["wifi"]
    assert cluster.link(HEAD, 3) == PRESETS["2.5GbE"]


def test_devices_of_one_host_and_relays():
    data = {"devices": [{**GPU, "count": 2, "host": "big"}, {**GPU, "name": "x"}], "direct": False}
    cluster = parse_cluster(data)
    assert cluster.link(0, 1).way == "within"
    assert cluster.link(0, 2).way == "relay"
    assert cluster.devices[0].host == "big"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "expected an object"),
        ({}, "'devices' is not a list"),
        ({"devices": []}, "has no devices"),
        ({"devices": [7]}, "devices[0]: expected an object"),
        ({"devices": [{**GPU, "tflops": 1}]}, "devices[0] has no 'tflops'; it may have: name,"),
        ({"devices": [{**GPU, "gflops": None}]}, "devices[0]: 'gflops' is missing"),
        ({"devices": [{**GPU, "gflops": 0}]}, "'gflops' cannot be 0"),
        ({"devices": [{**GPU, "gbps": -2}]}, "'gbps' cannot be -2"),
        ({"devices": [{**GPU, "gbps": "fast"}]}, "'gbps' is not a number"),
        ({"devices": [{**GPU, "gbps": True}]}, "'gbps' is not a number"),
        ({"devices": [{**GPU, "gbps": float("inf")}]}, "'gbps' is not a number"),
        ({"devices": [{**GPU, "gbps": 10**400}]}, "'gbps' is not a number"),
        ({"devices": [{**GPU, "gbps": 1e300}]}, "'gbps' cannot be 1e+300"),
        ({"devices": [{**GPU, "gbps": 1e-300}]}, "'gbps' cannot be 1e-300"),
        ({"devices": [{**GPU, "memory_gib": 1e300}]}, "'memory_gib' cannot be 1e+300"),
        ({"devices": [{**GPU, "name": 3}]}, "'name' is not a name"),
        ({"devices": [{**GPU, "name": "\x1b[2J"}]}, "'name' is not a name"),
        ({"devices": [{**GPU, "name": "\ud800"}]}, "'name' is not a name"),
        ({"devices": [{**GPU, "name": "head"}]}, "'head' is no name for a device"),
        ({"devices": [GPU, GPU]}, "'gpu' is named twice"),
        ({"devices": [{**GPU, "count": 1.5}]}, "'count' is not a number of devices"),
        ({"devices": [{**GPU, "count": 0}]}, "'count' cannot be 0"),
        ({"devices": [{**GPU, "count": 1000}]}, "up to 256"),
        ({"devices": [GPU], "link": "10gbe"}, "no link '10gbe'; there are: 1GbE, 2.5GbE, 10GbE"),
        ({"devices": [GPU], "link": {"ms": 1}}, "cluster, link: 'gbit' is missing"),
        ({"devices": [GPU], "link": {"ms": 1, "mbit": 1}}, "link has no 'mbit'"),
        ({"devices": [GPU], "link": 10}, "cluster, link: expected an object"),
        ({"devices": [GPU], "links": {}}, "'links' is not a list"),
        ({"devices": [GPU], "links": [{"between": ["gpu"]}]}, "links[0]: 'between' is not a list"),
        ({"devices": [GPU], "links": [{"between": ["gpu", 1]}]}, "'between' is not a list"),
        (
            {"devices": [GPU], "links": [{"between": ["gpu", "moon"], "link": "far"}]},
            "there is no 'moon'; there are: gpu, head",
        ),
        ({"devices": [GPU], "links": [{"between": ["gpu", "head"]}]}, "'link' is missing"),
        ({"devices": [GPU], "direct": 1}, "'direct' is neither true nor false"),
        ({"devices": [GPU], "nodes": []}, "cluster has no 'nodes'"),
    ],
)
def test_what_is_wrong_is_named(data, words):
    with pytest.raises(UsageError) as caught:
        parse_cluster(data)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def measured(name, **more):
    return {"name": name, "endpoint": "a:1", "memory_free": 5, "memory_total": 9, **more}


def test_what_devices_has_printed():
    fast = {"gflops": 100.0, "gbps": 30.0, "graph_ns": 20000, "turn_ns": 50000, "host": "a"}
    fast |= {"check_ns": 1300000, "check_node_ns": 1200}
    link = {"round_trip_ns": 400000, "bytes_per_second": 1e9}
    data = {
        "devices": [
            measured("RPC0", **fast, **link),
            measured("RPC1", **fast, **link, kind=None, engine=None),
            measured("CPU", gflops=None, gbps=None),
        ],
        "copies": [
            {
                "source": "RPC0", "target": "RPC1", "way": "direct", "round_trip_ns": 1000000,
                "reason": "", "latency_ns": 60000, "bytes_per_second": 2e9,
            },
            {
                "source": "RPC1", "target": "RPC0", "way": "relay", "round_trip_ns": None,
                "reason": "no", "latency_ns": None, "bytes_per_second": None,
            },
            {"source": "RPC0", "target": "CPU", "way": "relay"},
        ],
    }  # fmt: skip
    cluster = parse_cluster(data)
    assert [d.name for d in cluster.devices] == ["RPC0", "RPC1"]
    assert cluster.devices[0].graph == pytest.approx(20e-6)
    assert cluster.devices[0].turn == pytest.approx(50e-6)
    assert cluster.devices[0].check_graph == pytest.approx(1.3e-3)
    assert cluster.devices[0].check == pytest.approx(1.2e-6)
    assert cluster.to_head[1] == LinkProfile(200e-6, 1e9)
    assert cluster.link(0, 1) == LinkProfile(60e-6, 2e9)
    assert cluster.link(1, 0).way == "relay"
    del data["devices"][:2]
    with pytest.raises(UsageError, match="no device that was measured"):
        parse_cluster(data)


def test_files(tmp_path):
    path = tmp_path / "cluster.json"
    with pytest.raises(UsageError, match=r"cluster\.json: No such file"):
        read_cluster(path)
    path.write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        read_cluster(path)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match="is not JSON"):
        read_cluster(path)
    path.write_text(json.dumps({"devices": [GPU]}))
    assert read_cluster(path).devices[0].name == "gpu"


def test_presets_get_faster():
    rates = [PRESETS[name].rate for name in ("far", "wifi", "1GbE", "2.5GbE", "10GbE", "25GbE")]
    assert rates == sorted(rates)


def test_the_documentation_has_these_presets_and_an_example_that_is_sound():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    part = page.partition("### Clusters in files\n")[2].partition("\n## ")[0]
    (example,) = re.findall(r"^```json\n(.*?)^```$", part, re.M | re.S)
    cluster = parse_cluster(json.loads(example))
    assert [d.name for d in cluster.devices] == ["gpu0", "gpu1", "gpu2", "gpu3", "den"]
    assert cluster.link(0, 4) == PRESETS["far"]
    rows = re.findall(r"^\| `([^`]+)` \| ([\d.]+) \| ([\d.]+) \|$", part, re.M)
    told = {name: (float(ms) / 1e3, float(rate) * 1e6) for name, ms, rate in rows}
    assert told == {
        name: pytest.approx((link.seconds, link.rate)) for name, link in PRESETS.items()
    }
