"""Weights that travel once, or not at all: where they come from, and caches that are wrong."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

import caravan
from caravan.models.tensors import read_tensors
from caravan.worker.store import Store
from e2e.loads import MB, N_PROMPT, PARAMS, TOTALS, check, check_kept, entries, loaded
from e2e.processes import children
from wired import Side

__all__ = ["N_PROMPT", "PARAMS"]

# three ways in


def test_what_was_sent_once_is_not_sent_again(kept, smollm2, tokens, expected, head_cache):
    check_kept(kept)
    again = loaded(kept.endpoints, smollm2, tokens)
    check(again, expected, cache=TOTALS)
    assert len(list(head_cache.glob("digests/*.digests"))) == 1
    kept.settle()
    assert Store(kept.caches[0]).entries()


_HEAD = """
import json, sys
import caravan
from caravan import engine
from caravan.llm import Model, ModelParams
path, *endpoints = sys.argv[1:]
def counters():
    lines = open("/proc/self/io").read().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}
engine.load()
with caravan.connect(endpoints) as cluster:
    before = counters()
    loads = []
    model = Model(path, ModelParams(tensor_split=(1, 2)), devices=cluster.devices,
                  on_load=loads.append)
    after = counters()
    streams = [device.link.stream for device in cluster.devices]
    print(json.dumps({
        "read": after["rchar"] - before["rchar"],
        "disk": after["read_bytes"] - before["read_bytes"],
        "sent": sum(stream.bytes_sent for stream in streams),
        "received": sum(stream.bytes_received for stream in streams),
        "network": [load.network for load in loads[-1]],
    }))
    model.close()
"""


def test_a_second_load_reads_and_sends_next_to_nothing(kept, smollm2, tokens):
    loaded(kept.endpoints, smollm2, tokens)  # the digests are known from here on
    kept.settle()
    words = [sys.executable, "-c", _HEAD, str(smollm2), *kept.endpoints]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["network"] == [0, 0]
    assert found["sent"] + found["received"] < sum(TOTALS) / 100
    # the header, a few times: of a model of this size it is more than one part of a hundred
    header = min(span.offset for span in read_tensors(smollm2).values())
    assert found["read"] < 4 * header + MB
    assert found["disk"] < 4 * header + MB


def test_a_worker_that_has_the_file_reads_its_own(pair, smollm2, tokens, expected):
    (pair.shelf / "deep").mkdir()
    shutil.copyfile(smollm2, pair.shelf / "deep" / "another name.gguf")
    check(loaded(pair.endpoints, smollm2, tokens), expected, disk=TOTALS)
    pair.settle()
    assert entries(pair.caches[0]) == []


def test_a_file_of_the_same_names_is_not_the_same_model(pair, smollm2, tokens, expected):
    other = pair.shelf / smollm2.name
    shutil.copyfile(smollm2, other)
    spans = read_tensors(smollm2)
    same = spans["blk.7.ffn_up.weight"]
    with other.open("r+b") as file:
        for span in spans.values():
            if span != same:
                file.seek(span.offset)
                byte = file.read(1)
                file.seek(span.offset)
                file.write(bytes([byte[0] ^ 1]))
    outcome = loaded(pair.endpoints, smollm2, tokens)
    assert np.array_equal(outcome.logits, expected)
    assert sum(load.disk for load in outcome.loads) in (0, same.size)
    assert sum(load.disk + load.network for load in outcome.loads) == sum(TOTALS)


def test_each_device_has_its_own_sources(kept, smollm2, tokens, expected):
    shutil.rmtree(kept.caches[0])
    outcome = loaded(kept.endpoints, smollm2, tokens)
    check(outcome, expected, cache=(0, TOTALS[1]), network=(TOTALS[0], 0))


# a cache that is wrong


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def shorter(data: bytes) -> bytes:
    return data[:-1]


def emptied(data: bytes) -> bytes:
    return b""


def test_damaged_entries_are_not_used_and_are_replaced(kept, smollm2, tokens, expected):
    victims = [entries(cache)[3:6] for cache in kept.caches]
    sizes = [[path.stat().st_size for path in paths] for paths in victims]
    for paths in victims:
        for path, damage in zip(paths, (flipped, shorter, emptied), strict=True):
            status, data = path.stat(), path.read_bytes()
            # others have a link to it
            path.unlink()
            path.write_bytes(damage(data))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    outcome = loaded(kept.endpoints, smollm2, tokens)
    assert np.array_equal(outcome.logits, expected)
    # one content may belong to several tensors, as norms' often does
    for load, lost in zip(outcome.loads, sizes, strict=True):
        assert load.network >= sum(lost)
        assert load.cache >= load.total - 4 * sum(lost)
    kept.settle()
    for paths, lost in zip(victims, sizes, strict=True):
        assert [path.stat().st_size for path in paths] == lost
    check_kept(kept)


@contextmanager
def nearly_full(worker: caravan.Worker) -> Iterator[None]:
    """As a disk on which no file gets bigger than so much."""
    _, most = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)
    limit_files(worker, 100_000, most)
    try:
        yield
    finally:
        limit_files(worker, most, most)


def limit_files(worker: caravan.Worker, size: int, most: int) -> None:
    for pid in (worker.pid, *children(worker.pid)):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, most))


def test_a_full_disk_costs_a_warning(pair, smollm2, tokens, expected):
    with nearly_full(pair.workers[0]):
        outcome = loaded(pair.endpoints, smollm2, tokens)
        check(outcome, expected, network=TOTALS)
        pair.settle()
    told = [line for line in pair.workers[0].messages() if "cannot save" in line]
    assert len(told) == 1
    assert "saves no more" in told[0]
    assert not [line for line in pair.workers[1].messages() if "cannot save" in line]
    assert not list(pair.caches[0].rglob("*.part"))
    assert sum(path.stat().st_size for path in entries(pair.caches[1])) > TOTALS[1] / 2
    # and the next one finds what there is
    again = loaded(pair.endpoints, smollm2, tokens)
    assert np.array_equal(again.logits, expected)
    assert again.loads[1].cache > 0


def test_two_heads_fill_the_same_cache(pair, smollm2, tokens, expected):
    sides = [Side(lambda: loaded(pair.endpoints, smollm2, tokens)) for _ in range(2)]
    for side in sides:
        outcome = side.join()
        assert np.array_equal(outcome.logits, expected)
        assert [load.done for load in outcome.loads] == list(TOTALS)
    check_kept(pair)


# workers that have nothing, or know of nothing


def test_workers_without_cache_and_models(smollm2, tokens, expected, head_cache):
    with caravan.LocalWorkers(2, threads=1) as workers:
        check(loaded(workers.endpoints, smollm2, tokens), expected, network=TOTALS)
    assert not head_cache.exists()


def test_the_base_protocol(kept, smollm2, tokens, expected):
    outcome = loaded(kept.endpoints, smollm2, tokens, extension=False)
    check(outcome, expected, network=TOTALS)


def test_one_worker_of_each_kind(kept, smollm2, tokens, expected):
    with caravan.Worker("CPU:1", options=("--no-extension",)) as base:
        outcome = loaded([base.endpoint, kept.endpoints[1]], smollm2, tokens)
    check(outcome, expected, network=(TOTALS[0], 0), cache=(0, TOTALS[1]))
