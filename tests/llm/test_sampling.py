"""The sampler chain: greedy, seeded, penalised, and never asked without logits."""

from __future__ import annotations

import math

import pytest

from caravan.errors import ContextError, DecodeError, UsageError
from caravan.llm import Sampler, SamplingParams


def draw(context, params: SamplingParams, count: int = 12) -> list[int]:
    with Sampler(params, context.model.n_vocab) as sampler:
        return [sampler.sample(context) for _ in range(count)]


@pytest.fixture
def read(context):
    context.decode(context.model.tokenize("My favourite animal is the"))
    return context


def test_temperature_zero_takes_the_most_likely(read):
    assert set(draw(read, SamplingParams(temp=0))) == {int(read.logits().argmax())}


def test_a_seed_repeats_and_another_differs(read):
    hot = {"temp": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    first = draw(read, SamplingParams(seed=1, **hot))
    assert first == draw(read, SamplingParams(seed=1, **hot))
    assert first != draw(read, SamplingParams(seed=2, **hot))
    assert len(set(first)) > 1


def test_own_seed_is_told_and_can_be_given_again(read):
    sampler = Sampler(SamplingParams(temp=2.0), read.model.n_vocab)
    again = Sampler(SamplingParams(temp=2.0, seed=sampler.seed), read.model.n_vocab)
    assert [sampler.sample(read) for _ in range(8)] == [again.sample(read) for _ in range(8)]
    sampler.close()
    sampler.close()
    again.close()


@pytest.mark.parametrize("values", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_narrow_choices_leave_the_most_likely(read, values):
    best = int(read.logits().argmax())
    assert set(draw(read, SamplingParams(temp=3.0, **values))) == {best}


def test_repeat_penalty_avoids_what_was_there(read):
    best = int(read.logits().argmax())
    params = SamplingParams(temp=0, repeat_penalty=1e6)
    with Sampler(params, read.model.n_vocab) as sampler:
        sampler.accept([best])
        assert sampler.sample(read) != best
    params = SamplingParams(temp=0, repeat_penalty=1e6, repeat_last_n=1)
    with Sampler(params, read.model.n_vocab) as sampler:
        sampler.accept([best, 7])
        assert sampler.sample(read) == best


def test_no_logits_is_an_error_and_not_the_end_of_the_process(context):
    with Sampler(SamplingParams(), context.model.n_vocab) as sampler:
        with pytest.raises(DecodeError, match="no logits"):
            sampler.sample(context)
        context.close()
        with pytest.raises(ContextError):
            sampler.sample(context)


@pytest.mark.parametrize(
    "values",
    [
        {"temp": -1.0},
        {"temp": math.nan},
        {"top_p": math.inf},
        {"top_p": 1.01},
        {"min_p": -0.1},
        {"min_p": 1.01},
        {"min_p": math.nan},
        {"repeat_penalty": 0.0},
        {"top_k": -1},
        {"repeat_last_n": 1 << 31},
        {"seed": -1},
        {"seed": (1 << 32) - 1},
    ],
)
def test_params_refuse_what_means_nothing(values):
    with pytest.raises(UsageError, match=next(iter(values))):
        SamplingParams(**values)
