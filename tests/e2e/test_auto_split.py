"""Splits by time, from the command's option to the layers on the devices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import caravan
from caravan.cli.main import main
from caravan.llm import ContextParams, Model
from caravan.models.fake import FakeModel
from caravan.plan.auto import AutoSplit
from caravan.plan.job import Job

LAYERS = 12
# the second is three times as fast, and a graph costs nothing
PAIR = "sim:GFLOPS=20,GBPS=10,sim:GFLOPS=60,GBPS=30"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("auto split") / "m.gguf"
    model = FakeModel(layers=LAYERS, embd=256, heads=4, kv_heads=2, ff=512, vocab=300, ctx=2048)
    model.write(file)
    return file


@pytest.fixture(scope="module")
def worker() -> Iterator[caravan.Worker]:
    with caravan.Worker(PAIR) as started:
        yield started


def test_the_faster_device_gets_more_layers(path, worker):
    lines: list[str] = []
    splitter = AutoSplit((Job(2048, 0),), lines.append)
    with (
        caravan.connect([worker.endpoint]) as cluster,
        Model(
            path,
            devices=cluster.devices,
            context=ContextParams(n_ctx=2048, n_ubatch=128),
            splitter=splitter,
        ) as model,
    ):
        slow, fast = model.shares
        assert slow + fast == LAYERS + 1
        assert 2 <= slow <= 4
        assert model.layer_devices().count("RPC0") == slow
    assert lines[-1].startswith(f"split {slow:.0f}/{fast:.0f} by time: RPC1 is ")
    assert "times as fast as RPC0" in lines[-1]


def test_run_tells_what_it_chose(path, worker, capsys):
    words = ["run", "-m", str(path), "--rpc", worker.endpoint, "-p", "Hello", "-n", "3"]
    assert main(words) == 0
    first = capsys.readouterr().err.splitlines()
    assert [line for line in first if line.startswith("caravan: split ") and " by time: " in line]
    for more, layers in (
        (["--split", "even"], "layers 0-5"),
        (["--split", "memory"], "layers 0-5"),
        (["-ts", "3/10"], "layers 0-2"),
    ):
        assert main([*words, *more]) == 0
        told = capsys.readouterr().err
        assert " by time: " not in told
        assert f"RPC0 ({worker.endpoint}): {layers};" in told
    assert main([*words, "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_bench_has_one_split_for_all_its_tests_and_tells_it_on_stderr(path, worker, capsys):
    words = ["bench", "-m", str(path), "--rpc", worker.endpoint, "-p", "64,256", "-n", "4"]
    words += ["-r", "1", "-o", "jsonl", "-ub", "64"]
    assert main(words) == 0
    told = capsys.readouterr()
    assert [json.loads(line)["tensor_split"] for line in told.out.splitlines()] == ["0.00"] * 3
    assert sum(" by time: " in line for line in told.err.splitlines()) == 1
    assert main([*words, "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*words, "-dev", "RPC1"]) == 0
    assert "split" not in capsys.readouterr().err
