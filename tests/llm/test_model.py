"""Loading: what a model says of itself, its tokens, and every way in which a load can fail."""

from __future__ import annotations

import re
import signal
import threading

import pytest

from caravan import engine
from caravan.errors import AllocationError, ContextError, ModelError, UsageError, WorkerLost
from caravan.llm import Context, ContextParams, Model, ModelParams, orphans
from caravan.llm.params import c_model_params
from e2e import architectures
from llm.fakes import FakeDevice


def test_model_says_what_it_is(model, smollm2):
    assert model.description == "llama 256M Q4_1"
    assert (model.n_params, model.n_layer, model.n_vocab) == (134515008, 30, 49152)
    assert (model.n_embd, model.n_ctx_train, model.size) == (576, 8192, 96576768)
    assert (model.bos, model.add_bos, model.has_encoder) == (1, False, False)
    assert "<|im_start|>" in model.chat_template()
    assert repr(model) == f"<Model {smollm2.name}: llama 256M Q4_1 on CPU>"


def test_pieces_of_tokens_join_to_the_text(model):
    text = "Once upon a time — ein Märchen 🐪\0 end"
    tokens = model.tokenize(text)
    assert b"".join(map(model.piece, tokens)).decode() == text
    assert model.tokenize("") == []


def test_special_tokens_are_parsed_and_shown_only_when_asked(model):
    (token,) = model.tokenize("<|im_end|>")
    assert model.is_eog(token)
    assert model.piece(token) == b""
    assert model.piece(token, special=True) == b"<|im_end|>"
    assert len(model.tokenize("<|im_end|>", parse_special=False)) > 1


@pytest.mark.parametrize("token", [-1, 49152])
def test_token_outside_the_vocabulary_is_refused(model, token):
    with pytest.raises(UsageError, match=f"token {token} is not in the vocabulary"):
        model.piece(token)
    with pytest.raises(UsageError):
        model.is_eog(token)


def test_layers_without_devices_are_the_cpus(model):
    assert model.layer_devices() == ["CPU"] * 31


def test_missing_file(tmp_path):
    with pytest.raises(ModelError, match=r"no model file .*nothing\.gguf"):
        Model(tmp_path / "nothing.gguf")


def test_file_that_is_not_gguf(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"\x7fELF and so on")
    with pytest.raises(ModelError, match=r"model\.gguf is not a GGUF file: .*ELF"):
        Model(file)


def test_empty_file(tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ModelError, match="is not a GGUF file: it is empty"):
        Model(file)


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (4, "short.gguf is cut off"),
        (100, "short.gguf is cut off"),
        (100_000, "short.gguf is cut off"),
        (20_000_000, "short.gguf: the engine cannot load it: "),
    ],
)
def test_truncated_file_is_refused(smollm2, tmp_path, size, told):
    file = tmp_path / "short.gguf"
    with smollm2.open("rb") as whole:
        file.write_bytes(whole.read(size))
    with pytest.raises(ModelError, match=re.escape(told)) as caught:
        Model(file)
    assert "\n" not in str(caught.value)
    assert "llama_model_load" not in str(caught.value)


def test_progress_goes_up_to_the_end(smollm2):
    seen = []
    Model(smollm2, progress=lambda share: seen.append(share) is None).close()
    assert seen == sorted(seen)
    assert seen[0] == 0.0
    assert seen[-1] == 1.0


def test_progress_can_stop_the_load(smollm2):
    with pytest.raises(ModelError, match="loading was stopped"):
        Model(smollm2, progress=lambda share: share < 0.5)


def test_exception_in_progress_comes_out_as_it_is(smollm2):
    def fail(share):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        Model(smollm2, progress=fail)


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_ctrl_c_stops_the_load(smollm2, at):
    sent = []

    def press(share):
        if share >= at and not sent:
            sent.append(share)
            signal.raise_signal(signal.SIGINT)
        return True

    with pytest.raises(KeyboardInterrupt):
        Model(smollm2, progress=press)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_lost_device_is_told_before_anything_is_loaded(smollm2):
    with pytest.raises(WorkerLost, match="lost RPC0 at host:1 during GRAPH_COMPUTE"):
        Model(smollm2, devices=[FakeDevice(alive=0)])


class _Refuses:
    """An engine that cannot load, because a device has no room."""

    def __init__(self, device):
        self._device = device
        self._real = engine.load().llama

    def __getattr__(self, name):
        return getattr(self._real, name)

    def model_load_from_splits(self, paths, count, params):
        self._device.allocation_error = AllocationError("RPC0 has no room for 5 GiB")
        return None


