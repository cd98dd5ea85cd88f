"""Many requests on one model at once: the same answers as alone, and nobody in the way of others.

A tiny model of random weights, on the CPU.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from caravan.batching import Batcher, Chunk, Request, iterate, planned_context, stream
from caravan.errors import ContextError, DecodeError, QueueFull, SamplingError, UsageError
from caravan.llm import Context, ContextParams, Model, ModelParams, SamplingParams, generate
from caravan.llm.sampling import Sampler
from e2e import architectures, tiny

GREEDY = SamplingParams(temp=0)
PARAMS = ContextParams(n_batch=64, n_ubatch=32, n_threads=1)
BOUND = 30.0
# The best token is 0.003 and more above the second everywhere in their answers. Which tokens are
# computed together moves logits of this model by less than 0.001.
CLEAR = (*range(7, 19), *range(20, 24))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(tiny.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")) as model:
        yield model


@pytest.fixture
def batcher(model: Model) -> Iterator[Batcher]:
    with Batcher(model, n_slots=4, n_ctx=256, n_lanes=2, params=PARAMS) as batcher:
        yield batcher


def prompt(seed: int, size: int = 20) -> tuple[int, ...]:
    return tuple((seed * 7 + 13 * i * i + 5 * i) % 400 + 10 for i in range(size))


def request(seed: int = 1, size: int = 20, n: int = 8, **options) -> Request:
    return Request(prompt(seed, size), n, options.pop("sampling", GREEDY), **options)


class Collected:
    """A sink, and what has come."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.begun = threading.Event()
        self.over = threading.Event()

    def __call__(self, chunk: Chunk) -> None:
        assert not self.over.is_set(), "something comes after the end"
        self.chunks.append(chunk)
        self.begun.set()
        if chunk.finish:
            self.over.set()

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    def finish(self) -> str:
        assert self.over.wait(BOUND)
        return self.chunks[-1].finish


def answers(batcher: Batcher, requests: list[Request]) -> list[Collected]:
    sinks = [Collected() for _ in requests]
    for one, sink in zip(requests, sinks, strict=True):
        batcher.submit(one, sink)
    for sink in sinks:
        sink.finish()
    return sinks


def alone(model: Model, request: Request) -> str:
    with Context(model, ContextParams(n_ctx=256, n_batch=64, n_ubatch=32, n_threads=1)) as context:
        pieces = generate(
            context,
            request.prompt,
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            stop=request.stop,
        )
        return "".join(pieces)


def test_many_answers_are_those_of_each_alone(model, batcher):
    requests = [request(seed, 5 + 11 * seed % 60, 4 + seed % 7) for seed in CLEAR]
    for one, sink in zip(requests, answers(batcher, requests), strict=True):
        assert sink.text == alone(model, one)
        usage = sink.chunks[-1].usage
        assert usage is not None
        assert (usage.n_prompt, usage.n_gen) == (len(one.prompt), one.max_tokens)
        assert sink.chunks[-1].finish == "length"
    state = batcher.state()
    assert state.finished == {"length": 16}
    assert not any(slot.busy for slot in state.slots)
    assert state.n_gen == sum(one.max_tokens for one in requests)
    assert state.n_prompt + state.n_cached == sum(len(one.prompt) for one in requests)


def test_what_a_slot_holds_is_not_read_again(batcher):
    first = answers(batcher, [request(3, 100)])[0]
    longer = Request((*prompt(3, 100), 5, 6, 7), 8, GREEDY)
    again, other = (answers(batcher, [one])[0] for one in (longer, request(4, 100)))
    assert first.chunks[-1].usage.n_cached == other.chunks[-1].usage.n_cached == 0
    assert again.chunks[-1].usage.n_cached == 100


def test_what_is_hardly_the_same_is_read_again(batcher):
    first = answers(batcher, [request(3, 100)])[0]
    other = Request((*prompt(3, 100)[:15], *prompt(5, 30)), 8, GREEDY)
    for _ in range(4):
        assert answers(batcher, [other])[0].chunks[-1].usage.n_cached in (0, 44)
    assert first.chunks[-1].finish == "length"


def test_the_same_prompt_again_gives_the_same(batcher):
    first, again = (answers(batcher, [request(3, 100)])[0] for _ in range(2))
    # the last token is read for its logits
    assert again.chunks[-1].usage.n_cached == 99
    assert again.text == first.text


def test_logprobs(model, batcher):
    sink = answers(batcher, [request(2, logprobs=3)])[0]
    tokens = [token for chunk in sink.chunks for token in chunk.tokens]
    assert len(tokens) == 8
    for token in tokens:
        assert token.top[0][0] == token.id
        assert token.logprob == token.top[0][2] <= 0
        assert [top[2] for top in token.top] == sorted((t[2] for t in token.top), reverse=True)
        assert token.piece == model.piece(token.id)


