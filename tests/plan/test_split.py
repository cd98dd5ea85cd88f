"""Splits by time: as good as the best there is, within the rooms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caravan.plan import split
from caravan.plan.job import Job
from caravan.plan.ladder import all_splits
from caravan.plan.split import Search, best_counts
from planned import best_score, score, setting

PROMPTS = (Job(4096, 0, 1),)
DECODE = (Job(64, 256, 1),)
TOGETHER = (Job(64, 256, 8),)
MIXED = (Job(512, 128, 1), Job(4096, 128, 1), Job(512, 128, 8))
JOBS = pytest.mark.parametrize(
    "jobs", [PROMPTS, DECODE, TOGETHER, MIXED], ids=["prompts", "decode", "together", "mixed"]
)


@pytest.fixture(params=["every split", "ladder"])
def way(request, monkeypatch):
    if request.param == "ladder":
        monkeypatch.setattr(split, "_FEW", 0)


@JOBS
@pytest.mark.parametrize("ms", [0.0, 2.0, 20.0])
@pytest.mark.parametrize("devices", [(0, 1), (1, 0)])
def test_two_unequal_devices_and_a_heavy_output_layer(way, jobs, ms, devices):
    where, layers, room = setting([1.0, 3.0], ms=ms, output=8.0), [1] * 31, [31, 31]
    found = best_counts(where, devices, jobs, layers, room)
    reached = score(where, devices, found, jobs)
    assert reached <= 1.03 * best_score(where, devices, jobs, layers, room)
    assert reached <= score(where, devices, (15, 16), jobs)
    assert reached <= score(where, devices, (8, 23), jobs)


def test_decoding_alone_stays_on_the_fastest_device_while_it_has_room():
    where = setting([1.0, 3.0, 2.0], ms=1.0)
    assert best_counts(where, (0, 1, 2), DECODE, [1] * 31, [40] * 3) == (0, 31, 0)
    assert best_counts(where, (0, 1, 2), DECODE, [1] * 31, [40, 20, 40]) == (0, 20, 11)


def test_a_prompt_is_balanced_by_speed():
    assert best_counts(setting([1.0, 3.0]), (0, 1), PROMPTS, [1] * 31, [31] * 2) == (7, 24)


@pytest.mark.parametrize("generate", [0, 1, 64])
def test_jobs_without_a_prompt(way, generate):
    where = setting([1.0, 3.0])
    assert best_counts(where, (0, 1), [Job(0, generate, 1)], [1] * 31, [31, 20]) is not None
    if generate:
        assert best_counts(where, (0, 1), [Job(0, generate, 1)], [1] * 31, [31] * 2) == (0, 31)


def test_a_slow_link_is_not_crossed():
    where = setting([1.0, 1.0], ms=2000.0, gbit=0.001)
    assert 0 in best_counts(where, (0, 1), MIXED, [1] * 31, [31] * 2)


@pytest.mark.parametrize("n", [2, 3])
def test_a_device_that_gains_next_to_nothing_is_left_out(n):
    where, devices = setting([1.0] * n), tuple(range(n))
    # one micro-batch, which the stages take one after the other
    counts = best_counts(where, devices, [Job(64, 8)], [1] * 31, [31] * n)
    assert sorted(counts) == [0] * (n - 1) + [31]
    # where one has no room for all, as few as there have to be
    counts = best_counts(where, devices, [Job(64, 8)], [1] * 31, [16] * n)
    assert sum(count > 0 for count in counts) == 2


def test_no_device_gets_more_than_it_has_room_for(way):
    layers = [5] * 30 + [20]
    found = best_counts(setting([1.0, 8.0, 1.0]), (0, 1, 2), MIXED, layers, [60, 50, 70])
    assert found[1] == 10 and sum(found) == 31
    assert best_counts(setting([1.0, 8.0, 1.0]), (0, 1, 2), MIXED, layers, [55, 50, 60]) is None


def test_a_device_without_any_room(way):
    where = setting([1.0, 8.0, 1.0])
    assert best_counts(where, (0, 1, 2), PROMPTS, [1] * 31, [31, 0, 31])[1] == 0
    assert best_counts(where, (0, 1, 2), PROMPTS, [1] * 31, [31, -5, 31])[1] == 0
    assert best_counts(where, (0, 1, 2), PROMPTS, [1] * 31, [0, 0, 0]) is None


def test_sizes_of_another_model_are_refused():
    with pytest.raises(ValueError, match="30 sizes for 31 layers"):
        best_counts(setting([1.0]), (0,), PROMPTS, [1] * 30, [99])


def test_sixteen_devices_share_a_long_prompt_alike():
    where = setting([1.0] * 16, 80)
    found = best_counts(where, range(16), PROMPTS, [1] * 81, [81] * 16)
    assert sum(found) == 81
    assert max(found) <= 6


def test_all_splits_are_there_once():
    splits = all_splits(4, 3)
    assert len({tuple(s) for s in splits}) == len(splits) == 15
    assert (splits.sum(axis=1) == 4).all()
    assert all_splits(4, 1).tolist() == [[4]]


def test_what_was_played_is_not_played_again(monkeypatch):
    search = Search(setting([1.0, 1.0]), PROMPTS, [1] * 31)
    first = search.best((0, 1), [31, 31])
    monkeypatch.setattr(split, "prompt_seconds", None)
    assert search.best((0, 1), [31, 31]) == first


NUMBERS = st.floats(0.2, 8.0)
JOB = st.builds(
    Job, st.sampled_from([0, 32, 300, 600, 2000]), st.sampled_from([0, 16, 256]), st.integers(1, 6)
)


@settings(max_examples=40, derandomize=True)
@given(
    speeds=st.tuples(NUMBERS, NUMBERS, NUMBERS),
    ms=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    gbit=st.sampled_from([0.05, 1.0, 10.0]),
    output=st.floats(0.1, 12.0),
    jobs=st.lists(JOB, min_size=1, max_size=3),
    room=st.tuples(*[st.integers(2, 14)] * 3),
    output_size=st.integers(1, 5),
    few=st.sampled_from([0, 2000]),
)
def test_three_devices_reach_the_best_there_is(
    speeds, ms, gbit, output, jobs, room, output_size, few
):
    where = setting(speeds, 6, ms=ms, gbit=gbit, output=output)
    layers = [1] * 6 + [output_size]
    best = best_score(where, (0, 1, 2), jobs, layers, room)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "_FEW", few)
        found = best_counts(where, (0, 1, 2), jobs, layers, room)
    assert (found is None) == (best is None)
    if found is not None:
        # what lanes do to each other with a few short prompts is a matter of luck: of 2000 cases
        # the worst was 1.2
        alone = all(job.concurrency == 1 for job in jobs)
        assert score(where, (0, 1, 2), found, jobs) <= (1.02 if alone else 1.25) * best