def test_refused_allocation_is_the_reason(smollm2, monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr(engine.load(), "llama", _Refuses(device))
    with pytest.raises(ModelError, match="RPC0 has no room for 5 GiB") as caught:
        Model(smollm2, devices=[device], fit=False)
    assert isinstance(caught.value.__cause__, AllocationError)


def test_device_lost_during_the_load_is_told(smollm2, monkeypatch):
    device = FakeDevice(alive=1)
    monkeypatch.setattr(engine.load(), "llama", _Refuses(device))
    with pytest.raises(WorkerLost):
        Model(smollm2, devices=[device], fit=False)


@pytest.mark.parametrize(
    "values",
    [
        {"split_mode": "diagonal"},
        {"load_mode": "fast"},
        {"lazy_mode": "very"},
        {"tensor_split": (1.0, -1.0)},
        {"tensor_split": (float("nan"),)},
    ],
)
def test_params_refuse_what_means_nothing(values):
    with pytest.raises(UsageError, match=next(iter(values))):
        ModelParams(**values)


def test_more_shares_than_devices_are_refused(smollm2):
    with pytest.raises(UsageError, match="3 shares for 1 devices"):
        Model(smollm2, ModelParams(tensor_split=(1, 1, 1)), devices=[FakeDevice()])
    with pytest.raises(UsageError, match="1 shares for 0 devices"):
        Model(smollm2, ModelParams(tensor_split=(1,)))


def test_split_mode_none_uses_the_main_device_alone(smollm2):
    with pytest.raises(UsageError, match="main_gpu 1: there are 1 devices"):
        Model(smollm2, ModelParams(split_mode="none", main_gpu=1), devices=[FakeDevice()])
    # lost ones are not asked when they are not used
    params = ModelParams(split_mode="none", main_gpu=-1)
    with Model(smollm2, params, devices=[FakeDevice(alive=0)]) as model:
        assert model.devices == ()


def test_override_with_an_unknown_buffer_type_names_those_there_are(smollm2):
    with pytest.raises(UsageError, match="no buffer type 'CUDA9'; there are: CPU"):
        Model(smollm2, ModelParams(overrides=((".*", "CUDA9"),)))


def test_override_is_taken(smollm2):
    with Model(smollm2, ModelParams(overrides=((r"blk\.0\.", "CPU"),), repack=False)) as model:
        assert model.n_layer == 30


def test_c_struct_has_the_devices_the_split_and_an_end():
    devices = (FakeDevice("A"), FakeDevice("B"))
    devices[0].handle, devices[1].handle = 0x10, 0x20
    params, keep = c_model_params(ModelParams(tensor_split=(3, 1)), devices)
    assert list(keep[0]) == [0x10, 0x20, None]
    assert keep[1][:3] == [3.0, 1.0, 0.0]
    assert params.main_gpu == 0
    assert params.tensor_buft_overrides is None


def test_vocabulary_alone_tokenizes_and_makes_no_context(smollm2, model):
    with Model(smollm2, ModelParams(vocab_only=True)) as vocabulary:
        assert vocabulary.tokenize("some words") == model.tokenize("some words")
        with pytest.raises(ContextError, match="only the vocabulary"):
            Context(vocabulary)


def test_a_long_text_that_is_tokenized_keeps_nobody_else_waiting(smollm2, monkeypatch):
    with Model(smollm2, ModelParams(vocab_only=True)) as model:
        begun, go_on = threading.Event(), threading.Event()

        class Slow:
            def __getattr__(self, name):
                return getattr(llama, name)

            def tokenize(self, *arguments):
                begun.set()
                assert go_on.wait(20)
                return llama.tokenize(*arguments)

        llama = model.words._llama
        monkeypatch.setattr(model.words, "_llama", Slow())
        found = []
        thread = threading.Thread(target=lambda: found.extend(model.tokenize("Hello")))
        thread.start()
        try:
            assert begun.wait(20)
            pieces = threading.Thread(target=lambda: found.append(model.piece(905)))
            pieces.start()
            pieces.join(20)
            assert found == [b" world"]
        finally:
            go_on.set()
            thread.join()
            pieces.join()
        assert found[1:] == model.tokenize("Hello")


def test_closing_twice_and_using_a_closed_model(smollm2):
    model = Model(smollm2)
    context = Context(model, ContextParams(n_ctx=64))
    model.close()
    model.close()
    assert context.handle == 0
    assert "closed" in repr(model)
    with pytest.raises(ModelError, match="the model is closed"):
        model.tokenize("x")
    with pytest.raises(ModelError, match="the model is closed"):
        Context(model)


def test_forgotten_objects_are_freed_at_the_next_load_contexts_first(smollm2, monkeypatch):
    freed = []
    model = Model(smollm2)
    context = Context(model, ContextParams(n_ctx=64))
    expected = [context.handle, model.handle]
    leave = orphans.leave

    def note(free, handle):
        leave(lambda h: (freed.append(h), free(h)), handle)

    monkeypatch.setattr(orphans, "leave", note)
    del context, model
    assert freed == []
    Model(smollm2).close()
    assert freed == expected


def test_a_model_without_vocabulary_has_no_texts(tmp_path):
    """The engine would end the process."""
    architectures.make(tmp_path / "model.gguf", "llama")
    with Model(tmp_path / "model.gguf", ModelParams(repack=False)) as model:
        for ask in (lambda: model.piece(3), lambda: model.tokenize("a")):
            with pytest.raises(ModelError, match="the model has no vocabulary"):
                ask()
        assert not model.is_eog(3)
