"""Tokens and where they come from: what is none is refused, and nothing ever shows one."""

from __future__ import annotations

import copy
import os
import pickle
import traceback

import pytest

from caravan.errors import UsageError
from caravan.trust import token as tokens
from caravan.trust.token import MIN_LENGTH, Token, from_environment, given, read

SECRET = "correct horse battery staple"


def refused(call, *args: object) -> str:
    """Why it is none; nothing of it is shown, also not in the traceback."""
    with pytest.raises(UsageError) as caught:
        call(*args)
    told = "".join(traceback.format_exception(caught.value))
    shown = [line for line in told.splitlines() if not line.startswith("  ")]
    assert "sesame" not in "\n".join(shown)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_token_is_the_bytes_of_its_text():
    assert Token(SECRET).key == SECRET.encode()
    assert Token(f"\n  {SECRET}\t\r\n").key == SECRET.encode()
    assert Token("Kennwort über alles").key == "Kennwort über alles".encode()
    assert Token("x" * MIN_LENGTH).key == b"x" * 16


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the token is empty"),
        (" \n\t ", "the token is empty"),
        ("open sesame", "the token is too short: expected at least 16 characters"),
        ("x" * 15, "too short"),
        ("open sesame, says\nAli Baba", "the token is not one line of plain text"),
        ("open sesame, says\0Ali Baba", "not one line"),
        ("open sesame, says \ud800", "not one line"),
        ("open sesame, says \x1b[31m", "not one line"),
    ],
)
def test_what_is_no_token_is_refused(text, why):
    assert refused(Token, text).startswith(why) or why in refused(Token, text)


def test_a_token_shows_itself_nowhere():
    token = Token(SECRET)
    assert repr(token) == str(token) == "<Token>"
    assert "horse" not in f"{token!r} {token} {[token]} {dict(token=token)}"
    for write in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not written down"):
            write(token)
    with pytest.raises(AttributeError):
        token.other = 1  # type: ignore[attr-defined]


def test_new_tokens_differ_and_are_good():
    made = {tokens.new() for _ in range(20)}
    assert len(made) == 20
    for text in made:
        assert len(text) == 43
        assert Token(text).key == text.encode()
        assert text.replace("-", "").replace("_", "").isalnum()


def test_a_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    said: list[str] = []
    assert read(file, said.append).key == SECRET.encode()
    # as editors of another system write it
    file.write_bytes(b"\xef\xbb\xbf" + SECRET.encode() + b"\r\n")
    assert read(str(file), said.append).key == SECRET.encode()
    assert said == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_who_else_can_read_the_file_is_told(tmp_path, mode):
    file = tmp_path / "token"
    file.write_text(SECRET)
    file.chmod(mode)
    said: list[str] = []
    assert read(file, said.append).key == SECRET.encode()
    assert said == [f"others on this machine can read the token file {file}: chmod 600 it"]


def test_a_pipe_is_as_good_as_a_file():
    reading, writing = os.pipe()
    os.write(writing, SECRET.encode())
    os.close(writing)
    said: list[str] = []
    assert read(f"/dev/fd/{reading}", said.append).key == SECRET.encode()
    os.close(reading)
    assert said == []


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "the token in {} is empty"),
        (b"\n\n", "the token in {} is empty"),
        (b"open sesame", "the token in {} is too short"),
        (b"open sesame, says\nAli Baba and others", "the token in {} is not one line"),
        (b"open sesame, says \xff\xfe", "the token file {} is not text in UTF-8"),
        (b"open sesame, says \xc3", "the token file {} is not text in UTF-8"),
        (b"open sesame" * 1000, "the token file {} holds more than 4096 bytes"),
    ],
)
def test_a_file_that_holds_none(tmp_path, content, why):
    file = tmp_path / "token"
    file.write_bytes(content)
    assert refused(read, file).startswith(why.format(file))


@pytest.mark.parametrize("name", ["nowhere", ".", "a\0b", "/dev/zero"])
def test_a_file_that_cannot_be_read(tmp_path, name):
    path = name if name.startswith("/") else f"{tmp_path}/{name}"
    why = refused(read, path)
    assert path in why
    assert why.startswith("cannot read the token file") or "more than 4096 bytes" in why


def test_the_environment(monkeypatch):
    monkeypatch.delenv("CARAVAN_TOKEN", raising=False)
    assert from_environment() is None
    for blank in ("", "  ", "\t"):
        monkeypatch.setenv("CARAVAN_TOKEN", blank)
        assert from_environment() is None
    monkeypatch.setenv("CARAVAN_TOKEN", f" {SECRET} ")
    found = from_environment()
    assert found is not None
    assert found.key == SECRET.encode()
    monkeypatch.setenv("CARAVAN_TOKEN", "open sesame")
    assert refused(from_environment).startswith("the token in CARAVAN_TOKEN is too short")
    monkeypatch.setitem(os.environ, "CARAVAN_TOKEN", "open sesame, says \udcff")
    assert refused(from_environment) == "CARAVAN_TOKEN is not text in UTF-8"


def test_what_a_caller_means(monkeypatch):
    monkeypatch.setenv("CARAVAN_TOKEN", SECRET)
    token = Token("another one of 28 characters")
    assert given(token) is token
    assert given("") is None
    asked, of_environment = given("a third one of 26 characters"), given(None)
    assert asked is not None and asked.key == b"a third one of 26 characters"
    assert of_environment is not None and of_environment.key == SECRET.encode()
    refused(given, "open sesame")
    for wrong in (b"bytes that are no text", 7):
        assert f"of type {type(wrong).__name__}: expected a text" in refused(given, wrong)
