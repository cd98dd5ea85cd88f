"""Text from a prompt: the same as by hand, whole characters, every reason to stop."""

from __future__ import annotations

import pytest

from caravan.errors import DecodeError, UsageError, WorkerLost
from caravan.llm import Context, ContextParams, GenerationStats, SamplingParams, generate
from llm.fakes import FakeDevice

GREEDY = SamplingParams(temp=0)
PROMPT = "Once upon a time, there was a"


def by_hand(context: Context, prompt: str, count: int) -> str:
    context.decode(context.model.tokenize(prompt))
    data = b""
    for _ in range(count):
        token = int(context.logits().argmax())
        data += context.model.piece(token)
        context.decode_one(token)
    return data.decode()


def test_greedy_text_is_what_the_logits_say(context):
    expected = by_hand(context, PROMPT, 20)
    context.clear()
    assert "".join(generate(context, PROMPT, max_tokens=20, sampling=GREEDY)) == expected


def test_text_comes_in_pieces_and_tokens_do_as_a_prompt(context):
    prompt = context.model.tokenize(PROMPT)
    pieces = list(generate(context, prompt, max_tokens=10, sampling=GREEDY))
    assert len(pieces) == 10
    context.clear()
    assert pieces == list(generate(context, PROMPT, max_tokens=10, sampling=GREEDY))


def test_stats(context):
    stats = GenerationStats()
    list(generate(context, PROMPT, max_tokens=10, sampling=GREEDY, stats=stats))
    assert (stats.n_prompt, stats.n_gen, stats.n_steps) == (8, 10, 9)
    assert stats.stopped == "length"
    assert stats.prompt_rate == stats.n_prompt / stats.prompt_seconds > 0
    assert stats.decode_rate == stats.n_steps / stats.decode_seconds > 0
    assert GenerationStats().prompt_rate == GenerationStats().decode_rate == 0.0


def test_no_token_wanted_reads_the_prompt_alone(context):
    stats = GenerationStats()
    assert list(generate(context, PROMPT, max_tokens=0, stats=stats)) == []
    assert (stats.n_prompt, stats.n_gen, stats.stopped) == (8, 0, "length")
    assert context.n_past == 8


def test_end_of_generation(context):
    stats = GenerationStats()
    question = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    text = "".join(generate(context, question, sampling=GREEDY, stats=stats))
    assert stats.stopped == "eog"
    assert text
    assert "<|im_end|>" not in text


def test_full_context_ends_it(model):
    stats = GenerationStats()
    with Context(model, ContextParams(n_ctx=256, n_threads=1)) as context:
        context.decode([1] * 240, logits="none")
        list(generate(context, PROMPT, sampling=SamplingParams(temp=0), stats=stats))
        assert stats.stopped in ("context", "eog")
        if stats.stopped == "context":
            assert context.n_past == context.n_ctx
            assert stats.n_gen == 256 - 240 - 8 + 1


def test_stop_text_ends_it_and_is_not_shown(context):
    whole = "".join(generate(context, PROMPT, max_tokens=30, sampling=GREEDY))
    stop = whole[20:26]
    context.clear()
    stats = GenerationStats()
    options = {"max_tokens": 30, "sampling": GREEDY, "stats": stats}
    text = "".join(generate(context, PROMPT, stop=[stop, "never there"], **options))
    assert text == whole[: whole.index(stop)]
    assert stats.stopped == "stop"


def test_it_continues_what_the_context_holds(context):
    list(generate(context, PROMPT, max_tokens=3, sampling=GREEDY))
    held = context.n_past
    list(generate(context, " and", max_tokens=2, sampling=GREEDY))
    assert context.n_past == held + 2


@pytest.mark.parametrize("prompt", ["", []])
def test_empty_prompt_is_refused_at_once(context, prompt):
    with pytest.raises(UsageError, match="the prompt is empty"):
        generate(context, prompt)


def test_prompt_that_does_not_fit_is_refused_at_once(context):
    with pytest.raises(DecodeError, match="a prompt of 300 tokens does not fit"):
        generate(context, [1] * 300)


def test_lost_worker_comes_out_of_the_iterator(context, monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr(context._raw, "_holds", (device,))
    pieces = generate(context, PROMPT, sampling=GREEDY)
    next(pieces)
    device.alive = 0
    with pytest.raises(WorkerLost):
        list(pieces)


def test_iterator_may_be_closed_early(context):
    pieces = generate(context, PROMPT, sampling=GREEDY)
    next(pieces)
    pieces.close()
    assert list(pieces) == []


@pytest.mark.parametrize("count", [-2, -100])
def test_an_impossible_number_of_tokens_is_refused_at_once(context, count):
    with pytest.raises(UsageError, match=f"max_tokens {count}"):
        generate(context, PROMPT, max_tokens=count)
