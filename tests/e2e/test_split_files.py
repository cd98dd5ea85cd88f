"""A model in several files is the model in one: the same numbers, from any of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import caravan
from caravan.errors import ModelError
from caravan.llm import Context, ContextParams, DeviceLoad, Model
from e2e.processes import assert_one_line
from e2e.processes import caravan as command
from splitting import split_model

PARAMS = ContextParams(n_ctx=64, n_ubatch=16)
N_PROMPT = 40


@pytest.fixture(scope="module")
def files(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return split_model(smollm2, tmp_path_factory.mktemp("split") / "m", 3)


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("empty_first", [False, True])
def test_two_workers_compute_what_the_engine_computes_from_one_file(
    smollm2, tmp_path, tokens, expected, number, empty_first
):
    files = split_model(smollm2, tmp_path / "m", 3, empty_first=empty_first)
    with (
        caravan.LocalWorkers(2, threads=1) as workers,
        caravan.connect(workers.endpoints) as cluster,
        Model(files[number], devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        assert (model.path, model.parts) == (files[0], tuple(files))
        assert len(set(model.layer_devices())) == 2
        context.decode(tokens)
        assert np.array_equal(context.logits(), expected)


def test_a_model_with_a_missing_part_is_refused_before_anything_starts(files, tmp_path):
    alone = tmp_path / files[0].name
    alone.write_bytes(files[0].read_bytes())
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf, m-00003-of-00003\.gguf$"):
        Model(alone)
    for words in (("run", "-p", "x"), ("bench", "-p", "1", "-n", "0")):
        done = command(*words, "-m", str(alone), "--local-workers=2", "--split=memory")
        assert_one_line(done, "m-00002-of-00003.gguf, m-00003-of-00003.gguf")


def test_run_and_bench_take_any_part(files):
    done = command("run", "-m", str(files[1]), "-p", "Once", "-n", "2", "--temp", "0")
    assert done.returncode == 0, done.stderr
    words = ("bench", "-m", str(files[2]), "-p", "8", "-n", "0", "-r", "1", "-o", "json")
    done = command(*words)
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(done.stdout)
    assert record["model_filename"] == str(files[0])
    assert record["model_n_params"] == 134_515_008


def sources(load: Sequence[DeviceLoad]) -> tuple[int, int, int]:
    """Bytes from files of the workers, from their caches, and from here."""
    found = [(device.disk, device.cache, device.network) for device in load]
    disk, cache, network = map(sum, zip(*found, strict=True))
    return disk, cache, network


def load(path: Path, worker: caravan.Worker) -> tuple[int, int, int]:
    states: list[Sequence[DeviceLoad]] = []
    with (
        caravan.connect([worker.endpoint]) as cluster,
        Model(path, devices=cluster.devices, on_load=states.append) as model,
    ):
        assert model.n_params == 134_515_008
        return sources(states[-1])


@pytest.mark.parametrize("here", ["whole", "split"])
def test_a_worker_reads_its_own_files_however_they_are_cut(
    smollm2, files, tmp_path, monkeypatch, here
):
    """What a tensor holds decides, not in which file it lies."""
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path / "cache"))
    there = tmp_path / "models" / "deep"
    there.mkdir(parents=True)
    for path in files if here == "whole" else [smollm2]:
        (there / path.name).write_bytes(path.read_bytes())
    options = ("--no-cache", "--model-dir", str(tmp_path / "models"))
    with caravan.Worker("CPU:1", options=options) as worker:
        disk, cache, network = load(smollm2 if here == "whole" else files[0], worker)
    assert cache == 0
    assert disk > 90e6
    assert network == 0


def test_weights_of_all_parts_are_kept(files, tmp_path, monkeypatch):
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path / "cache"))
    options = ("--cache", str(tmp_path / "kept"))
    with caravan.Worker("CPU:1", options=options) as worker:
        first = load(files[0], worker)
        second = load(files[2], worker)
    assert first[:2] == (0, 0)
    assert second == (0, first[2], 0)
