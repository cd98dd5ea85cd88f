"""Contexts on the CPU: batches of any size, going back, saving, and every refusal in words."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

from caravan.errors import AllocationError, ContextError, DecodeError, UsageError, WorkerLost
from caravan.llm import Context, ContextParams
from llm.fakes import FakeDevice


@pytest.fixture(scope="module")
def tokens(model):
    found = model.tokenize("The quick brown fox jumps over the lazy dog. " * 10)
    assert len(found) > 96
    return found


def test_long_prompts_are_cut_where_the_engine_needs_it(model, context, tokens):
    context.decode(tokens)
    assert context.n_past == len(tokens)
    params = ContextParams(n_ctx=256, n_batch=256, n_ubatch=16, n_threads=1)
    with Context(model, params) as other:
        other.decode(tokens)
        assert np.array_equal(other.logits(), context.logits())


def test_logits_are_copied_out(context, tokens):
    context.decode(tokens[:5])
    first = context.logits()
    kept = first.copy()
    context.decode_one(tokens[5])
    assert first.shape == (context.model.n_vocab,)
    assert first.dtype == np.float32
    assert np.array_equal(first, kept)
    assert not np.array_equal(first, context.logits())


def test_all_logits_equal_those_of_single_tokens(context, tokens):
    context.decode(tokens[:4], logits="all")
    every = [context.logits(i) for i in range(4)]
    assert np.array_equal(every[3], context.logits(-1))
    context.clear()
    for index, token in enumerate(tokens[:4]):
        context.decode_one(token)
        assert context.logits().argmax() == every[index].argmax()


def test_logits_that_were_not_asked_for(context, tokens):
    context.decode(tokens[:4], logits="none")
    with pytest.raises(DecodeError, match="no logits of token -1"):
        context.logits()
    context.decode(tokens[4:6])
    with pytest.raises(DecodeError, match="no logits of token 0"):
        context.logits(0)


def test_all_logits_of_more_than_a_batch_are_refused(context, tokens):
    with pytest.raises(UsageError, match="logits of 40 tokens at once; n_batch is 32"):
        context.decode(tokens[:40], logits="all")


def test_nothing_to_decode_changes_nothing(context):
    context.decode([])
    assert context.n_past == 0


def test_more_tokens_than_fit(context, tokens):
    context.decode(tokens[:90])
    with pytest.raises(DecodeError, match=r"200 more tokens do not fit: .* holds 90 of 256"):
        context.decode([1] * 200)
    assert context.n_past == 90
    assert context.room == 166
    context.decode([1] * 166)
    with pytest.raises(DecodeError, match="1 more tokens do not fit"):
        context.decode_one(1)


@pytest.mark.parametrize("token", [-1, 49152, 1 << 40])
def test_token_outside_the_vocabulary(context, token):
    with pytest.raises(DecodeError, match="not in the vocabulary of 49152"):
        context.decode([1, token])
    assert context.n_past == 0


def test_going_back_gives_the_same_again(context, tokens):
    context.decode(tokens[:20])
    context.decode(tokens[20:23])
    wanted = context.logits()
    context.decode(tokens[30:40])
    context.decode(tokens[20:23], pos0=20)
    assert context.n_past == 23
    assert np.array_equal(context.logits(), wanted)


def test_going_back_to_what_it_does_not_hold(context, tokens):
    context.decode(tokens[:5])
    for n_past in (-1, 6):
        with pytest.raises(DecodeError, match=f"cannot go to token {n_past}: .* holds 5"):
            context.rewind(n_past)
    context.rewind(5)
    context.rewind(0)
    assert context.n_past == 0


def test_clear_forgets(context, tokens):
    context.decode(tokens[:9])
    wanted = context.logits()
    context.clear()
    assert context.n_past == 0
    context.decode(tokens[:9])
    assert np.array_equal(context.logits(), wanted)


def test_saved_state_is_restored(model, context, tokens):
    context.decode(tokens[:30])
    state = context.save_state()
    context.decode_one(7)
    wanted = context.logits()
    params = ContextParams(n_ctx=256, n_batch=32, n_ubatch=16, n_threads=1)
    with Context(model, params) as other:
        other.decode(tokens[50:60])
        assert other.restore_state(state)
        assert other.n_past == 30
        other.decode_one(7)
        assert np.array_equal(other.logits(), wanted)


def test_nonsense_is_not_restored_and_leaves_it_empty(context, tokens):
    context.decode(tokens[:5])
    assert not context.restore_state(b"nonsense")
    assert context.n_past == 0
    context.decode(tokens[:5])


@pytest.mark.parametrize(
    "values",
    [
        {"type_k": "q8_0", "type_v": "q8_0"},
        {"flash_attn": "off"},
        {"flash_attn": "on"},
        {"embeddings": True},
        {"n_seq_max": 2},
    ],
)
def test_other_shapes_of_a_context_decode(model, tokens, values):
    with Context(model, ContextParams(n_ctx=512, n_threads=1, **values)) as context:
        context.decode(tokens[:40])
        assert np.isfinite(context.logits()).all()


def test_own_context_size_is_the_models(model):
    with Context(model, ContextParams(n_ubatch=8, n_batch=8)) as context:
        assert context.n_ctx == model.n_ctx_train


def test_context_too_large_for_this_machine(model):
    params = ContextParams(n_ctx=1 << 23, type_k="f32", type_v="f32")  # 385 GB
    with pytest.raises(ContextError, match=r"no context of 8388608 tokens: \w+"):
        Context(model, params)


def test_refusal_in_the_engines_words(model):
    with pytest.raises(ContextError, match="quantized V cache requires flash_attn"):
        Context(model, ContextParams(type_v="q8_0", flash_attn="off"))


@pytest.mark.parametrize(
    "values",
    [
        {"n_ctx": -1},
        {"n_batch": 0},
        {"n_ubatch": 1 << 31},
        {"n_seq_max": 0},
        {"n_threads": -1},
        {"type_k": "q9"},
        {"type_v": "f8"},
        {"flash_attn": "maybe"},
    ],
)
def test_params_refuse_what_means_nothing(values):
    with pytest.raises(UsageError, match=next(iter(values))):
        ContextParams(**values)


@pytest.fixture
def device(model, monkeypatch):
    """A device that the model claims to be on, and so do its contexts."""
    device = FakeDevice()
    monkeypatch.setattr(model, "devices", (device,))
    monkeypatch.setattr(model, "holds", (device,))
    for raw in model.contexts:
        raw._holds = (device,)
    return device


def test_device_that_is_lost_already(model, device):
    device.alive = 0
    with pytest.raises(WorkerLost):
        Context(model, ContextParams(n_ctx=64))


def test_allocation_that_a_device_refuses(model, device, monkeypatch):
    monkeypatch.setattr(device, "alive", 1 << 20)

    class Llama:
        def init_from_model(self, handle, params):
            device.allocation_error = AllocationError("RPC0 has no room for 9 GiB")

    monkeypatch.setattr("caravan.llm.raw.engine.load", _loaded_with(Llama()))
    with pytest.raises(ContextError, match="tokens: RPC0 has no room for 9 GiB") as caught:
        Context(model, ContextParams(n_ctx=64))
    assert isinstance(caught.value.__cause__, AllocationError)


def _loaded_with(llama):
    from caravan import engine

    real = engine.load()

    class Loaded:
        pass

    loaded = Loaded()
    loaded.llama, loaded.ggml = llama, real.ggml
    llama.context_default_params = real.llama.context_default_params
    return lambda: loaded


def test_silent_loss_is_told_after_every_call_of_the_engine(context, device, tokens):
    device.alive = 1
    context.decode_one(1)
    with pytest.raises(WorkerLost):
        context.decode_one(1)
    for call in (context.synchronize, context.logits, context.save_state):
        device.alive = 0
        with pytest.raises(WorkerLost):
            call()


def test_loss_in_the_middle_of_a_prompt_ends_it(context, device, tokens):
    device.alive = 1
    with pytest.raises(WorkerLost):
        context.decode(tokens[:96])
    assert context.n_past == 32


def test_ctrl_c_in_the_middle_of_a_prompt(model, context, tokens):
    decode, calls = context._read, []

    def press(raw, part, logits):
        decode(raw, part, logits)
        calls.append(len(part))
        signal.raise_signal(signal.SIGINT)

    context._read = press
    with pytest.raises(KeyboardInterrupt):
        context.decode(tokens[:96])
    assert calls == [16]
    assert context.n_past == 16
    del context._read
    context.decode(tokens[16:24])


def test_ctrl_c_while_the_engine_computes(model):
    with Context(model, ContextParams(n_ctx=2048, n_batch=64, n_threads=1)) as context:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                context.decode([1] * 2000, pos0=0)
        timer.join()
        assert context.n_past % 64 == 0


def test_closed_context_says_so(model):
    context = Context(model, ContextParams(n_ctx=64))
    context.close()
    context.close()
    assert "closed" in repr(context)
    for call in (
        lambda: context.decode([1]),
        context.synchronize,
        context.logits,
        context.clear,
        context.save_state,
    ):
        with pytest.raises(ContextError, match="the context is closed"):
            call()


def test_threads_with_contexts_of_their_own(model, tokens):
    results = []

    def run():
        params = ContextParams(n_ctx=256, n_batch=32, n_ubatch=16, n_threads=1)
        with Context(model, params) as context:
            context.decode(tokens[:64])
            results.append(context.logits())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(*results)


@pytest.mark.parametrize("call", ["rewind", "clear", "restore_state"])
def test_ctrl_c_in_the_middle_of_going_back_leaves_one_truth(call, context, monkeypatch):
    """What the context knows and what the engine holds are the same."""
    context.decode([1, 2, 3, 4])
    state = context.save_state()
    context.decode([5, 6])
    raw = context._raw
    own = getattr(raw, call)

    def pressed(*arguments):
        result = own(*arguments)
        os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(raw, call, pressed)
    words = {"rewind": (3,), "clear": (), "restore_state": (state, [1, 2, 3, 4])}[call]
    with pytest.raises(KeyboardInterrupt):
        getattr(context, call)(*words)
    expected = {"rewind": [1, 2, 3], "clear": [], "restore_state": [1, 2, 3, 4]}[call]
    assert context.tokens == expected
    assert context.n_past == raw.positions() == len(expected)
