"""Bytes to text: whole characters, and an end where a stop text begins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan.llm.text import TextStream


def streamed(data: bytes, sizes: list[int], stop: tuple[str, ...] = ()) -> str:
    """All that is shown of bytes that come in parts; the sizes are gone through again and again."""
    text, shown, at = TextStream(stop), "", 0
    while at < len(data) and not text.stopped:
        size = sizes[0]
        sizes = [*sizes[1:], size]
        part = text.feed(data[at : at + size])
        part.encode()
        shown, at = shown + part, at + size
    return shown + text.finish()


def before_stop(text: str, stop: tuple[str, ...]) -> str:
    """What comes before the stop text that is complete first; of several the longest."""
    for end in range(1, len(text) + 1):
        ends = [end - len(word) for word in stop if text.endswith(word, 0, end)]
        if ends:
            return text[: min(ends)]
    return text


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@given(st.text(), SIZES)
def test_any_cut_of_the_bytes_gives_whole_characters(text, sizes):
    assert streamed(text.encode(), sizes) == text


@given(st.text("ab"), st.lists(st.text("ab", min_size=1), max_size=3), SIZES)
def test_stop_texts_are_found_across_any_cut(text, stop, sizes):
    words = tuple(stop)
    assert streamed(text.encode(), sizes, words) == before_stop(text, words)


@given(st.text("aé😀"), st.text("aé😀", min_size=1, max_size=3), SIZES)
def test_stop_texts_may_be_cut_within_a_character(text, stop, sizes):
    assert streamed(text.encode(), sizes, (stop,)) == before_stop(text, (stop,))


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (("bc", "abcd"), "xa"),  # complete first
        (("bc", "abc"), "x"),  # complete at the same time
        (("d", "ab"), "x"),
        (("", "c"), "xab"),  # an empty one is none
        (("abcde",), "xabcd"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 9])
def test_the_stop_text_that_is_complete_first_counts(stop, shown, size):
    assert streamed(b"xabcd", [size], stop) == shown


def test_only_what_may_become_a_stop_text_is_held_back():
    text = TextStream(("END", "\n\n"))
    assert text.feed(b"one\n") == "one"
    assert text.feed(b"two E") == "\ntwo "
    assert text.feed(b"N") == ""
    assert text.feed(b"T") == "ENT"
    assert text.finish() == ""


def test_nothing_comes_after_the_end():
    text = TextStream(("b",))
    assert text.feed(b"abc") == "a"
    assert text.stopped
    assert text.feed(b"def") == ""
    assert text.finish() == ""


def test_broken_bytes_are_replaced():
    text = TextStream(())
    assert text.feed(b"a\xffb\xe2\x82") == "a\ufffdb"
    assert text.finish() == "\ufffd"
