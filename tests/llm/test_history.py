"""A history, replayed, leaves what the calls themselves have left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from caravan.llm.history import Call, History

tokens = st.lists(st.integers(0, 99), min_size=1, max_size=5)
steps = st.lists(
    st.tuples(st.just("read"), tokens, st.sampled_from(("last", "all", "none")))
    | st.tuples(st.just("rewind"), st.integers(0, 20))
    | st.tuples(st.just("clear"))
    | st.tuples(st.just("restore"), tokens),
    max_size=20,
)


def replayed(history: History) -> list[int]:
    held: list[int] = []
    if history.state.data is not None:
        held = list(history.state.data)
        assert len(held) == history.state.size
        del held[history.state.kept :]
    for call in history:
        held += call.tokens
        del held[len(held) - len(call.tokens) + call.kept :]
    return held


@given(steps)
def test_a_replay_ends_with_what_is_held(steps):
    history, held = History(), []
    for kind, *values in steps:
        if kind == "read":
            held += values[0]
            history.add(values[0], values[1])
            assert [*history][-1] == Call(
                history._tokens[-len(values[0]) :], values[1], len(values[0])
            )
        elif kind == "rewind":
            n_past = min(values[0], len(held))
            if n_past == len(held):
                continue
            del held[n_past:]
            history.rewind(n_past)
        elif kind == "clear":
            held = []
            history.clear()
        else:
            held = [*values[0]]
            history.restored(bytes(held), len(held))
        assert history.n_past == len(held)
        assert replayed(history) == held


def test_calls_stay_as_they_were():
    """A call is read again whole, also if a part of it is forgotten then."""
    history = History()
    history.add([1, 2, 3], "none")
    history.add([4], "last")
    history.add([5, 6, 7], "all")
    history.rewind(5)
    history.add([8], "last")
    assert [(list(call.tokens), call.outputs, call.kept) for call in history] == [
        ([1, 2, 3], "none", 3),
        ([4], "last", 1),
        ([5, 6, 7], "all", 1),
        ([8], "last", 1),
    ]
    assert (history.n_tokens, history.n_past, len(history)) == (8, 6, 4)
    history.rewind(3)
    assert [list(call.tokens) for call in history] == [[1, 2, 3]]
    assert "3 tokens in 1 calls" in repr(history)
