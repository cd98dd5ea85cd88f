"""What is predicted, against times that are counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caravan.plan.job import Job
from caravan.plan.pipeline import HeadTimes
from caravan.plan.predict import first_token_seconds, job_seconds, prompt_seconds, step_seconds
from plan.stages import UBATCH, pipeline, slow, traffic

near = pytest.approx


def test_a_prompt_and_its_first_token():
    pipe = pipeline([1, 1], head=HeadTimes(0, 0, 0, 0, 0, sample=0.25))
    assert prompt_seconds(pipe, 10 * UBATCH) == near(11)
    assert first_token_seconds(pipe, 10 * UBATCH) == near(11.25)
    assert prompt_seconds(pipe, 0) == prompt_seconds(pipe, 0, 4) == 0


def test_prompts_that_come_together_fill_the_pipeline_together():
    # two lanes, a prompt each: they alternate, and the pipeline is never empty between them
    assert prompt_seconds(pipeline([1, 1]), 10 * UBATCH, 2) == near(21)


def test_several_prompts_of_a_lane_wait_for_each_other():
    pipe = pipeline([1, 1], decode=[0.125, 0.125])
    four = prompt_seconds(pipe, 10 * UBATCH, 4)
    # whoever has read generates while others read on; both lanes do so at the end
    assert 41 <= four <= 41 + 8


def test_no_more_is_under_way_than_there_are_stages():
    # the way back is so long that a lane has to wait for the news of what has been computed
    pipe = pipeline([1, 1], to_head=slow(10), between={(0, 1): slow()})
    alone = prompt_seconds(pipe, 20 * UBATCH)
    assert alone == near(21 + 20)
    # three are posted before the first is waited for, each round trip takes 20
    assert prompt_seconds(pipe, 20 * UBATCH, 2) > 2 * alone


def test_a_step_takes_all_stages_and_crossings():
    pipe = pipeline([1, 2], link=slow(0.25), head=HeadTimes(0, 0, 0, 0.25, 0, sample=0.5))
    assert step_seconds(pipe, 100) == near(3 + 3 * 0.25 + 0.25 + 0.5)


@pytest.mark.parametrize(("streams", "seconds"), [(1, 4.0), (2, 4.0), (4, 4.0), (8, 4.0)])
def test_lanes_take_steps_while_others_do(streams, seconds):
    # four stages: four lanes fit into the time of one step
    assert step_seconds(pipeline([1] * 4), 100, streams) == near(seconds)


def test_two_lanes_have_twice_the_throughput_of_one_stream():
    pipe = pipeline([1, 1])
    assert 2 / step_seconds(pipe, 100, 2) == near(2 / step_seconds(pipe, 100, 1))


def test_the_slowest_stage_bounds_lanes():
    assert step_seconds(pipeline([1, 3]), 100, 2) == near(2 * 3)


def test_lanes_of_unequal_size_are_counted_by_their_tokens():
    # two lanes of 2 and 1 streams take turns: 3 tokens in 2 seconds
    assert step_seconds(pipeline([1, 1]), 100, 3) == near(2)


def test_latency_is_hidden_where_there_are_enough_lanes():
    pipe = pipeline([1, 1, 1, 1], between={(i, i + 1): slow(0.25) for i in range(3)})
    # one lane: 4.75 seconds; four of them keep no stage busy all the time
    assert step_seconds(pipe, 1) == near(4.75)
    assert step_seconds(pipe, 1, 4) == near(4.75)


def test_a_job_is_its_prompt_and_its_steps():
    pipe = pipeline([1, 1], decode=[0.25, 0.25])
    assert job_seconds(pipe, Job(10 * UBATCH, 0)) == near(11)
    # the prompt gives the first token
    assert job_seconds(pipe, Job(10 * UBATCH, 1)) == near(11)
    assert job_seconds(pipe, Job(10 * UBATCH, 9)) == near(11 + 8 * 0.5)
    assert job_seconds(pipe, Job(0, 8)) == near(8 * 0.5)


def test_a_job_grows():
    # masks of 256, then of 512 and 768: a second each
    pipe = pipeline([0], traffic=traffic(mask=1), to_head=slow(rate=256))
    steps = job_seconds(pipe, Job(0, 600))
    assert steps == near(256 * 1 + 256 * 2 + 88 * 3)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(1, 600),
    st.floats(0.0, 0.2),
)
def test_more_requests_never_take_less_time(each, concurrency, n_prompt, latency):
    pipe = pipeline(each, link=slow(latency), traffic=traffic(activation=1, logits=1))
    one, several = (prompt_seconds(pipe, n_prompt, c) for c in (1, concurrency))
    assert several >= one - 1e-9
    floor = concurrency * -(-n_prompt // UBATCH) * max(each)
    assert several >= floor - 1e-9
    step, steps = (step_seconds(pipe, 100, c) for c in (1, concurrency))
    assert steps >= step - 1e-9
