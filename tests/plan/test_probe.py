"""Devices and links, measured: simulated ones, whose numbers are known, and real ones.

What a busy machine makes slower is only held against one side.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from caravan.errors import AllocationError
from caravan.llm import ContextParams, ModelParams, connect
from caravan.llm.cores import physical_cores
from caravan.models.fake import FakeModel
from caravan.plan import layers, measure
from caravan.plan.links import measure_head_link, measure_link
from caravan.plan.probe import measure_device
from caravan.plan.profile import DeviceProfile
from caravan.plan.scratch import Scratch
from caravan.plan.work import ModelWork
from caravan.worker.local import Worker

sys.path.append(str(Path(__file__).parent.parent.parent / "benchmarks"))
SIMS = "sim:GFLOPS=200,GBPS=50,US=300,sim:GFLOPS=2e-3,GBPS=2e-3,GIB=0.01,CPU:1"
SHAPE = FakeModel(layers=4, embd=128, heads=4, kv_heads=2, ff=256, vocab=512, ctx=1024, type="F16")
CONTEXT = ContextParams(n_ctx=1024, n_ubatch=128)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "described.gguf"
    SHAPE.write(path)
    return ModelWork.of(path, ModelParams(), CONTEXT, sequences=(1, 2))


@pytest.fixture(scope="module")
def devices():
    """A simulated device, one that is slower than any, a CPU; a llama.cpp server's; a worker's."""
    with (
        Worker(SIMS) as worker,
        Worker("CPU:1", options=("--no-extension",)) as plain,
        Worker("sim:GFLOPS=100,GBPS=50") as other,
        connect([worker.endpoint, plain.endpoint, other.endpoint]) as cluster,
    ):
        yield cluster.devices


def free(device):
    return device.link.memory()[0]


def measure_times(device, work, profile, say=None):
    """Of all layers."""
    found = layers.measure_classes(device, work, profile, sorted(set(work.classes)), say)
    return layers.assemble(work, profile, found)


def test_a_simulated_device_has_the_speeds_that_it_was_given(devices):
    device = devices[0]
    before = free(device)
    profile = measure_device(device)
    assert 0.3 * 200 < profile.gflops < 1.02 * 200
    assert 0.3 * 50 < profile.gbps < 1.02 * 50
    assert profile.graph > 0.98 * 300e-6
    assert profile.turn > 0.9 * 300e-6
    # checking a graph is none of the simulation
    assert 0 < profile.check_graph + profile.check < 0.1
    assert profile.threads == 0
    assert (profile.name, profile.host) == (device.name, "localhost")
    assert profile.memory_total == device.memory()[1]
    assert free(device) == before


def test_the_slowest_device_is_measured_with_the_smallest_graphs(devices):
    profile = measure_device(devices[1])
    assert 0 < profile.gflops < 1.02 * 2e-3
    assert 0 < profile.gbps < 1.02 * 2e-3


@pytest.mark.parametrize("number", [2, 3])
def test_a_real_one_has_some(devices, number):
    device = devices[number]
    profile = measure_device(device)
    assert profile.gflops > 0.01 and profile.gbps > 0.01
    assert 0 < profile.graph < 1 and 0 <= profile.turn < 1
    assert 0 <= profile.check < 0.1 and 0 <= profile.check_graph < 0.1
    assert profile.threads == device.link.info.threads


def test_nothing_is_left_after_an_error(devices, monkeypatch):
    device = devices[0]
    before = free(device)
    with pytest.raises(AllocationError), Scratch(device) as scratch:
        scratch.take(1 << 20)
        scratch.take(1 << 55)
    assert free(device) == before


@pytest.mark.parametrize("number", [2, 3])
def test_layers_are_measured_by_their_own_graphs(devices, work, number, monkeypatch):
    device = devices[number]
    made = []
    graph = Scratch.graph

    def noted(self, rows, n_nodes, memory):
        made.append(n_nodes)
        return graph(self, rows, n_nodes, memory)

    monkeypatch.setattr(Scratch, "graph", noted)
    monkeypatch.setattr(layers, "_UNCACHED", 2 << 20)
    profile = DeviceProfile("x", 50.0, 10.0)
    said: list[str] = []
    times = measure_times(device, work, profile, said.append)
    assert said == []
    tokens, kv = layers.axes(work.prompt)
    assert (times.prompt.tokens, times.prompt.kv) == (tokens, kv)
    assert times.prompt.seconds.shape == (len(tokens), len(kv), SHAPE.layers + 1)
    # the output layer has nothing to do for a prompt
    assert (times.prompt.seconds[:, :, :-1] > 0).mean() > 0.8
    assert (times.prompt.seconds[:, :, -1] == 0).all()
    assert (times.decode.seconds > 0).mean() > 0.8
    # layers of one class are measured once, several times in one graph where there are few tokens
    assert (times.decode.seconds[:, :, 1] == times.decode.seconds[:, :, 2]).all()
    assert max(made) > 3 * min(n for n in made if n > 1)


def test_a_simulated_device_is_not_asked_for_layers(devices, work, monkeypatch):
    monkeypatch.setattr(measure, "measure_classes", None)
    profile = DeviceProfile("x", 200.0, 50.0)
    cluster = measure.ClusterProfile((profile,), (measure.LinkProfile(),))
    (found,) = measure.times_of(devices[:1], work, cluster)
    computed = work.times(profile)
    np.testing.assert_array_equal(found.prompt.seconds, computed.prompt.seconds)
    np.testing.assert_array_equal(found.decode.seconds, computed.decode.seconds)


def test_what_takes_too_long_is_computed(devices, work, monkeypatch):
    """In the proportion of what was measured; and it is told."""
    monkeypatch.setattr(layers, "_ALL_POINTS", -1.0)
    profile = DeviceProfile("x", 50.0, 10.0)
    said: list[str] = []
    times = measure_times(devices[2], work, profile, said.append)
    assert said == [f"{devices[2].name} is slow: some of its times are computed"]
    tokens, kv = layers.axes(work.decode)
    computed = work.times(profile).decode.at(tokens[0], kv[0])
    np.testing.assert_allclose(times.decode.at(tokens[0], kv[0]), computed)


def test_without_memory_layers_are_computed(devices, work, monkeypatch):
    monkeypatch.setattr(devices[2], "memory", lambda: (4096, 1 << 34))
    profile = DeviceProfile("x", 50.0, 10.0)
    said: list[str] = []
    times = measure_times(devices[2], work, profile, said.append)
    assert len(said) == len(work.signatures)
    assert "no memory to measure a layer in" in said[0]
    tokens, kv = layers.axes(work.prompt)
    computed = work.times(profile).prompt.at(tokens[-1], kv[0])
    np.testing.assert_allclose(times.prompt.at(tokens[-1], kv[0]), computed)


def test_links_of_each_kind(devices):
    sim, _, cpu, plain, other = devices
    for device in (sim, cpu, plain):
        link = measure_head_link(device)
        assert 0 < link.seconds < 1 and link.rate > 1e6
    within = measure_link(sim, cpu)
    assert within.way == "within" and 0 <= within.seconds < 1 and within.rate > 1e6
    direct = measure_link(cpu, other)
    assert direct.way == "direct" and 0 <= direct.seconds < 1 and direct.rate > 1e6
    assert measure_link(cpu, plain).way == "relay"


def test_a_slow_link_is_seen_as_slow(devices):
    from link import Link

    port = int(devices[4].endpoint.rpartition(":")[2])
    with Link(port, 2.0, 80.0) as relay, connect([f"127.0.0.1:{relay.port}"]) as cluster:
        (device,) = cluster.devices
        link = measure_head_link(device)
        assert link.seconds > 0.0019
        assert link.rate < 1.1e7
        profile = measure_device(device)
        # it has no part in what the device takes
        assert 0.3 * 100 < profile.gflops < 1.02 * 100


# measure


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path))
    return tmp_path / "profiles"


@pytest.fixture
def told(monkeypatch):
    """Devices, and links to them, that are measured by being looked at."""
    asked: list[str] = []

    def look(device):
        asked.append(device.name)
        return DeviceProfile(device.name, 100.0, 50.0, 1e-5, 2e-5, 1, 2, "somewhere")

    monkeypatch.setattr(measure, "measure_device", look)
    monkeypatch.setattr(measure, "measure_head_link", lambda device: measure.LinkProfile(1e-4, 1e9))
    return asked


def test_a_device_is_measured_once(devices, own_cache, told):
    steps: list[str] = []
    first = measure.measure_cluster(devices, on_step=steps.append, links=False)
    assert told == [device.name for device in devices]
    assert steps == [f"measuring {device.name}" for device in devices]
    again = measure.measure_cluster(devices[::-1], links=False)
    assert len(told) == len(devices)
    assert [d.name for d in again.devices] == [d.name for d in devices[::-1]]
    assert [d.gflops for d in again.devices] == [d.gflops for d in first.devices]
    assert again.devices[0].memory_total == devices[-1].memory()[1]
    assert [d.threads for d in again.devices[::-1]] == [d.link.info.threads for d in devices]
    assert again.processors == {"localhost": physical_cores()}
    assert len(list(own_cache.iterdir())) == len(devices)
    measure.measure_cluster(devices[:1], fresh=True, links=False)
    assert told[len(devices) :] == [devices[0].name]


def test_hosts_are_measured_together_and_stay_in_order(devices, own_cache, told, monkeypatch):
    monkeypatch.setattr(measure, "host_of", lambda device: f"host{int(device.name[3:]) % 2}")
    cluster = measure.measure_cluster(devices, links=False)
    assert [d.name for d in cluster.devices] == [d.name for d in devices]


def test_a_full_device_has_no_speed(devices, own_cache, work, monkeypatch):
    def full(device):
        raise AllocationError("no room")

    monkeypatch.setattr(measure, "measure_device", full)
    cluster = measure.measure_cluster(devices[2:3], links=False)
    assert cluster.devices[0].gflops == 0
    (times,) = measure.times_of(devices[2:3], work, cluster)
    assert times.prompt.at(128, 256).sum() > 0.1


def test_links_between_two_workers_are_measured_once(devices, own_cache, told, monkeypatch):
    pairs = []
    link = measure.LinkProfile(1e-4, 1e9)

    def pair(source, target):
        pairs.append((source.name, target.name))
        return link

    monkeypatch.setattr(measure, "measure_link", pair)
    cluster = measure.measure_cluster(devices)
    # within the first worker, and from there to the last
    assert len(pairs) == 2
    assert len(cluster.between) == 4 * 3
    assert cluster.link(0, 3).way == "relay"


def test_a_way_that_is_lost_meanwhile_is_a_relay(devices, own_cache, told, monkeypatch):
    lost = measure.LinkProfile(way="relay")
    monkeypatch.setattr(measure, "measure_link", lambda source, target: lost)
    assert measure.measure_cluster(devices).between == {}


def test_ctrl_c_ends_a_measurement_and_frees_its_memory(devices, work, monkeypatch):
    link, taken = devices[2].link, set()
    alloc, give_back = link.alloc, link.free

    def noted(size):
        memory = alloc(size)
        taken.add(memory.handle)
        return memory

    monkeypatch.setattr(link, "alloc", noted)
    monkeypatch.setattr(link, "free", lambda handle: give_back(handle) or taken.remove(handle))
    # while the first layer is measured
    held = itertools.chain([False], itertools.repeat(True))
    monkeypatch.setattr("caravan.interrupt.pending", lambda: next(held))
    with pytest.raises(KeyboardInterrupt):
        measure_times(devices[2], work, DeviceProfile("x", 50.0, 10.0))
    assert not taken


def test_of_devices_in_an_order_a_link_is_measured_from_each_to_the_next(
    devices, own_cache, told, monkeypatch
):
    rates = iter((3e9, 1e9))
    pairs = []

    def pair(source, target):
        pairs.append((source.name, target.name))
        return measure.LinkProfile(1e-4 * len(pairs), next(rates))

    monkeypatch.setattr(measure, "measure_link", pair)
    some = devices[:3]
    cluster = measure.measure_cluster(some, ordered=True)
    assert pairs == [(one.name, other.name) for one, other in itertools.pairwise(some)]
    assert cluster.link(0, 1) == measure.LinkProfile(1e-4, 3e9)
    assert cluster.link(0, 2) == measure.LinkProfile(2e-4, 1e9)
    assert set(cluster.between) == {(0, 1), (1, 2), (0, 2)}


def test_times_of_layers_are_kept(devices, own_cache, work, monkeypatch):
    monkeypatch.setattr(layers, "_UNCACHED", 0)
    some = [devices[0], devices[2]]
    profile = DeviceProfile("x", 50.0, 10.0)
    cluster = measure.ClusterProfile((profile, profile), (measure.LinkProfile(),) * 2)
    steps: list[str] = []
    first = measure.times_of(some, work, cluster, on_step=steps.append)
    assert steps == [f"measuring the model's layers on {some[1].name}"]
    monkeypatch.setattr(measure, "measure_classes", None)
    again = measure.times_of(some, work, cluster)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.prompt.seconds, other.prompt.seconds)
        np.testing.assert_array_equal(one.decode.seconds, other.decode.seconds)


def test_a_device_of_this_machine_is_known_under_another_port(devices):
    device = devices[2]
    known = measure.identity(device)
    assert known.endpoint == "localhost" and known.threads == 1
    assert measure.identity(devices[3]).endpoint == devices[3].endpoint
    assert known != replace(known, memory_total=known.memory_total + 1)


def test_servers_that_do_not_say_what_they_have_are_told_apart():
    with (
        Worker("CPU:1,CPU:1", options=("--no-extension",)) as one,
        Worker("CPU:1", options=("--no-extension",)) as other,
        connect([one.endpoint, other.endpoint]) as cluster,
    ):
        assert len({measure.identity(device) for device in cluster.devices}) == 3


def test_a_known_device_that_is_full_by_now_has_computed_times(work, monkeypatch):
    with (
        Worker("CPU:1", options=("--max-memory", "4M")) as worker,
        connect([worker.endpoint]) as cluster,
    ):
        (device,) = cluster.devices
        known = measure.measure_cluster([device], links=False)
        held = [device.link.alloc(size) for size in (1 << 20,) * 4]
        device.memory_changed()
        (times,) = measure.times_of([device], work, known, fresh=True)
        assert len(held) == 4
        expected = work.times(known.devices[0]).prompt
        for n_tokens, n_kv in ((32, 256), (128, 1024)):
            np.testing.assert_allclose(
                times.prompt.at(n_tokens, n_kv), expected.at(n_tokens, n_kv), rtol=1e-9
            )