def test_the_prompts_time_lasts_until_its_token_is_there(batcher, monkeypatch):
    sampled, over = [], []
    sample = Sampler.sample

    def noted(self, source, index=-1):
        token = sample(self, source, index)
        sampled.append(time.monotonic())
        return token

    monkeypatch.setattr(Sampler, "sample", noted)
    sink = Collected()

    def timed(chunk) -> None:
        over.append(time.monotonic())
        sink(chunk)

    batcher.submit(request(3, 200, 1), timed)
    sink.finish()
    assert sink.chunks[-1].usage.decode_seconds <= over[-1] - sampled[0]


def test_a_stop_text(model, batcher):
    whole = alone(model, request(5))
    stop = whole[len(whole) // 2 :][:2]
    sink = answers(batcher, [request(5, stop=(stop,))])[0]
    assert sink.chunks[-1].finish == "stop"
    assert sink.text == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    "stop, text, n_told",
    [
        ("[167][218]", "[32][32][32]", 3),
        ("67][2", "[32][32][32][1", 4),
        # what looks like one until the end
        ("[218][218]!", "[32][32][32][167][218][167][218][218]", 8),
    ],
)
def test_logprobs_are_those_of_the_text_that_is_told(stop, text, n_told, batcher):
    sink = answers(batcher, [request(10, logprobs=0, stop=(stop,))])[0]
    assert sink.text == text
    tokens = [token for chunk in sink.chunks for token in chunk.tokens]
    assert len(tokens) == n_told
    assert b"".join(token.piece for token in tokens).startswith(text.encode())


def test_no_token_wanted(batcher):
    sink = answers(batcher, [request(n=0)])[0]
    assert (sink.text, sink.chunks[-1].finish) == ("", "length")


def test_a_full_slot_ends_it(batcher):
    sink = answers(batcher, [request(1, 250, -1)])[0]
    assert sink.chunks[-1].finish == "context"
    assert sink.chunks[-1].usage.n_gen == 7


@pytest.mark.parametrize("tokens", [(1,) * 257, (1, 512), (-1,)])
def test_what_cannot_be_is_refused_at_once(batcher, tokens):
    with pytest.raises(UsageError):
        batcher.submit(Request(tokens), Collected())
    assert batcher.state().finished == {}


def test_cancelled_in_the_middle(batcher):
    sink, other = Collected(), Collected()
    job = batcher.submit(request(1, 20, -1), sink)
    batcher.submit(request(2, n=100), other)
    assert sink.begun.wait(BOUND)
    job.cancel()
    job.cancel()
    assert sink.finish() == "cancelled"
    assert other.finish() == "length"


def test_a_full_queue_and_cancelled_in_it(model):
    with Batcher(model, n_slots=1, n_ctx=256, queue=1, params=PARAMS) as batcher:
        sinks = [Collected() for _ in range(3)]
        first = batcher.submit(request(1, n=-1), sinks[0])
        waiting = batcher.submit(request(2), sinks[1])
        with pytest.raises(QueueFull) as full:
            batcher.submit(request(3), sinks[2])
        assert 1 <= full.value.retry_after <= 60
        waiting.cancel()
        assert sinks[1].finish() == "cancelled"
        batcher.submit(request(3), sinks[2])
        first.cancel()
        assert sinks[2].finish() == "length"
        assert batcher.state().refused == 1


def test_a_sink_that_raises_ends_its_request_alone(batcher):
    def broken(chunk: Chunk) -> None:
        raise ValueError("nobody listens")

    other = Collected()
    batcher.submit(request(1, n=-1), broken)
    batcher.submit(request(2), other)
    assert other.finish() == "length"
    assert answers(batcher, [request(seed) for seed in range(4)])
    assert batcher.state().finished["cancelled"] == 1


def test_a_grammar_that_leaves_no_token_ends_its_request_alone(model):
    # nothing may come after the word, and nothing may end the text
    stuck = SamplingParams(temp=0, grammar='root ::= "word"', ignore_eos=True)
    bound = SamplingParams(grammar='root ::= "word"')
    with Batcher(model, n_slots=3, n_ctx=256, n_lanes=1, params=PARAMS) as batcher:
        requests = [request(seed, n=-1, sampling=one) for seed, one in enumerate((stuck, bound))]
        sinks = answers(batcher, [*requests, request(8)])
        assert [sink.chunks[-1].finish for sink in sinks] == ["error", "eog", "length"]
        assert isinstance(sinks[0].chunks[-1].error, SamplingError)
        assert [sinks[0].text, sinks[1].text] == ["word", "word"]
        with pytest.raises(UsageError, match="grammar"):
            batcher.submit(request(sampling=SamplingParams(grammar="root")), Collected())
        assert batcher.error is None


def test_a_call_that_fails_ends_those_that_were_in_it(batcher, monkeypatch):
    lane = batcher.lanes[0]
    decode = lane.context.decode

    submitted = threading.Event()

    def refuse(parts):
        assert submitted.wait(BOUND)
        raise DecodeError("no")

    monkeypatch.setattr(lane.context, "decode", refuse)
    sinks = [Collected() for _ in range(4)]
    for seed, sink in enumerate(sinks):
        batcher.submit(request(seed), sink)
    submitted.set()
    assert sorted(sink.finish() for sink in sinks) == ["error", "error", "length", "length"]
    monkeypatch.setattr(lane.context, "decode", decode)
    assert {sink.finish() for sink in answers(batcher, [request(s) for s in range(4)])} == {
        "length"
    }


