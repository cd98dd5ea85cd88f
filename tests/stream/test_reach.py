"""Which addresses of a worker mean something to another one."""

from __future__ import annotations

import pytest

from caravan.stream.reach import Reach
from caravan.transport.endpoint import Endpoint
from caravan.wire.extension import MAX_ADDRESSES


def reach(endpoint: str, *addresses: str) -> Reach:
    return Reach(Endpoint.parse(endpoint), "key", addresses)


HERE = ("127.0.0.1:1", "127.8.9.10:1", "[::1]:1", "localhost:1", "unix:/tmp/w")
ELSEWHERE = ("10.0.0.2:1", "lab1:1", "[fe80::1]:1", "0.0.0.0:1", "localhost.lab:1")


@pytest.mark.parametrize("endpoint", ELSEWHERE)
def test_what_the_worker_says_comes_before_what_the_head_knows(endpoint):
    target = reach(endpoint, "192.168.0.1:5", "other:6")
    for source in (*HERE, *ELSEWHERE):
        assert target.seen_from(reach(source)) == ["192.168.0.1:5", "other:6", endpoint]


@pytest.mark.parametrize("endpoint", HERE)
def test_what_means_this_machine_is_told_on_this_machine_alone(endpoint):
    target = reach(endpoint, "unix:/tmp/w", "10.0.0.2:1", "[::1]:9")
    for source in HERE:
        addresses = ["unix:/tmp/w", "10.0.0.2:1", "[::1]:9", endpoint]
        assert target.seen_from(reach(source)) == list(dict.fromkeys(addresses))
    for source in ELSEWHERE:
        assert target.seen_from(reach(source)) == ["10.0.0.2:1"]
    assert reach(endpoint).seen_from(reach("10.0.0.2:1")) == []


def test_an_address_is_told_once():
    target = reach("lab1:50052", "lab1:50052", "lab1:50053", "lab1:50052")
    assert target.seen_from(reach("lab2")) == ["lab1:50052", "lab1:50053"]


@pytest.mark.parametrize("text", ["", "a b", "unix:", "lab1:0", "lab1:70000", "[::1", "x:y:z"])
@pytest.mark.parametrize("here", [True, False])
def test_what_is_no_endpoint_is_left_out(text, here):
    one, other = ("127.0.0.1:1", "127.0.0.1:2") if here else ("lab1:1", "lab2:1")
    assert reach(one, text).seen_from(reach(other)) == [one]


def test_no_more_are_told_than_a_worker_takes():
    target = reach("lab1:1", *(f"lab1:{n}" for n in range(2, MAX_ADDRESSES + 2)))
    assert len(target.seen_from(reach("lab2:1"))) == MAX_ADDRESSES


@pytest.mark.parametrize("said", [["tls://lab1:1"], ["lab1:1"]])
def test_a_place_is_tried_once_and_with_tls_if_anybody_says_so(said):
    target = reach("lab1:1" if said[0].startswith("tls") else "tls://lab1:1", *said)
    assert target.seen_from(reach("lab2:1")) == ["tls://lab1:1"]
