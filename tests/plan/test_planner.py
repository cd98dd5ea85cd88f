"""Plans: options in their order, what they need, and what they would do."""

from __future__ import annotations

import math

import pytest

from caravan.errors import UsageError
from caravan.plan import planner
from caravan.plan.crossing import CLEAR
from caravan.plan.job import Job
from caravan.plan.pipeline import Pipeline
from caravan.plan.planner import make_plan
from caravan.plan.predict import first_token_seconds, prompt_seconds
from caravan.plan.split import best_counts
from planned import GIB, memory, setting


def plan(where, model=None, prompts=(4096,), concurrency=(1,), generate=16):
    model = model or memory(where.n_layer)
    return make_plan(where, model, prompts=prompts, concurrency=concurrency, generate=generate)


def pipeline(where, option):
    return Pipeline(where, option.devices, option.counts)


def test_all_options_of_two_devices():
    found = plan(setting([1.0, 3.0]), prompts=(512, 4096), concurrency=(1, 4))
    assert {option.devices for option in found.options} == {(0,), (1,), (0, 1), (1, 0)}
    assert all(sum(option.counts) == 31 and option.fits for option in found.options)
    assert found.best is found.options[0]
    assert found.single.devices == (1,)
    assert found.names == ("RPC0", "RPC1")
    for option in found.options:
        kinds = [(speed.prompt, speed.concurrency) for speed in option.speeds]
        assert kinds == [(512, 1), (512, 4), (4096, 1), (4096, 4)]


def test_speeds_are_the_simulators():
    where = setting([1.0, 3.0], ms=1.0)
    for option in plan(where, concurrency=(1, 3)).options:
        one, three = option.speeds
        way = pipeline(where, option)
        assert one.pp == pytest.approx(4096 / prompt_seconds(way, 4096))
        assert one.ttft == pytest.approx(first_token_seconds(way, 4096))
        assert three.pp == pytest.approx(3 * 4096 / prompt_seconds(way, 4096, 3))
        assert three.ttft == pytest.approx(3 * 4096 / three.pp)


def test_the_split_is_the_best_for_the_jobs():
    where = setting([1.0, 3.0], output=8.0)
    jobs = [Job(4096, 0, 1)]
    found = plan(where, generate=0)
    room = [100 * GIB] * 2
    counts = best_counts(where, (0, 1), jobs, memory().layers, room)
    assert next(o for o in found.options if o.devices == (0, 1)).counts == counts


def test_speedups_are_against_the_best_single_device():
    found = plan(setting([1.0, 3.0]))
    (own,) = found.single.speeds
    assert (own.speedup_pp, own.speedup_tg) == (1.0, 1.0)
    assert found.single.break_even is None
    for option in found.options:
        (speed,) = option.speeds
        assert speed.speedup_pp == pytest.approx(speed.pp / own.pp)
        assert speed.speedup_tg == pytest.approx(speed.tg / own.tg)


def test_from_the_break_even_on_the_first_token_comes_sooner():
    where = setting([1.0, 2.0], ms=5.0)
    found = plan(where)
    split = next(option for option in found.options if len(option.devices) == 2)
    at = split.break_even
    assert 32 < at < 4096 and at % 32 == 0
    way, alone = pipeline(where, split), pipeline(where, found.single)
    assert first_token_seconds(way, at) < first_token_seconds(alone, at)
    before = first_token_seconds(way, at - 32)
    assert before * CLEAR >= first_token_seconds(alone, at - 32)


def test_a_hopeless_split_never_breaks_even():
    found = plan(setting([1.0, 1.0], ms=200_000.0))
    assert found.best.devices == (0,)
    assert [option.break_even for option in found.options] == [None] * len(found.options)


def test_the_curve_goes_from_short_prompts_to_the_whole_context():
    found = plan(setting([1.0, 1.0], n_ctx=5000))
    lengths, leads = zip(*found.curve, strict=True)
    assert (lengths[0], lengths[-1]) == (32, 4992)
    assert list(lengths) == sorted(set(lengths))
    assert leads[0] < 1 < leads[-1]


def test_one_device_has_no_curve():
    found = plan(setting([1.0]))
    assert found.curve == ()
    assert found.best is found.single


