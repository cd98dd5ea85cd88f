"""The simulator against times that are counted by hand, and against what must be true of any."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caravan.plan.events import Span
from caravan.plan.pipeline import HeadTimes, Pipeline
from caravan.plan.profile import HEAD
from caravan.plan.simulator import (
    Timeline,
    Ubatch,
    lines,
    simulate_decode,
    simulate_prompt,
    ubatches,
)
from caravan.plan.times import Grid
from plan.stages import UBATCH, pipeline, slow, traffic

near = pytest.approx


def prompt(pipe: Pipeline, n_ubatches: int, **options: bool) -> float:
    return simulate_prompt(pipe, n_ubatches * UBATCH, **options).seconds


# prompts, by hand


@pytest.mark.parametrize("m", [1, 2, 7, 40])
@pytest.mark.parametrize("s", [1, 2, 3, 8])
def test_equal_stages_take_one_turn_for_each_micro_batch_and_each_other_stage(m, s):
    assert prompt(pipeline([0.5] * s), m) == near((m + s - 1) * 0.5)


def test_the_slowest_stage_bounds_all_others():
    # 9 turns of the slowest, and what comes before and behind it once
    assert prompt(pipeline([1, 3, 2]), 9) == near(1 + 9 * 3 + 2)


def test_a_part_of_a_micro_batch_takes_a_turn_too():
    assert simulate_prompt(pipeline([1, 1]), 2 * UBATCH + 1).seconds == near(4)


def test_the_output_layer_is_computed_for_the_last_token_only():
    assert prompt(pipeline([1, 1], output=0.25), 4) == near(5.25)


def test_latency_is_paid_once_for_each_crossing_of_a_prompt():
    # head to first, first to second, second to head
    pipe = pipeline([1, 1], link=slow(0.125))
    assert prompt(pipe, 10) == near(11 + 3 * 0.125)


def test_a_slow_link_bounds_a_prompt():
    # each activation takes 2 seconds, twice as long as a stage
    pipe = pipeline([1, 1], traffic=traffic(activation=2), link=slow(rate=UBATCH))
    assert prompt(pipe, 10) == near(1 + 10 * 2 + 1)


def test_a_fast_link_is_only_seen_once():
    pipe = pipeline([1, 1], traffic=traffic(activation=1), link=slow(rate=4 * UBATCH))
    assert prompt(pipe, 10) == near(11 + 0.25)


def test_inputs_keep_the_way_from_the_head_busy():
    # 3 seconds for the embeddings of each micro-batch
    pipe = pipeline([1, 1], traffic=traffic(embedding=3), link=slow(rate=UBATCH))
    assert prompt(pipe, 5) == near(5 * 3 + 2)


def test_a_mask_grows_with_what_attention_looks_at():
    # 256 entries for the first 4 micro-batches, 512 for the fifth
    pipe = pipeline([0], traffic=traffic(mask=1), to_head=slow(rate=UBATCH * 256))
    assert prompt(pipe, 5) == near(4 + 2)


def test_a_relay_goes_over_both_links_of_the_head():
    pipe = pipeline(
        [1, 1],
        between={},
        traffic=traffic(activation=1),
        to_head=slow(0.125, 2 * UBATCH),
    )
    # in, then up and down again with the activation, and back: each hop has its latency
    assert prompt(pipe, 1) == near(0.125 + 1 + 2 * (0.5 + 0.125) + 1 + 0.125)
    assert prompt(pipe, 4) == near(3 + 0.125 + 1 + 2 * (0.5 + 0.125) + 1 + 0.125)


def test_what_a_relay_brings_holds_up_what_is_sent_later():
    # the second stage's link is taken for 2 seconds by each activation
    pipe = pipeline([1, 1], between={}, traffic=traffic(activation=2), to_head=slow(rate=UBATCH))
    assert prompt(pipe, 5) == near(1 + 2 + 5 * 2 + 1)


def test_a_copy_within_a_worker_is_no_relay():
    pipe = pipeline(
        [1, 1], between={(0, 1): slow(way="within")}, traffic=traffic(activation=9), to_head=slow(1)
    )
    assert prompt(pipe, 3) == near(1 + 4 + 1)


def test_the_head_takes_its_time_for_each_micro_batch():
    # 0.5 and 0.25 for each of two stages; the second micro-batch has another graph, for its output
    pipe = pipeline([0.125, 0.125], head=HeadTimes(0.5, 0.25, 0, 0, 0))
    assert prompt(pipe, 2) == near(2 * 1 + 0.125)


def test_a_graph_that_is_the_one_before_is_used_again():
    head = HeadTimes(1, 0.5, 0.25 / UBATCH, 0.125, 0.0625)
    # of 6 micro-batches the second to fourth are like the first; the fifth looks at more, and the
    # last has an output
    new, old = 1 + 0.5 + 0.25, 0.125 + 0.0625 + 0.25
    assert prompt(pipeline([0], head=head), 6) == near(3 * new + 3 * old)


def test_a_new_graph_is_checked_beside_what_is_computed():
    # the first is waited for, those that follow are ready in time
    options = {"traffic": traffic(nodes=100), "check": 0.005, "check_graph": 0.125}
    once = 0.125 + 100 * 0.005
    assert prompt(pipeline([2], **options), 1) == near(0.125 + 2 * 100 * 0.005 + 2)
    first = 0.125 + 2 * 100 * 0.005
    assert prompt(pipeline([2], **options), 5) == near(first + 5 * 2)
    # two stages check at the same time, the second with the output layer: it has a turn for that
    assert prompt(pipeline([2, 2], **options), 5) == near(once + 6 * 2)


def test_new_graphs_travel():
    pipe = pipeline([1], traffic=traffic(graph=1), link=slow(rate=1))
    # two layers of a byte each
    assert prompt(pipe, 1) == near(2 + 1)


def test_each_graph_has_its_overhead():
    assert prompt(pipeline([1, 1], graph=0.25), 10) == near(11 * 1.25)


def test_a_prompt_longer_than_a_batch_comes_in_several_calls():
    sizes = [ubatch.n_tokens for ubatch in ubatches(250, 0, 100, 64)]
    assert sizes == [64, 36, 64, 36, 50]
    assert [u.outputs for u in ubatches(250, 7, 100, 64)] == [0, 0, 0, 0, 1]
    assert [u.n_kv for u in ubatches(250, 7, 100, 64)] == [256, 256, 256, 256, 512]


def test_layers_are_left_out_with_their_devices():
    pipe = pipeline([1, 5, 1])
    pipe = replace(pipe, counts=(2, 0, 2))
    assert [stage[0] for stage in pipe.stages] == [0, 2]
    # layers 0 and 1, then layer 2: no link between them, so it is a relay, which costs nothing here
    assert prompt(pipe, 3) == near(3 * 2 + 1)


def test_devices_without_any_layer_are_no_pipeline():
    pipe = replace(pipeline([1, 1]), counts=(0, 0))
    with pytest.raises(ValueError, match="any layer"):
        simulate_prompt(pipe, 10)
    with pytest.raises(ValueError, match="any layer"):
        simulate_decode(pipe, 10)


def test_nothing_to_read_takes_no_time():
    assert simulate_prompt(pipeline([1, 1]), 0) == Timeline(0.0, ())


# hosts


def test_devices_of_one_host_share_its_processors():
    options = {"host": "here", "threads": 1.0}
    alone = prompt(pipeline([1] * 4, **options), 20)
    assert alone == near(23)
    # four threads on two processors: half as fast while all four compute
    shared = prompt(pipeline([1] * 4, processors={"here": 2}, **options), 20)
    assert 2 * 20 < shared <= 2 * 23
    assert prompt(pipeline([1] * 4, processors={"here": 4}, **options), 20) == near(alone)
    assert prompt(pipeline([1] * 4, processors={"there": 1}, **options), 20) == near(alone)
    # one after the other, whatever the order
    assert prompt(pipeline([1] * 4, processors={"here": 1}, **options), 20) == near(80)


# decoding, by hand


def test_a_step_goes_through_all_stages():
    pipe = pipeline([9, 9, 9], decode=[1, 2, 3], output=0.5)
    assert simulate_decode(pipe, 100, steps=4).seconds == near(4 * 6.5)


@pytest.mark.parametrize("s", [1, 2, 5])
def test_latency_is_paid_for_each_crossing_of_every_step(s):
    pipe = pipeline([1] * s, link=slow(0.125))
    assert simulate_decode(pipe, 1, steps=3).seconds == near(3 * (s + (s + 1) * 0.125))


def test_a_relay_costs_a_step_twice_as_many_crossings():
    pipe = pipeline([1] * 3, between={}, to_head=slow(0.125))
    assert simulate_decode(pipe, 1, steps=3).seconds == near(3 * (3 + 6 * 0.125))


def test_a_device_takes_its_turn_for_each_step():
    pipe = pipeline([1, 1], graph=0.125, turn=0.25)
    assert simulate_decode(pipe, 1, steps=2).seconds == near(2 * 2 * 1.25)


def test_what_the_head_does_between_two_steps_counts():
    head = HeadTimes(9, 9, 9, 0.25, 0.125, sample=0.5)
    # the last one is not sampled any more
    assert simulate_decode(pipeline([1], head=head), 1, steps=3).seconds == near(
        3 * 1.375 + 2 * 0.5
    )


def test_a_step_that_looks_at_more_has_a_new_graph():
    head = HeadTimes(1, 0, 0, 0.25, 0)
    pipe = pipeline([1], head=head)
    assert simulate_decode(pipe, 254, steps=4).seconds == near(4 + 3 * 0.25 + 1)


def test_only_a_part_of_the_inputs_travels_again():
    pipe = pipeline([1], traffic=traffic(embedding=4, again=0.25), link=slow(rate=1))
    assert simulate_decode(pipe, 1, steps=3).seconds == near(3 * 2)


def test_a_stage_alone_is_sent_more():
    more = traffic(embedding=1, alone=2)
    assert prompt(pipeline([0], traffic=more, link=slow(rate=UBATCH)), 2) == near(2 * 3)
    assert prompt(pipeline([0, 0], traffic=more, link=slow(rate=UBATCH)), 2) == near(2 * 1)


def test_logits_travel_back():
    pipe = pipeline([1], traffic=traffic(logits=3), link=slow(rate=1))
    assert simulate_decode(pipe, 1, steps=2).seconds == near(2 * 4)


def test_streams_share_lanes_and_lanes_share_the_pipeline():
    pipe = pipeline([1, 1])
    # one lane: 2 seconds a step. Two: while one is in the second stage, the other is in the first.
    assert simulate_decode(pipe, 1, steps=10).seconds == near(20)
    assert simulate_decode(pipe, 1, steps=10, streams=2).seconds == near(21)
    assert simulate_decode(pipe, 1, steps=10, streams=6).seconds == near(21)


# what is recorded


def by_resource(timeline: Timeline) -> dict[tuple[str, int, int], list[Span]]:
    spans: dict[tuple[str, int, int], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        spans[span.kind, span.source, span.target].append(span)
    return spans


def assert_one_after_the_other(timeline: Timeline, latency: float) -> None:
    for (kind, _, _), spans in by_resource(timeline).items():
        spans.sort(key=lambda span: span.start)
        less = latency if kind == "transfer" else 0.0
        for before, after in itertools.pairwise(spans):
            assert after.start >= before.end - less - 1e-9


def test_a_prompt_is_recorded():
    head = HeadTimes(0.25, 0.125, 0, 0.25, 0.125)
    pipe = pipeline([1, 2], head=head, traffic=traffic(activation=1), link=slow(0.5, UBATCH))
    timeline = simulate_prompt(pipe, 3 * UBATCH, record=True)
    spans = by_resource(timeline)
    assert set(spans) == {
        ("head", HEAD, HEAD),
        ("compute", 0, 0),
        ("compute", 1, 1),
        ("transfer", 0, 1),
    }
    assert [len(found) for found in spans.values()] == [3] * 4
    assert spans["head", HEAD, HEAD][0] == Span("head", HEAD, HEAD, 0, 0.0, 0.5)
    # the first stage is posted to 0.375 after the beginning, and the way there is 0.5
    assert spans["compute", 0, 0][0] == Span("compute", 0, 0, 0, 0.875, 1.875)
    assert spans["transfer", 0, 1][0] == Span("transfer", 0, 1, 0, 1.875, 3.375)
    assert spans["compute", 1, 1][0] == Span("compute", 1, 1, 0, 3.375, 5.375)
    assert [span.ubatch for span in spans["compute", 1, 1]] == [0, 1, 2]
    assert timeline.seconds == near(spans["compute", 1, 1][-1].end + 0.5)
    assert_one_after_the_other(timeline, 0.5)


def test_both_hops_of_a_relay_are_recorded():
    pipe = pipeline([1, 1], between={}, traffic=traffic(activation=1), to_head=slow(0.5, UBATCH))
    spans = by_resource(simulate_prompt(pipe, UBATCH, record=True))
    assert spans["transfer", 0, HEAD] == [Span("transfer", 0, HEAD, 0, 1.5, 3.0)]
    assert spans["transfer", HEAD, 1] == [Span("transfer", HEAD, 1, 0, 3.0, 4.5)]


def test_nothing_is_recorded_unasked():
    assert simulate_prompt(pipeline([1]), 100).spans == ()
    assert simulate_decode(pipeline([1]), 100).spans == ()


# what must be true of any

seconds = st.floats(0.001, 2.0)
stages = st.lists(seconds, min_size=1, max_size=5)
latencies = st.floats(0.0, 0.5)
rates = st.floats(1.0, 1000.0)


@settings(max_examples=40, deadline=None)
@given(stages, st.integers(1, 9), latencies, rates, st.booleans(), st.integers(1, 4))
def test_bounds_and_spans(each, m, latency, rate, relay, streams):
    link = slow(latency, rate * UBATCH)
    pipe = pipeline(
        each,
        traffic=traffic(activation=1, logits=1),
        to_head=link,
        between={} if relay else None,
        link=link,
        head=HeadTimes(0.01, 0.01, 0, 0.01, 0.01, 0.01),
    )
    timeline = simulate_prompt(pipe, m * UBATCH, record=True)
    assert timeline.seconds >= max(m * max(each), sum(each))
    for device, one in enumerate(each):
        computed = [s for s in timeline.spans if s.kind == "compute" and s.source == device]
        busy = sum(span.end - span.start for span in computed)
        assert busy == near(m * one)
    assert max(span.end for span in timeline.spans) <= timeline.seconds + 1e-9
    assert_one_after_the_other(timeline, latency)
    decode = simulate_decode(pipe, 10, steps=3, streams=streams, record=True)
    assert decode.seconds >= 3 * sum(each)
    computed = [span for span in decode.spans if span.kind == "compute"]
    assert len(computed) == 3 * len(each) * min(streams, len(each))
    decode = replace(decode, spans=tuple(s for s in decode.spans if s.kind != "head"))
    assert_one_after_the_other(decode, latency)
    assert simulate_prompt(pipe, m * UBATCH, record=True) == timeline


@settings(max_examples=40, deadline=None)
@given(stages, st.integers(1, 9), latencies, rates, st.floats(1.0, 4.0), st.booleans())
def test_better_links_are_never_slower(each, m, latency, rate, factor, relay):
    def run(link):
        pipe = pipeline(
            each,
            traffic=traffic(activation=1, embedding=1, logits=1),
            to_head=link,
            between={} if relay else None,
            link=link,
        )
        return prompt(pipe, m), simulate_decode(pipe, 10, steps=3).seconds

    before = run(slow(latency, rate * UBATCH))
    for better in (slow(latency, rate * factor * UBATCH), slow(latency / factor, rate * UBATCH)):
        for a, b in zip(run(better), before, strict=True):
            assert a <= b + 1e-9


@settings(max_examples=40, deadline=None)
@given(seconds, st.integers(1, 6), st.integers(1, 9), latencies)
def test_one_more_stage_like_the_others_costs_its_turn_and_its_link(one, s, m, latency):
    link = slow(latency)
    less, more = (prompt(pipeline([one] * n, link=link), m) for n in (s, s + 1))
    assert more - less == near(one + latency)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9))
def test_the_same_layers_on_more_devices_are_never_slower_where_links_cost_nothing(s, m):
    one, several = prompt(pipeline([6.0]), m), prompt(pipeline([6.0 / s] * s), m)
    assert several <= one + 1e-9


@given(
    st.integers(1, 700),
    st.integers(1, 5000),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_lines_are_those_of_the_grid(n_tokens, n_kv, first, count, n, k):
    rng = np.random.default_rng(n * k)
    grid = Grid((16, 64, 512)[:n], (256, 1024, 4096)[:k], np.sort(rng.random((n, k, 7)), axis=0))
    end = first + count
    wanted = float(grid.at(n_tokens, n_kv)[first:end].sum())
    found = lines(grid, first, end)(n_tokens, n_kv)
    # far beyond the last point single layers may be cut off at 0, and their sum is not
    if (grid.at(n_tokens, n_kv) > 0).all():
        assert found == near(wanted)
    assert found >= 0


def test_a_micro_batch_looks_at_whole_blocks():
    assert [Ubatch(64, past).n_kv for past in (0, 192, 193)] == [256, 256, 512]
    assert [Ubatch(8, past, 8, decode=True).n_kv for past in (0, 255, 256)] == [256, 256, 512]
