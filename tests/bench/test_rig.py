"""The command as a process of its own: the real engine, the sample model, real workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from caravan.backend import RemoteDevice
from caravan.bench.rig import open_rig
from caravan.bench.session import Settings
from caravan.errors import DownloadError
from caravan.models import resolve
from leaks import running

COMMAND = (sys.executable, "-m", "caravan", "bench")
SMALL = ("-p", "24", "-n", "2", "-r", "2", "-ub", "8")


@pytest.fixture(scope="module")
def model() -> str:
    try:
        return str(resolve("smollm2"))
    except DownloadError as exc:
        pytest.skip(f"the sample model is needed: {exc}")


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.endswith("_RPC")}
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=120, env=env, check=False
    )


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_on_the_cpu(model: str) -> None:
    done = bench("-m", model, *SMALL, "-pg", "8,2", "-d", "8", "-o", "jsonl", "-oe", "md")
    found = rows(done)
    assert [(row["n_prompt"], row["n_gen"]) for row in found] == [(24, 0), (0, 2), (8, 2)]
    first = found[0]
    assert first["backends"] == "CPU"
    assert first["cpu_info"]
    assert str(first["model_type"]).startswith("llama")
    assert first["model_n_params"] == 134_515_008
    assert str(first["build_commit"]).startswith("caravan ")
    assert all(row["avg_ts"] > 0 for row in found)  # type: ignore[operator]
    assert "| backend    | threads | n_ubatch |" in done.stderr


def test_over_local_workers(model: str) -> None:
    words = ("--local-workers", "2", "-dev", "RPC0,RPC0/RPC1,none", "-ts", "1/1", "-t", "1")
    words = (*words, "--wire-dtype", "f16")
    found = rows(
        bench("-m", model, *words, "-p", "24", "-n", "0", "-d", "8", "-r", "2", "-o", "jsonl")
    )
    assert [row["devices"] for row in found] == ["RPC0", "RPC0/RPC1", "none"]
    assert found[0]["backends"] == "RPC"
    assert len(str(found[0]["gpu_info"]).split(", 127.0.0.1:")) == 2
    assert (found[0]["local_workers"], found[0]["worker_threads"]) == (2, 1)
    assert found[0]["wire_dtype"] == "f16"


def test_local_devices_are_used_again_by_the_next_configuration(model: str) -> None:
    sets = "local:CPU:1,RPC0/local:CPU:1,local:CPU:1/local:CPU:1"
    words = ("-dev", sets, "--local-workers=1", "-t", "1", "--no-direct-copies", "--split=memory")
    found = rows(bench("-m", model, *words, "-p", "16", "-n", "2", "-r", "1", "-o", "jsonl"))
    assert [row["devices"] for row in found[::2]] == sets.split(",")
    assert found[0]["backends"] == "RPC"
    assert str(found[0]["gpu_info"]).startswith("127.0.0.1:")
    assert (found[0]["local_workers"], found[0]["worker_threads"]) == (1, 1)
    assert found[0]["direct_copies"] is False


@pytest.mark.parametrize("direct", [True, False])
def test_copies_between_local_devices(direct: bool, scratch: Path) -> None:
    settings = Settings(local_devices=("local:CPU:1",) * 2, direct_copies=direct)
    with open_rig(settings) as rig:
        one, two = rig.inventory.pick(("local:CPU:1",) * 2)
        assert isinstance(one, RemoteDevice) and isinstance(two, RemoteDevice)
        assert one.route_to(two).settle().value == ("direct" if direct else "relay")
        assert rig.host.direct_copies is direct
    assert list(scratch.iterdir()) == []


def test_list_devices_of_local_workers() -> None:
    done = bench("--local-workers", "1", "--list-devices")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Available devices:\n  RPC0: ")
    assert " at 127.0.0.1:" in done.stdout


def test_ctrl_c_ends_with_130_and_leaves_no_worker(model: str, scratch: Path) -> None:
    words = ("-p", "64", "-n", "0", "-r", "10000", "-t", "1", "--local-workers", "1")
    words = (*words, "-dev", "RPC0/local:CPU:1", "--split=memory")
    process = subprocess.Popen(
        [*COMMAND, "-m", model, *words, "--progress", "-o", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "prompt run 3/" in line:
                break
        workers = [
            int(pid)
            for task in Path(f"/proc/{process.pid}/task").glob("*/children")
            for pid in task.read_text().split()
        ]
        assert len(workers) == 2
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "caravan: interrupted"
    assert json.loads(out) == []
    assert not any(running(pid) for pid in workers)
    assert list(scratch.iterdir()) == []


def test_failures_are_one_line(model: str, tmp_path: Path) -> None:
    noise = tmp_path / "noise.gguf"
    noise.write_bytes(b"no model at all")
    half = tmp_path / "half.gguf"
    half.write_bytes(Path(model).read_bytes()[:10_000])
    for words, code in (
        (("-m", str(noise)), 1),
        (("-m", str(half)), 1),
        (("-m", model, "-rpc", "127.0.0.1:1"), 1),
        (("-m", model, "-ot", "blk=Nowhere"), 2),
        (("-m", model, "-dev", "RPC0"), 2),
    ):
        done = bench(*words)
        assert done.returncode == code, done.stderr
        assert done.stderr.startswith("caravan: error: ")
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""
