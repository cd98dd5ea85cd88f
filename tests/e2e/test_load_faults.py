"""Files, workers and people that do not wait for the end of a load.

A relay holds what it is given after some megabytes, so that all happens in the middle.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import caravan
from caravan.errors import ModelError, WorkerLost
from caravan.llm import Model
from caravan.llm.loading import DeviceLoad, Loading
from caravan.llm.weights import WeightFiles
from e2e.loads import MB, N_PROMPT, PARAMS, THIRDS, TOTALS, logits, resident
from e2e.processes import alive, kill, running, wait_for
from held_link import HeldLink
from wired import PATIENCE, Side

__all__ = ["N_PROMPT", "PARAMS"]

# files that change under a load


@pytest.fixture
def copy(smollm2, tmp_path) -> Path:
    return Path(shutil.copyfile(smollm2, tmp_path / "m.gguf"))


def cut_off(path: Path) -> None:
    os.truncate(path, 20 * MB)


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"GGUF and so on")
    other.rename(path)


@pytest.mark.parametrize("change", [cut_off, touched, replaced])
def test_a_file_that_changes_while_it_is_loaded(pair, copy, change, head_cache):
    with (
        HeldLink(pair.endpoints[0], 5 * MB) as link,
        caravan.connect([link.endpoint, pair.endpoints[1]]) as cluster,
    ):
        side = Side(lambda: Model(copy, devices=cluster.devices))
        wait_for(lambda: link.held)
        change(copy)
        link.release()
        with pytest.raises(ModelError, match=r"m\.gguf (became shorter|was changed) while it was"):
            side.join()
    assert not list(head_cache.glob("digests/*.digests"))


# workers that go, and people who do not wait


def test_a_worker_that_is_killed_while_it_is_loaded(pair, smollm2):
    victim, other = pair.sessions()
    with (
        HeldLink(pair.endpoints[0], 5 * MB) as link,
        caravan.connect([link.endpoint, pair.endpoints[1]]) as cluster,
    ):
        loads: list[Sequence[DeviceLoad]] = []
        side = Side(lambda: Model(smollm2, THIRDS, devices=cluster.devices, on_load=loads.append))
        wait_for(lambda: link.held and loads and loads[-1][1].done == TOTALS[1])
        assert resident(other) > TOTALS[1]
        kill(victim)
        with pytest.raises(WorkerLost, match="lost RPC0"):
            side.join()
        wait_for(lambda: resident(other) < TOTALS[1] / 2)


def test_ctrl_c_while_it_loads(pair, smollm2):
    held, free = pair.sessions()
    with HeldLink(pair.endpoints[0], 5 * MB) as link:
        endpoints = f"{link.endpoint},{pair.endpoints[1]}"
        words = ("run", "-q", "-m", str(smollm2), "-p", "x", "--split=memory")
        with running(*words, "--rpc", endpoints) as run:
            wait_for(lambda: link.held)
            wait_for(lambda: resident(free) > TOTALS[1] / 2)
            run.interrupt()
            assert run.finish() == 130, run.lines
            assert [line for line in run.lines if line] == ["caravan: interrupted"]
            assert run.text == ""
            # while the link holds what it has
            wait_for(lambda: not alive(free))
            link.release()
            wait_for(lambda: not alive(held))
    pair.settle()


def test_a_head_that_is_killed_while_it_loads(pair, smollm2):
    with HeldLink(pair.endpoints[0], 5 * MB) as link:
        endpoints = f"{link.endpoint},{pair.endpoints[1]}"
        words = ("run", "-q", "-m", str(smollm2), "-p", "x", "--split=memory")
        with running(*words, "--rpc", endpoints) as run:
            wait_for(lambda: link.held)
            kill(run.process.pid)
            run.finish()
    pair.settle()


def says_no(held: bool) -> bool:
    return not held


def presses_ctrl_c(held: bool) -> bool:
    if held:
        signal.raise_signal(signal.SIGINT)
    return True


def fails(held: bool) -> bool:
    if held:
        raise LookupError("mine")
    return True


@pytest.mark.parametrize(
    ("how", "error"),
    [(says_no, ModelError), (presses_ctrl_c, KeyboardInterrupt), (fails, LookupError)],
)
def test_stopped_by_its_caller(pair, smollm2, tokens, expected, how, error):
    """The devices are as good as before."""
    with (
        HeldLink(pair.endpoints[0], 5 * MB) as link,
        caravan.connect([link.endpoint, pair.endpoints[1]]) as cluster,
    ):
        with pytest.raises(error):
            Model(smollm2, devices=cluster.devices, progress=lambda fraction: how(link.held))
        link.release()
        with Model(smollm2, THIRDS, devices=cluster.devices) as model:
            assert np.array_equal(logits(model, tokens), expected)


def test_stopped_while_the_engine_is_still_at_it(pair, smollm2, tokens, expected, monkeypatch):
    """It frees the weights' memory, and only then says that it has stopped."""
    reading, freed = threading.Event(), threading.Event()
    read_into, close = WeightFiles.read_into, Loading.close

    def read_late(files: WeightFiles, file: int, offset: int, target: memoryview) -> None:
        reading.set()
        assert freed.wait(PATIENCE)
        read_into(files, file, offset, target)

    def close_late(loading: Loading) -> None:
        freed.set()
        wait_for(lambda: all(delivery.done for delivery in loading._deliveries.values()))
        close(loading)

    calls = iter(range(100))
    with caravan.connect(pair.endpoints) as cluster:
        with monkeypatch.context() as patch, pytest.raises(ModelError, match="was stopped"):
            patch.setattr(WeightFiles, "read_into", read_late)
            patch.setattr(Loading, "close", close_late)
            Model(
                smollm2,
                devices=cluster.devices,
                progress=lambda _: next(calls, None) is not None or not reading.wait(PATIENCE),
            )
        with Model(smollm2, THIRDS, devices=cluster.devices) as model:
            assert np.array_equal(logits(model, tokens), expected)
