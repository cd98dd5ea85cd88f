"""A load apart from the engine gives what the engine would have loaded, whatever it is asked for
and wherever it runs."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import caravan
from caravan.engine.skeleton import Skeleton
from caravan.errors import ModelError
from caravan.llm import Model, ModelParams
from caravan.llm.loading import DeviceLoad
from e2e.loads import MB, N_PROMPT, PARAMS, THIRDS, TOTALS, Pair, logits
from e2e.processes import descriptors, wait_for
from wired import Side

__all__ = ["N_PROMPT", "PARAMS"]


@pytest.fixture(scope="module")
def cluster(keepers: Pair, smollm2: Path) -> Iterator[caravan.Cluster]:
    """Of workers that have the model's file."""
    (keepers.shelf / "m.gguf").symlink_to(smollm2)
    with caravan.connect(keepers.endpoints) as cluster:
        yield cluster


def load(cluster: caravan.Cluster, path: Path, params: ModelParams = THIRDS, **options) -> Model:
    return Model(path, params, devices=cluster.devices, **options)


def check(cluster: caravan.Cluster, path: Path, tokens: list[int], expected: np.ndarray) -> None:
    """It loads, all of it from the workers' disks, and leaves no file open."""
    before = descriptors(os.getpid())
    loads: list[Sequence[DeviceLoad]] = []
    with load(cluster, path, on_load=loads.append) as model:
        assert np.array_equal(logits(model, tokens), expected)
    assert [found.disk for found in loads[-1]] == list(TOTALS)
    wait_for(lambda: descriptors(os.getpid()) == before)


WAYS = {
    "some layers": ModelParams(n_gpu_layers=10, repack=False),
    "no layer": ModelParams(n_gpu_layers=0, repack=False),
    "overrides": ModelParams(overrides=((r"blk\.\d\.ffn", "CPU"),), repack=False),
    "one device": ModelParams(tensor_split=(1, 0), repack=False),
    "main_gpu": ModelParams(split_mode="none", main_gpu=1, repack=False),
    "lazy": ModelParams(lazy_mode="on", repack=False),
    "mmap": ModelParams(load_mode="mmap", repack=False),
    # what the engine does itself
    "read": ModelParams(load_mode="none", repack=False),
    "dio": ModelParams(load_mode="dio", repack=False),
    "check_tensors": ModelParams(check_tensors=True, repack=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_engines_numbers(cluster, smollm2, tokens, expected, way, head_cache):
    with load(cluster, smollm2, WAYS[way]) as model:
        assert np.array_equal(logits(model, tokens), expected)


def test_the_stand_in_takes_no_memory_even_if_no_device_gets_anything(
    cluster, smollm2, monkeypatch
):
    sizes = []
    whole = Skeleton.lay

    def lay(stand_ins: Skeleton) -> bool:
        sizes.extend(os.stat(name).st_blocks * 512 for name in stand_ins.names)
        return whole(stand_ins)

    monkeypatch.setattr(Skeleton, "lay", lay)
    load(cluster, smollm2, ModelParams(n_gpu_layers=0)).close()
    assert sizes
    assert max(sizes) < 4 * MB


def test_an_engine_that_maps_nothing(cluster, smollm2, tokens, expected, monkeypatch):
    monkeypatch.setattr(Skeleton, "lay", lambda stand_ins: False)
    check(cluster, smollm2, tokens, expected)


def test_a_system_without_stand_ins(cluster, smollm2, tokens, expected, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    check(cluster, smollm2, tokens, expected)


def test_stand_ins_that_cannot_be_made(cluster, smollm2, tokens, expected, monkeypatch):
    def fail(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "ftruncate", fail)
    check(cluster, smollm2, tokens, expected)


def test_no_load_leaves_a_file_open(cluster, smollm2, tokens, expected, head_cache):
    # the first one reads digests, too
    for _ in range(3):
        check(cluster, smollm2, tokens, expected)


def test_files_are_closed_when_a_load_fails(cluster, smollm2, monkeypatch):
    before = descriptors(os.getpid())

    def fail(*arguments: object) -> None:
        raise ModelError("mine")

    def stop(*arguments: object) -> bool:
        raise LookupError("mine")

    for kind, options in (
        (LookupError, {"progress": stop}),
        (LookupError, {"on_load": stop}),
        (ModelError, {"progress": lambda fraction: False}),
    ):
        with pytest.raises(kind):
            load(cluster, smollm2, **options)
    monkeypatch.setattr("caravan.llm.loader.Skeleton", fail)
    with pytest.raises(ModelError, match="mine"):
        load(cluster, smollm2)
    wait_for(lambda: descriptors(os.getpid()) == before)


def test_two_models_at_once(cluster, smollm2, tokens, expected, head_cache):
    """From the same file, onto the same devices: each load has its own tensors."""

    def one() -> np.ndarray:
        with load(cluster, smollm2) as model:
            return logits(model, tokens)

    for side in [Side(one) for _ in range(2)]:
        assert np.array_equal(side.join(), expected)