def test_what_stops_all_lanes_is_told_to_everyone(model, monkeypatch):
    with Batcher(model, n_slots=1, n_ctx=256, params=PARAMS) as batcher:
        held = threading.Event()

        def break_down(parts):
            assert held.wait(BOUND)
            raise ContextError("broken")

        monkeypatch.setattr(batcher.lanes[0].context, "decode", break_down)
        sinks = [Collected(), Collected()]
        for sink in sinks:
            batcher.submit(request(), sink)
        held.set()
        assert [sink.finish() for sink in sinks] == ["error", "error"]
        assert str(sinks[1].chunks[-1].error) == "broken"
        with pytest.raises(ContextError, match="broken"):
            batcher.submit(request(), Collected())


def test_closed_while_it_works(model):
    sinks = [Collected() for _ in range(3)]
    with Batcher(model, n_slots=1, n_ctx=256, params=PARAMS) as batcher:
        for sink in sinks:
            batcher.submit(request(n=-1), sink)
        assert sinks[0].begun.wait(BOUND)
    assert {sink.finish() for sink in sinks} == {"cancelled"}
    with pytest.raises(ContextError, match="closed"):
        batcher.submit(request(), Collected())


def test_drained_first(model):
    sinks = [Collected() for _ in range(3)]
    batcher = Batcher(model, n_slots=1, n_ctx=256, params=PARAMS)
    for sink in sinks:
        batcher.submit(request(), sink)
    batcher.close(BOUND)
    assert {sink.finish() for sink in sinks} == {"length"}


# as iterators


def test_iterate(model, batcher):
    assert "".join(chunk.text for chunk in iterate(batcher, request())) == alone(model, request())


def test_an_iterator_that_is_closed_cancels(batcher):
    chunks = iterate(batcher, request(n=-1))
    next(chunks)
    chunks.close()
    answers(batcher, [request(seed) for seed in range(4)])
    assert batcher.state().finished["cancelled"] == 1


def test_streams_of_one_event_loop(model, batcher):
    async def text(one: Request) -> str:
        return "".join([chunk.text async for chunk in stream(batcher, one)])

    async def all_texts(requests: list[Request]) -> list[str]:
        return await asyncio.gather(*(text(one) for one in requests))

    requests = [request(seed) for seed in range(8)]
    assert asyncio.run(all_texts(requests)) == [alone(model, one) for one in requests]


def test_a_stream_whose_task_is_cancelled(batcher):
    async def listen() -> None:
        async for _ in stream(batcher, request(n=-1)):
            begun.set()

    begun = asyncio.Event()

    async def interrupted() -> None:
        task = asyncio.create_task(listen())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    answers(batcher, [request(seed) for seed in range(4)])
    assert batcher.state().finished["cancelled"] == 1


def test_the_memory_is_planned_for_all_slots(model):
    planned = planned_context(model.path, 6, 300, PARAMS)
    assert (planned.n_ctx, planned.n_seq_max, planned.kv_unified) == (6 * 512, 6, False)
    assert planned.n_ubatch == PARAMS.n_ubatch
    # as many as the model was made for, if nothing is said
    with Batcher(model, n_slots=2, params=PARAMS) as batcher:
        assert planned_context(model.path, 2, 0).n_ctx == 2 * batcher.n_ctx


def test_who_gets_the_slot_of_one_that_was_cancelled_begins_at_the_beginning(model):
    with Batcher(model, n_slots=1, n_ctx=256, queue=1, params=PARAMS) as batcher:
        for _ in range(20):
            first, second = Collected(), Collected()
            job = batcher.submit(request(1, n=-1), first)
            batcher.submit(request(7), second)
            assert first.begun.wait(BOUND)
            job.cancel()
            assert second.finish() == "length"
            assert second.text == alone(model, request(7))


def test_a_model_whose_memory_cannot_go_back(tmp_path):
    """What a slot holds is of use only for what begins with all of it."""
    architectures.make(tmp_path / "mamba.gguf", "mamba", vocabulary=True)
    with Model(tmp_path / "mamba.gguf", ModelParams(repack=False)) as model:
        whole = tuple(n % 60 + 4 for n in range(40))
        with Batcher(model, n_slots=2, n_ctx=256, params=PARAMS) as batcher:
            first = answers(batcher, [Request(whole, 4, GREEDY)])[0]
            again = answers(batcher, [Request(whole, 4, GREEDY)])[0]
            assert again.text == first.text
            assert again.chunks[-1].usage.n_cached == 0


@pytest.mark.parametrize(
    ("arch", "vocabulary"), [("bert", True), ("modern-bert", True), ("llama", False)]
)
def test_a_model_without_conversations_is_refused(tmp_path, arch, vocabulary):
    architectures.make(tmp_path / "model.gguf", arch, vocabulary=vocabulary)
    with (
        Model(tmp_path / "model.gguf", ModelParams(repack=False)) as model,
        pytest.raises(UsageError, match=r"model\.gguf: "),
    ):
        Batcher(model, n_slots=2, n_ctx=256, params=PARAMS)
