"""The sentence of a plan says what to do, and why."""

from __future__ import annotations

import re

from caravan.plan.planner import make_plan
from planned import memory, setting


def advice(where, prompts=(4096,), concurrency=(1,), generate=16):
    model = memory(where.n_layer)
    found = make_plan(where, model, prompts=prompts, concurrency=concurrency, generate=generate)
    text = found.advice
    assert text.endswith(".") and "\n" not in text and "nan" not in text and "  " not in text
    return text


def matches(pattern, text):
    return re.fullmatch(pattern, text) is not None


def test_two_devices_that_are_worth_it():
    text = advice(setting([1.0, 2.0], ms=0.1))
    assert matches(
        r"Use RPC0 and RPC1 \(\d+ \+ \d+ layers\): prompts of 4,096 tokens are read 1\.\d times as "
        r"fast as on RPC1 alone, from [\d,]+ tokens on; writing is \d+ % slower\.",
        text,
    ), text


def test_several_requests_at_a_time_are_told_beside_one():
    text = advice(setting([1.0, 1.0]), concurrency=(1, 8))
    assert re.search(r"; with 8 requests at a time reading is 2\.0 times as fast and wri", text)


def test_several_requests_alone():
    text = advice(setting([1.0, 1.0]), concurrency=(8,))
    assert "prompts of 4,096 tokens, 8 at a time, are read 2.0 times" in text
    assert "tokens on" not in text


def test_nothing_is_said_of_writing_where_nothing_is_written():
    assert "writ" not in advice(setting([1.0, 1.0]), concurrency=(1, 8), generate=0)


def test_one_device():
    assert advice(setting([1.0])) == "Use RPC0 alone: there is no other device."


def test_a_link_that_costs_too_much():
    text = advice(setting([1.0, 1.0], ms=2000.0), prompts=(512,), generate=0)
    assert text.startswith("Use RPC0 alone: "), text
    assert advice(setting([1.0, 1.0], ms=1500.0), prompts=(1024,), generate=0) == (
        "Use RPC0 alone: the link of 1,500 ms costs more than the second device gives, "
        "for prompts up to 1,024 tokens."
    )
    assert "the link of 10 Mbit/s costs more than" in advice(
        setting([1.0, 1.0], gbit=0.01), prompts=(2048,), generate=0
    )


def test_a_device_that_only_slows_it_down():
    assert advice(setting([1.0, 0.01]), prompts=(512,)) == (
        "Use RPC0 alone: RPC1 would only slow it down, for prompts up to 512 tokens."
    )


def test_long_answers_against_long_prompts():
    text = advice(setting([1.0, 2.0]), generate=2000)
    assert matches(
        r"Use RPC1 alone: with RPC0 it would read prompts of 4,096 tokens 1\.\d+ times as fast, "
        r"but write \d+ % slower, which takes longer\.",
        text,
    ), text


def test_the_others_are_too_small():
    text = advice(setting([1.0, 1.0], memory=[8.0, 0.01]))
    assert text == "Use RPC0 alone: the others are too small to be of any help."


def test_no_single_device_holds_it():
    text = advice(setting([1.0, 1.0], memory=2.5))
    assert matches(
        r"No single device holds it; use RPC0 and RPC1 \(\d+ \+ \d+ layers\): prompts of 4,096 "
        r"tokens are read at [\d,.]+ tokens/s, and [\d,.]+ are written\.",
        text,
    ), text


def test_nothing_fits():
    assert matches(
        r"Nothing fits: all devices together lack [\d.]+ GiB of [\d.]+ GiB; .*",
        advice(setting([1.0, 1.0], memory=1.0)),
    )
    assert matches(r"Nothing fits: RPC0 lacks .*", advice(setting([1.0], memory=1.0)))
    assert advice(setting([1.0, 1.0], memory=0.001)).startswith("Nothing fits: RPC")


def test_what_fits_without_anything_to_spare_fits():
    assert advice(setting([1.0] * 18, 80, memory=0.6)).startswith(
        "No single device holds it; use 17"
    )


def test_many_devices_are_not_listed():
    text = advice(setting([1.0] * 8, 80, ms=0.01), generate=0)
    assert text.startswith("Use 8 devices, RPC0 first and RPC7 last")
    assert re.search(r" \(\d+ to \d+ layers each\): ", text)


def test_more_devices_than_the_engine_can_use_are_no_advice_unless_nothing_less_will_do():
    roomy, tight = (setting([1.0] * 18, 80, ms=0.01, memory=gib) for gib in (64.0, 0.68))
    assert matches(
        r"Use 1[0-5] devices, RPC0 first and RPC1[0-4] last.*on\.", advice(roomy, generate=0)
    )
    text = advice(tight, generate=0)
    assert matches(r"No single device holds it; use 1[6-8] devices, .*", text), text
    assert text.endswith("; but the engine can use 15 devices at most.")
