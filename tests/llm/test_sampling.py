"""The sampler chain: greedy, seeded, penalised, and never asked without logits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from caravan.errors import ContextError, DecodeError, SamplingError, UsageError
from caravan.llm import Model, Sampler, SamplingParams, generate
from llm.scripted import Scripted


def draw(context, params: SamplingParams, count: int = 12) -> list[int]:
    with Sampler(params, context.model) as sampler:
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
    sampler = Sampler(SamplingParams(temp=2.0), read.model)
    again = Sampler(SamplingParams(temp=2.0, seed=sampler.seed), read.model)
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
    with Sampler(params, read.model) as sampler:
        sampler.accept([best])
        assert sampler.sample(read) != best
    params = SamplingParams(temp=0, repeat_penalty=1e6, repeat_last_n=1)
    with Sampler(params, read.model) as sampler:
        sampler.accept([best, 7])
        assert sampler.sample(read) == best


def test_no_logits_is_an_error_and_not_the_end_of_the_process(context):
    with Sampler(SamplingParams(), context.model) as sampler:
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
        {"frequency_penalty": 2.01},
        {"frequency_penalty": math.nan},
        {"presence_penalty": -2.01},
        {"logit_bias": ((1, math.nan),)},
        {"logit_bias": ((1, math.inf),)},
    ],
)
def test_params_refuse_what_means_nothing(values):
    with pytest.raises(UsageError, match=next(iter(values))):
        SamplingParams(**values)


# what greedy takes


def engines_greedy(source: Scripted) -> int:
    # a bias of nothing takes the way through the engine
    with Sampler(SamplingParams(temp=0, logit_bias=((0, 0.0),)), source.model) as sampler:
        return sampler.sample(source)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {7: 1.0, 9: 1.0, 40000: 1.0},
        {3: -1.0},
        {0: -math.inf, 1: -math.inf},
        {5: math.inf, 6: math.inf},
    ],
)
def test_greedy_takes_the_engines_token_also_of_equal_ones(model, values):
    source = Scripted(model, values)
    with Sampler(SamplingParams(temp=0), model) as sampler:
        assert sampler.sample(source) == engines_greedy(source)


@pytest.mark.parametrize("values", [{0: math.nan, 5: 1.0}, {4: math.nan, 5: 1.0}])
def test_greedy_survives_logits_that_are_no_numbers(model, values):
    source = Scripted(model, values)
    with Sampler(SamplingParams(temp=0), model) as sampler:
        assert sampler.sample(source) == (0 if 0 in values else 5)


@pytest.mark.parametrize("values", [{}, {"temp": 0.0, "grammar": 'root ::= "a"'}])
def test_logits_that_are_no_numbers_are_an_error(model, values):
    source = Scripted(model, {4: math.nan})
    with (
        Sampler(SamplingParams(top_k=0, **values), model) as sampler,
        pytest.raises(SamplingError, match="not numbers"),
    ):
        sampler.sample(source)


# penalties and biases


def test_frequency_and_presence_are_taken_from_the_logits(model):
    source = Scripted(model, {10: 5.0, 11: 4.9, 12: 4.0})
    expected = source.values.copy()
    params = SamplingParams(temp=0, frequency_penalty=0.5, presence_penalty=0.25, repeat_last_n=6)
    with Sampler(params, model) as sampler:
        history: list[int] = []
        for _ in range(12):
            token = sampler.sample(source)
            counts = np.bincount(history[-6:], minlength=model.n_vocab)
            assert token == int((expected - 0.5 * counts - 0.25 * (counts > 0)).argmax())
            history.append(token)
    assert len(set(history)) == 3


def test_the_prompt_counts(model):
    source = Scripted(model, {10: 1.0, 11: 0.9})
    with Sampler(SamplingParams(temp=0, presence_penalty=0.5), model) as sampler:
        sampler.accept([3, 10, 3])
        assert sampler.sample(source) == 11


def test_a_penalty_over_no_tokens_is_none(model):
    source = Scripted(model, {10: 1.0})
    with Sampler(SamplingParams(temp=0, presence_penalty=2.0, repeat_last_n=0), model) as sampler:
        assert [sampler.sample(source) for _ in range(3)] == [10] * 3


def test_a_bias_is_added_and_forbids(model):
    source = Scripted(model, {10: 5.0, 11: 1.0, 12: 0.5})
    for bias, token in (((10, -4.5),), 11), (((10, -100.0), (11, -math.inf)), 12), (((7, 6),), 7):
        with Sampler(SamplingParams(temp=0, logit_bias=bias), model) as sampler:
            assert sampler.sample(source) == token


def test_a_bias_beyond_all_numbers_of_the_engine_is_a_large_one(model):
    source = Scripted(model, {10: 5.0})
    for temp in (0, 0.5):
        with Sampler(SamplingParams(temp=temp, logit_bias=((11, 1e308),)), model) as sampler:
            assert sampler.sample(source) == 11


def test_a_forbidden_token_does_not_come_even_alone(model):
    every = tuple((token, -100.0) for token in range(model.n_vocab))
    with (
        Sampler(SamplingParams(logit_bias=every), model) as sampler,
        pytest.raises(SamplingError, match="no token is left"),
    ):
        sampler.sample(Scripted(model))


@pytest.mark.parametrize("token", [-1, 49152])
def test_a_bias_of_no_token_is_told(model, token):
    with pytest.raises(UsageError, match=f"token {token}"):
        Sampler(SamplingParams(logit_bias=((token, 1.0),)), model)


def test_end_tokens_can_be_ignored(model):
    ends = model.words.eog
    assert len(ends) > 1 and all(map(model.is_eog, ends))
    source = Scripted(model, {**dict.fromkeys(ends, 9.0), 10: 1.0})
    with Sampler(SamplingParams(temp=0), model) as sampler:
        assert sampler.sample(source) in ends
    with Sampler(SamplingParams(temp=0, ignore_eos=True), model) as sampler:
        assert sampler.sample(source) == 10


# grammars


def text_of(model: Model, tokens: list[int]) -> str:
    return b"".join(map(model.piece, tokens)).decode()


def until_end(sampler: Sampler, source: Scripted, most: int = 50) -> list[int]:
    tokens = []
    while not source.model.is_eog(token := sampler.sample(source)) and len(tokens) < most:
        tokens.append(token)
    return tokens


def test_a_grammar_is_followed_to_its_end(context):
    params = SamplingParams(temp=0, grammar='root ::= " Lyon" | " Oslo"')
    assert "".join(generate(context, "The capital of France is", sampling=params)) in (
        " Lyon",
        " Oslo",
    )


def test_a_token_that_the_grammar_allows_is_taken_as_without_it(model):
    source = Scripted(model, {model.tokenize("hello", add_special=False)[0]: 3.0})
    hot = {"temp": 1.5, "seed": 4}
    with (
        Sampler(SamplingParams(**hot), model) as free,
        Sampler(SamplingParams(grammar="root ::= .*", **hot), model) as bound,
    ):
        assert free.sample(source) == bound.sample(source)


def test_of_refused_tokens_the_most_likely_allowed_one_is_taken(model):
    yes, no = (model.tokenize(word, add_special=False)[0] for word in ("yes", "no"))
    source = Scripted(model, {10: 9.0, no: 5.0, yes: 6.0})
    with Sampler(SamplingParams(temp=0, grammar='root ::= "yes" | "no"'), model) as sampler:
        assert sampler.sample(source) == yes
        assert model.is_eog(sampler.sample(source))
        assert model.is_eog(sampler.sample(source))


def test_characters_may_come_byte_by_byte(model):
    text = "\U0001f9ab"
    pieces = model.tokenize(text, add_special=False)
    assert len(pieces) > 1
    with Sampler(SamplingParams(temp=0, grammar=f'root ::= "{text}"'), model) as sampler:
        tokens = until_end(sampler, Scripted(model))
    assert text_of(model, tokens) == text


def test_a_control_token_is_not_the_text_of_its_name(model):
    (control,) = model.tokenize("<|im_start|>", add_special=False)
    assert model.piece(control) == b""
    source = Scripted(model, {control: 9.0})
    with Sampler(SamplingParams(temp=0, grammar='root ::= "<|im_start|>"'), model) as sampler:
        assert text_of(model, until_end(sampler, source)) == "<|im_start|>"


def test_where_nothing_is_left_that_is_an_error(model):
    source = Scripted(model)
    yes = model.tokenize("yes", add_special=False)[0]
    for params in (
        SamplingParams(temp=0, grammar='root ::= "a"', ignore_eos=True),
        SamplingParams(grammar='root ::= "a"', ignore_eos=True),
        SamplingParams(
            temp=0,
            grammar='root ::= "yes"',
            logit_bias=tuple((t, -100) for t in range(model.n_vocab) if t != yes - 1),
        ),
    ):
        with (
            Sampler(params, model) as sampler,
            pytest.raises(SamplingError, match="no token is left"),
        ):
            sampler.sample(source)
            sampler.sample(source)


def test_a_grammar_lives_on_when_the_model_is_loaded_again(smollm2):
    with Model(smollm2) as own:
        source = Scripted(own)
        params = SamplingParams(temp=0, grammar='root ::= "{\\"key\\": [true, " [0-9]{8} "]}"')
        with Sampler(params, own) as sampler:
            tokens = [sampler.sample(source) for _ in range(6)]
            before = own.words._vocab
            own.words.outlive(own._load_words)
            assert own.words._vocab != before
            tokens += until_end(sampler, source)
        text = text_of(own, tokens)
        assert text.startswith('{"key": [true, ') and text.endswith("]}") and len(text) == 25


def test_an_ambiguous_grammar_ends_the_text_and_not_the_process(model):
    grammar = 'root ::= a\na ::= "x" a "y" | "x" a "z" | "x"'
    source = Scripted(model, {model.tokenize("x", add_special=False)[0]: 3.0})
    with (
        Sampler(SamplingParams(temp=0, grammar=grammar), model) as sampler,
        pytest.raises(SamplingError, match="ambiguous"),
    ):
        for _ in range(100):
            sampler.sample(source)
