"""What is run to check a plan, and what is made of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

import caravan
from caravan.llm.needs import DeviceNeeds
from caravan.llm.params import ContextParams, ModelParams
from caravan.models.fake import FakeModel
from caravan.plan.options import Option, Plan
from caravan.plan.pipeline import HeadTimes, Setting, Traffic
from caravan.plan.profile import ClusterProfile, DeviceProfile, LinkProfile
from caravan.plan.times import DeviceTimes, Grid
from caravan.plan.verify import Check, _fit_together, crossing, errors, verify, worth_checking

LAYERS = 4


def option(
    devices: tuple[int, ...], counts: tuple[int, ...], *, fits: bool = True, need: int = 10
) -> Option:
    needs = tuple(DeviceNeeds(f"RPC{n}", "", need, 0, 0, 25, 25) for n in devices)
    return Option(devices, counts, needs, fits, (), 64 if len(devices) > 1 else None)


def plan(*options: Option) -> Plan:
    grid = Grid((1, 512), (256,), np.full((2, 1, LAYERS + 1), 1e-4))
    names = ("RPC0", "RPC1", "RPC2")
    cluster = ClusterProfile(
        tuple(DeviceProfile(name, 1.0, 1.0) for name in names), (LinkProfile(),) * 3
    )
    traffic = Traffic(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    head = HeadTimes(1e-3, 0.0, 0.0, 0.0, 0.0)
    setting = Setting(cluster, (DeviceTimes(grid, grid),) * 3, traffic, head, LAYERS, n_ctx=512)
    fitting = [o for o in options if o.fits]
    single = next((o for o in fitting if len(o.devices) == 1), None)
    return Plan(setting, names, single, options, fitting[0] if fitting else None, (), "")


def test_the_best_of_each_number_of_devices_is_run():
    found = worth_checking(
        plan(
            option((0, 1), (3, 2), fits=False),
            option((1, 0), (4, 1)),
            option((0, 1, 2), (2, 2, 1)),
            option((2,), (5,)),
            option((0,), (5,)),
        )
    )
    assert [(o.devices, o.counts) for o in found] == [
        ((1, 0), (4, 1)),
        ((2,), (5,)),
        ((0, 1, 2), (2, 2, 1)),
    ]
    assert [len(o.needs) for o in found] == [2, 1, 3]


def test_nothing_is_run_where_nothing_fits():
    assert worth_checking(plan(option((0,), (5,), fits=False))) == []


def test_options_are_loaded_together_where_there_is_room():
    one, both = option((0,), (5,)), option((0, 1), (3, 2))
    assert _fit_together([one, both])
    assert not _fit_together([one, both, both])


def test_errors():
    checks = [
        Check((), (), "prompt", 1, 110.0, 100.0),
        Check((), (), "decode", 1, 70.0, 100.0),
        Check((), (), "decode", 1, 100.0, 100.0),
        Check((), (), "break-even", 0, 300.0, 100.0),
    ]
    assert errors(checks) == pytest.approx((0.1, 0.3))
    assert all(map(math.isnan, errors([])))


def test_crossing():
    assert crossing([(100, 0.5), (200, 0.9), (400, 1.12), (800, 1.2)]) == pytest.approx(283, abs=1)
    # what is next to nothing may go up and down
    noise = [(64, 0.99), (96, 1.005), (128, 0.995), (160, 1.045)]
    assert 128 < crossing(noise) < 145
    assert math.isnan(crossing([(100, 1.5), (200, 1.9)]))
    assert math.isnan(crossing([(100, 0.5), (200, 0.9)]))


def test_it_runs_what_was_planned(tmp_path):
    path = tmp_path / "small.gguf"
    size = {"layers": LAYERS, "embd": 256, "heads": 4, "kv_heads": 2, "ff": 512}
    FakeModel(**size, vocab=300, ctx=512).write(path)
    found = plan(option((0, 2), (3, 2)), option((2,), (5,)))
    said: list[str] = []
    sim = "sim:GFLOPS=1e6,GBPS=1e6,GIB=1"
    with (
        caravan.Worker(",".join([sim] * 3)) as worker,
        caravan.connect([worker.endpoint]) as cluster,
    ):
        checks = verify(
            path,
            ModelParams(),
            ContextParams(n_ctx=512),
            found,
            cluster.devices,
            prompts=(16, 100),
            say=said.append,
        )
    assert [(c.devices, c.counts, c.what, c.tokens) for c in checks] == [
        (names, counts, what, tokens)
        for names, counts in ((("RPC0", "RPC2"), (3, 2)), (("RPC2",), (5,)))
        for tokens in (16, 100)
        for what in ("prompt", "decode")
    ] + [(("RPC0", "RPC2"), (3, 2), "break-even", 0)]
    assert all(c.measured > 0 and c.predicted > 0 for c in checks[:-1])
    assert said[:2] == ["loading the model on RPC0/RPC2", "loading the model on RPC2"]
