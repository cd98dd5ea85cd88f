"""A short form of `benchmarks/fuzzing.py`: mutated messages to a live worker, with fixed seeds."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from caravan.wire.commands import Ext
from fuzz.corpus import Message, load
from fuzz.driver import Fuzzer
from fuzz.mutate import Mutator
from fuzz.target import Target

HARMLESS = ("127.0.0.1:", "unix:/nowhere", "[::1]:1", "///")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("fuzz")) as target:
        yield target


def test_mutated_messages_hurt_nobody_else(target):
    """The worker lives, a head that behaves gets its results, and nothing is left behind."""
    fuzzer = Fuzzer(target, 1, base=0.0, length=1000)
    fuzzer.piece(1500)
    assert fuzzer.tally.mutated > 700
    assert fuzzer.tally.statuses["OK"] > 50
    assert fuzzer.tally.statuses["REFUSED"] > 20
    found = [crash for crash in fuzzer.inquest.crashes if not crash.data]
    assert not found, fuzzer.tally.lines(target, fuzzer.inquest.by_index)


def test_the_base_protocol_too(target):
    fuzzer = Fuzzer(target, 3, base=1.0)
    fuzzer.piece(500)
    assert fuzzer.tally.refused > 0
    assert not fuzzer.inquest.crashes


def test_a_seed_says_what_is_sent():
    recorded = load()[0]
    messages = [
        [Mutator(rng, 0).payload(m.number, m.payload) for m in recorded.messages]
        for rng in map(random.Random, (5, 5))
    ]
    assert messages[0] == messages[1]
    assert messages[0] != [m.payload for m in recorded.messages]


def test_a_mutation_never_leads_out_of_this_machine():
    rng = random.Random(1)
    asked = b'{"route":3,"addresses":["127.0.0.1:5"],"key":"k","device":0}'
    for _ in range(2000):
        changed = Message(0, Ext.PEER_OPEN, Mutator(rng, 0).payload(Ext.PEER_OPEN, asked)).payload
        try:
            addresses = json.loads(changed)["addresses"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(addresses, list):
            texts = [address for address in addresses if isinstance(address, str) and address]
            assert all(text.startswith(HARMLESS) for text in texts)
