"""Our head on llama.cpp's own servers: it computes what it computes with our workers, and alone."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import caravan
from e2e.processes import caravan as command
from interop.cases import CASES, SOME, TEXT, assert_same, observe, shifting, told
from interop.peers import CppServer, Head, engine


@contextmanager
def heads(folder: Path | None) -> Iterator[Head]:
    with Head(folder) as head:
        yield head
        head.ask("unload")
        assert head.close() == 0, head.words()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[str]]:
    """Three of llama.cpp's, the last of them with two devices behind its connection."""
    with ExitStack() as stack:
        counts = (1, 1, 2)
        yield [stack.enter_context(CppServer(devices=n)).endpoint for n in counts]


@pytest.fixture(scope="module")
def workers(folder: Path) -> Iterator[list[str]]:
    """Two of ours with llama.cpp's kernels."""
    with engine(folder):
        started = caravan.LocalWorkers(2)
    with started:
        yield started.endpoints


def test_the_same_engine_on_the_head_computes_the_same_alone(folder, smollm2, alone):
    with heads(folder) as head:
        assert_same(observe(head, [], smollm2, SOME), alone)


@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 1), (0, 2), (0, 3), (2, 3)],
    ids=["one server", "two servers", "three servers", "one server with two devices"],
)
def test_it_computes_the_same_on_servers(first, last, servers, folder, smollm2, alone):
    with heads(folder) as head:
        seen = observe(head, servers[first:last], smollm2, CASES if last == 2 else SOME)
    assert_same(seen, alone)


def test_it_computes_the_same_on_our_workers(workers, folder, smollm2, alone):
    with heads(folder) as head:
        assert_same(observe(head, workers, smollm2, SOME), alone)


def test_the_default_engine_on_the_head_goes_with_servers_of_version_7(servers, smollm2, alone):
    """Its ops and types have the same numbers, and the kernels are the servers'."""
    with heads(None) as head:
        assert_same(observe(head, servers[:2], smollm2), alone)


# s: one of llama.cpp's servers, w: one of our workers
MIXES = ["sw", "sww", "wsw", "wws", "sws"]


@pytest.mark.parametrize("mix", MIXES)
def test_servers_and_workers_in_one_pipeline(mix, servers, workers, folder, smollm2, alone):
    ends = {"s": iter(servers), "w": iter(workers)}
    with heads(folder) as head:
        assert_same(observe(head, [next(ends[who]) for who in mix], smollm2, SOME), alone)
        paths = head.ask("paths")["paths"]
    for number, (one, two) in enumerate(itertools.pairwise(mix)):
        expected = "direct" if one == two == "w" else "relay"
        assert paths[f"RPC{number}-RPC{number + 1}"] == expected


GREEDY = {"do": "generate", "n": 3, "keep": True}
OTHER = {"do": "open", "context": "other", "n_ctx": 64, "n_ubatch": 8}


def check_steps(endpoints: list[str], folder: Path, model: Path, steps: list[dict]) -> None:
    """They have the same answers on the servers as on the CPU alone."""
    with heads(folder) as one, heads(folder) as two:
        one.ask("connect", endpoints=endpoints)
        answers = [told(head, [{"do": "load", "path": str(model)}, *steps]) for head in (one, two)]
    assert answers[0] == answers[1]


@pytest.fixture(scope="module")
def tokens(folder: Path, smollm2: Path) -> list[int]:
    with heads(folder) as head:
        head.ask("load", path=str(smollm2))
        return head.ask("tokenize", text=TEXT)["tokens"]


def test_a_second_context_comes_and_goes_while_the_first_decodes(servers, folder, smollm2, tokens):
    """The servers forget all graphs with every freed buffer, and the head knows."""
    steps = [
        {"do": "open", "n_ctx": 128, "n_ubatch": 16},
        {"do": "decode", "tokens": tokens[:40]},
        GREEDY,
        OTHER,
        {"do": "close", "context": "other"},
        GREEDY,
        OTHER,
        {"do": "decode", "context": "other", "tokens": tokens[:20]},
        {"do": "close", "context": "other"},
        GREEDY,
    ]
    check_steps(servers[1:], folder, smollm2, steps)


def test_a_state_comes_back(servers, folder, smollm2, tokens):
    steps = [
        {"do": "open", "n_ctx": 128, "n_ubatch": 16},
        {"do": "decode", "tokens": tokens[:40]},
        {"do": "save", "name": "40 tokens"},
        GREEDY,
        {"do": "clear"},
        {"do": "restore", "name": "40 tokens"},
        {"do": "decode", "tokens": tokens[40:45]},
        GREEDY,
    ]
    check_steps(servers[:2], folder, smollm2, steps)


@pytest.mark.parametrize("mix", ["ss", "ww", "ws"])
def test_the_beginning_is_forgotten(mix, servers, workers, folder, smollm2, tokens):
    ends = {"s": iter(servers), "w": iter(workers)}
    check_steps([next(ends[who]) for who in mix], folder, smollm2, shifting(tokens))


@pytest.mark.parametrize("count", [1, 2])
def test_bench(count, servers, smollm2):
    done = command(
        *("bench", "-m", str(smollm2), "--rpc", ",".join(servers[:count])),
        *("-p", "32", "-n", "4", "-ub", "16", "-r", "1", "-o", "json", "--split=memory"),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(32, 0), (0, 4)]


@pytest.mark.parametrize("mix", ["ss", "sw"])
def test_run(mix, servers, workers, folder, smollm2):
    """The same greedy text as on the CPU alone."""
    ends = {"s": iter(servers), "w": iter(workers)}
    arguments = (
        "run",
        "-m",
        str(smollm2),
        "-p",
        "The caravan left",
        "-n",
        "8",
        "--temp",
        "0",
        "-c",
        "64",
        "--split=memory",
    )
    environment = {**os.environ, "CARAVAN_LIBRARY": str(folder)}
    texts = [
        command(*arguments, *more, env=environment)
        for more in (("--rpc", ",".join(next(ends[who]) for who in mix)), ("--device", "none"))
    ]
    assert [done.returncode for done in texts] == [0, 0], texts
    assert texts[0].stdout == texts[1].stdout
