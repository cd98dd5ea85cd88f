"""`caravan plan`, from the options to the table: over simulated workers and over described ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import caravan
from caravan.cli.main import main
from caravan.models.fake import FakeModel

PAIR = "sim:GFLOPS=40,GBPS=20,GIB=1,sim:GFLOPS=40,GBPS=20,GIB=1"
LAYERS = 8


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "m.gguf"
    model = FakeModel(layers=LAYERS, embd=256, heads=4, kv_heads=2, ff=512, vocab=300, ctx=2048)
    model.write(file)
    return file


@pytest.fixture(scope="module")
def worker() -> Iterator[caravan.Worker]:
    with caravan.Worker(PAIR) as started:
        yield started


def test_workers_are_measured_and_what_is_planned_is_run(path, worker, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    words = ["plan", "-m", str(path), "--rpc", worker.endpoint, "-p", "64,512", "-ub", "64"]
    assert main([*words, "-n", "8", "--verify", "-q"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("m.gguf: 8 layers and the output, a context of 768 tokens")
    assert any(line.startswith(("RPC0/RPC1  ", "RPC1/RPC0  ")) for line in lines)
    assert lines[-1].startswith("Error of all speeds: median ")
    assert sum("answer after 512" in line for line in lines) == 2


def test_json(path, worker, capsys):
    words = ["plan", "-m", str(path), "--rpc", worker.endpoint, "-p", "64", "--json", "-q"]
    assert main([*words, "--concurrency", "1,2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [device["endpoint"] for device in found["devices"]] == [worker.endpoint] * 2
    assert len(found["work"]["decode"]["layers"]) == LAYERS + 1
    assert all(layer["multiply_adds"] > 0 for layer in found["work"]["prompt"]["layers"][:-1])
    assert {speed["concurrency"] for speed in found["best"]["speeds"]} == {1, 2}
    assert found["context"]["n_ctx"] == 256


def test_a_described_cluster_needs_nobody(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "cluster.json"
    device = {"name": "big", "gflops": 100, "gbps": 50, "memory_gib": 0.02, "count": 3}
    file.write_text(json.dumps({"devices": [device], "link": "10GbE"}))
    words = ["plan", "-m", str(path), "--cluster", str(file)]
    assert main([*words, "-p", "256"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    # a context of which there is too much for all of them
    assert main([*words, "-p", "65536"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_what_is_no_cluster_is_wrong_usage(path, tmp_path, capsys):
    assert main(["plan", "-m", str(path), "--cluster", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
