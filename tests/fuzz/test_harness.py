"""What comes out of the code that reads others' bytes, whatever they are, is an error of ours."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import harness
from fuzz.corpus import load
from fuzz.mutate import Mutator

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def corpus():
    return load()


def test_what_heads_send_is_accepted(corpus):
    graphs = 0
    for session in corpus:
        for message in session.messages:
            for data in harness.inputs(session.protocol, message.number, message.payload):
                if data[0] in map(harness.HARNESSES.index, (harness.ext_graph, harness.base_graph)):
                    assert harness.feed(data), session.name
                    graphs += 1
    assert graphs > 50
    assert all(map(harness.feed, harness.first_words()))


@pytest.mark.parametrize("seed", range(4))
def test_mutated_messages_raise_nothing_else(corpus, seed):
    rng = random.Random(seed)
    accepted = 0
    for _ in range(1500):
        session = rng.choice(corpus)
        message = rng.choice(session.messages)
        mutator = Mutator(rng, session.protocol)
        payload = mutator.payload(message.number, message.payload)
        for data in harness.inputs(session.protocol, message.number, payload):
            accepted += harness.feed(data)
    assert accepted > 100


@pytest.mark.parametrize("seed", range(2))
def test_random_bytes_raise_nothing_else(seed):
    rng = random.Random(seed)
    for _ in range(2000):
        size = rng.choice((0, 1, 9, 16, 33, 49, 100, 268, 296, 600))
        harness.feed(bytes([rng.randrange(len(harness.HARNESSES))]) + rng.randbytes(size))


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_guided_by_coverage(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "fuzz.guided", "-runs=3000", "-seed=1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"Done 3\d\d\d runs", done.stderr), done.stderr[-1000:]