def test_what_no_single_device_holds():
    found = plan(setting([1.0, 1.0], memory=2.5))
    assert found.single is None
    assert found.curve == ()
    assert found.best.devices == (0, 1)
    assert found.best.break_even == 0
    (speed,) = found.best.speeds
    assert math.isnan(speed.speedup_pp) and math.isnan(speed.speedup_tg)
    assert [option.fits for option in found.options] == [True, False]
    assert found.options[1].speeds == ()


def test_needs_have_the_devices_names_and_fit():
    found = plan(setting([1.0, 3.0, 2.0], memory=[1.5, 2.0, 1.0]))
    assert found.best.fits
    for option in found.options:
        if option.fits:
            assert [need.name for need in option.needs] == [f"RPC{n}" for n in option.devices]
            assert not any(need.lacks for need in option.needs)
            assert all(need.weights for need in option.needs)


def test_nothing_fits():
    found = plan(setting([1.0, 3.0], memory=0.5))
    assert found.best is found.single is None
    assert not any(option.fits for option in found.options)
    assert [option.devices for option in found.options] == [(0, 1), (0,), (1,)]


def test_no_room_at_all():
    found = plan(setting([1.0, 3.0], memory=0.001))
    assert found.best is None
    assert {option.devices for option in found.options} == {(0,), (1,)}


def test_a_device_whose_memory_is_not_known_is_taken_to_hold_everything():
    found = plan(setting([1.0, 3.0], memory=0))
    assert all(option.fits for option in found.options)


def test_compute_buffers_that_turn_out_larger_take_layers_elsewhere(monkeypatch):
    """`room` is what may be expected, `needs` what is: the split goes by both."""
    model = memory()
    where = setting([1.0, 1.0], memory=2.2)
    before = plan(where, model).best.counts
    rooms = type(model).room
    monkeypatch.setattr(
        type(model), "room", lambda *args, **kw: [n + (200 << 20) for n in rooms(*args, **kw)]
    )
    assert plan(where, model).best.counts == before
    assert plan(where, model).best.fits


def test_a_device_more_has_to_be_worth_it():
    found = plan(setting([1.0, 0.02]), generate=0)
    assert found.best.devices == (0,)


def test_many_devices(monkeypatch):
    monkeypatch.setattr(planner, "_BUDGET", 2000)
    where = setting([1.0 + i % 5 / 2 for i in range(18)], 40)
    found = plan(where, prompts=(512, 2048), concurrency=(1, 4))
    assert len(found.options) > 10
    assert len({option.devices for option in found.options}) == len(found.options)
    assert len(found.best.devices) > 1
    for option in found.options:
        assert sum(option.counts) == 41 and min(option.counts) > 0
        assert all(speed.pp > 0 and speed.tg > 0 and speed.ttft > 0 for speed in option.speeds)


def test_equal_devices_make_no_options_that_are_alike():
    found = plan(setting([1.0] * 12, 30), prompts=(512,), concurrency=(1, 4))
    used = [len(option.devices) for option in found.options]
    assert len(used) == len(set(used))


@pytest.mark.parametrize(
    ("prompts", "concurrency", "generate", "words"),
    [
        ((), (1,), 1, "prompts of one token"),
        ((0,), (1,), 1, "prompts of one token"),
        ((5,), (), 1, "one request at a time"),
        ((5,), (0,), 1, "one request at a time"),
        ((5,), (1,), -1, "one request at a time"),
        ((64, 8000), (1,), 200, "need a context of 8,200; it has 8,192"),
    ],
)
def test_what_cannot_be_meant_is_refused(prompts, concurrency, generate, words):
    with pytest.raises(UsageError, match=words):
        plan(setting([1.0]), None, prompts, concurrency, generate)


def test_twice_the_same_kind_of_request_is_one():
    assert len(plan(setting([1.0]), prompts=(64, 64), concurrency=(2, 2)).best.speeds) == 1


def test_the_best_of_several_devices_is_looked_at_up_to_the_whole_context_wherever_it_stands():
    where = setting([1.0, 1.1, 1.2, 1.3], ms=4000.0, n_ctx=65536)
    found = plan(where, prompts=(128,))
    several = found.several
    assert [len(option.devices) for option in found.options[:4]] == [1, 1, 1, 1]
    assert several.break_even > 4096
