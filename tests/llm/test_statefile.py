"""Conversations in files: all of one or nothing, and never another model's."""

from __future__ import annotations

import os
import resource
import shutil

import numpy as np
import pytest

from caravan.errors import StateError
from caravan.llm import Context, ContextParams
from caravan.llm.statefile import Saved
from caravan.models.fingerprint import fingerprint

TEXT = "One two three four five six seven eight"


@pytest.fixture
def saved(context, tmp_path):
    """A file with the tokens of TEXT."""
    context.decode(context.model.tokenize(TEXT))
    path = tmp_path / "saved"
    context.save(path, {"a": ["ü", 1]})
    return path


def test_what_was_saved_goes_on_in_another_context(context, saved, model):
    expected = context.tokens
    context.decode_one(3)
    logits = context.logits()
    with Context(model, ContextParams(n_ctx=256, n_batch=32, n_ubatch=16, n_threads=1)) as other:
        assert other.load(saved) == {"a": ["ü", 1]}
        assert (other.tokens, other.n_past) == (expected, len(expected))
        other.decode_one(3)
        assert np.array_equal(other.logits(), logits)


def test_the_tokens_that_a_context_holds(context, model):
    tokens = model.tokenize(TEXT)
    assert context.tokens == []
    context.decode(tokens)
    context.decode_one(5)
    context.rewind(3)
    context.decode([7, 8])
    assert context.tokens == [*tokens[:3], 7, 8]
    state = context.save_state()
    context.clear()
    assert context.tokens == []
    assert context.restore_state(state)
    assert context.tokens is None
    with pytest.raises(StateError, match="restored without its tokens"):
        context.save("nowhere")
    assert context.restore_state(state, [*tokens[:3], 7, 8])
    context.rewind(4)
    context.decode([9])
    assert context.tokens == [*tokens[:3], 7, 9]


def test_an_empty_context(context, tmp_path):
    context.save(tmp_path / "saved")
    context.decode([1, 2, 3])
    assert context.load(tmp_path / "saved") == {}
    assert (context.n_past, context.tokens) == (0, [])


def test_a_link_stays_one(saved, context, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(saved)
    context.decode_one(3)
    context.save(link)
    assert link.is_symlink()
    assert len(Saved.read(saved).tokens) == context.n_past


def test_what_may_be_replaced(saved, tmp_path):
    other, empty = tmp_path / "other", tmp_path / "empty"
    other.write_text("precious")
    empty.touch()
    found = [Saved.may_replace(path) for path in (saved, tmp_path / "none", empty, other, tmp_path)]
    assert found == [True, True, True, False, False]


def test_a_file_is_nobody_elses_to_read(saved):
    assert os.stat(saved).st_mode & 0o777 == 0o600


def test_every_cut_and_every_change_is_seen(context, saved, tmp_path):
    data = saved.read_bytes()
    held = context.tokens
    path = tmp_path / "changed"
    sizes = [*range(0, 200), len(data) // 2, len(data) - 33, len(data) - 1]
    for size in sizes:
        path.write_bytes(data[:size])
        with pytest.raises(StateError, match=r"is cut off or damaged|is no saved conversation"):
            context.load(path)
    for at in (0, 17, 30, 200, len(data) // 2, len(data) - 40, len(data) - 1):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(StateError, match=r"is cut off or damaged|is no saved conversation"):
            context.load(path)
    path.write_bytes(data + b"x")
    with pytest.raises(StateError, match=r"is cut off or damaged"):
        context.load(path)
    assert context.tokens == held


def test_what_is_no_file(context, tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(StateError, match=f"cannot read {path}: "):
            context.load(path)
    with pytest.raises(StateError, match=r"cannot write .*/x: No such file"):
        context.save(tmp_path / "none" / "x")
    for path in (tmp_path, "/dev/null"):
        with pytest.raises(StateError, match=f"cannot write {path}: it is no file"):
            context.save(path)
    with pytest.raises(StateError, match="/dev/zero is no saved conversation"):
        context.load("/dev/zero")
    assert list(tmp_path.iterdir()) == []


def test_other_formats_and_too_little_room(context, saved, model):
    params = ContextParams(n_ctx=256, type_k="q8_0", n_threads=1)
    with Context(model, params) as other, pytest.raises(StateError) as caught:
        other.load(saved)
    assert str(caught.value).endswith("for this context: its K cache is of f16, not of q8_0")
    many = Saved.read(saved)
    long = Saved(many.model, many.formats, many.engine, [1] * 300, many.state)
    long.write(saved)
    with pytest.raises(StateError, match="holds 300 tokens; this context has room for 256"):
        context.load(saved)


def test_a_state_that_the_engine_refuses(context, saved):
    whole = Saved.read(saved)
    Saved(whole.model, whole.formats, "0.1", whole.tokens, whole.state[:100]).write(saved)
    with pytest.raises(StateError, match=r"the engine refuses it \(saved by ggml 0.1\)"):
        context.load(saved)
    assert (context.n_past, context.tokens) == (0, [])


def test_another_model(context, saved, monkeypatch):
    monkeypatch.setattr("caravan.llm.statefile.fingerprint", lambda parts: "another")
    with pytest.raises(StateError, match=r"it is of another model \(llama .*\), not of "):
        context.load(saved)


def test_a_fingerprint_is_of_headers_and_weights(smollm2, tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copyfile(smollm2, path)
    own = fingerprint([smollm2])
    assert fingerprint([path]) == own != fingerprint([path, path])
    with open(path, "r+b") as file:
        file.seek(-2000, os.SEEK_END)
        at = file.tell() - file.tell() % 4096
        file.seek(at - 60_000_000)
        # somewhere in the weights, a tensor's worth
        file.write(b"\0" * 4_000_000)
    assert fingerprint([path]) != own


def test_a_full_disk_leaves_what_was_there(context, saved, tmp_path):
    before = saved.read_bytes()
    context.decode_one(3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(StateError, match=r"cannot write .*: File too large"):
            context.save(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert saved.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
