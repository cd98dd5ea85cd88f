"""A graph whose result is fetched at once leaves together with the command that fetches."""

from __future__ import annotations

from caravan.stream.ext_link import ExtLink
from caravan.wire.versions import V8
from stream.scripted import Rig, make_rig
from stream.test_links import INFO, REACH, Graph, Tensor


def link_of(rig: Rig) -> ExtLink:
    link = ExtLink(rig.stream, INFO, 0, V8, REACH)
    link.graph_compute(Graph(7))
    rig.peer.request("GRAPH_COMPUTE")
    return link


def step(link: ExtLink, fetch: bool) -> int:
    """One step with an input, the graph and perhaps a read; the segments that it took."""
    before = link.stream.segments
    link.set_tensor(Tensor(1), 0, b"input")
    link.graph_compute(Graph(7))
    if fetch:
        link.get_tensor(Tensor(2), 0, 4, None)
    return link.stream.segments - before


def test_what_followed_last_time_is_waited_for() -> None:
    rig = make_rig()
    try:
        link = link_of(rig)
        # the first time nothing is known yet, the second time it was a read
        assert [step(link, True), step(link, True), step(link, True)] == [2, 1, 1]
        names = [rig.peer.request().name for _ in range(9)]
        assert names == ["SET", "GRAPH_RECOMPUTE", "GET"] * 3
    finally:
        rig.take_leave()


def test_a_wrong_guess_holds_it_until_somebody_asks_for_more() -> None:
    rig = make_rig()
    try:
        link = link_of(rig)
        step(link, True)
        assert step(link, False) == 0
        link.stream.flush()
        assert link.stream.segments
        # and it is not made twice
        step(link, False)
        assert step(link, False) == 1
        names = [rig.peer.request().name for _ in range(9)]
        assert names == ["SET", "GRAPH_RECOMPUTE", "GET"] + ["SET", "GRAPH_RECOMPUTE"] * 3
    finally:
        rig.take_leave()


def test_a_push_is_a_sequel_too() -> None:
    rig = make_rig()
    try:
        link = link_of(rig)
        for expected in (2, 1):
            before = rig.stream.segments
            link.graph_compute(Graph(7))
            link.push(Tensor(2), 4, 1, 1)
            assert rig.stream.segments - before == expected
    finally:
        rig.take_leave()
