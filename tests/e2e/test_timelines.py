"""A measured prompt over two workers, as it looks in its timeline and in its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.processes import caravan, running, wait_for
from pictures import Event, check, on_track

N_UBATCHES = 6
BENCH = ("bench", "--local-workers", "2", "-t", "1", "-ts", "1/1", "-n", "0")


def read(path: Path) -> Event:
    found: Event = json.loads(path.read_text())
    check(found)
    return found


@pytest.mark.parametrize("output", ["md", "jsonl"])
def test_a_bench_with_all(smollm2: Path, tmp_path: Path, output: str) -> None:
    path = tmp_path / "t.json"
    words = ("-m", str(smollm2), "-p", str(16 * N_UBATCHES), "-ub", "16", "-r", "2", "-o", output)
    done = caravan(*BENCH, *words, "--utilization", "--trace", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    # a warm-up and two repetitions
    found = read(path)
    for device in ("RPC0", "RPC1"):
        graphs = [span for span in on_track(found, device) if "ubatch" in span["args"]]
        assert [span["args"]["ubatch"] for span in graphs] == [*range(N_UBATCHES)] * 3
    if output == "jsonl":
        (row,) = [json.loads(line) for line in done.stdout.splitlines()]
        assert [use["device"] for use in row["utilization"]] == ["RPC0", "RPC1"]
        for use in row["utilization"]:
            shares = [use[name] for name in ("computing", "waiting", "sending", "idle")]
            assert min(shares) >= 0
            assert sum(shares) == pytest.approx(1, abs=0.001)
            assert shares[0] > 0.2
            assert use["graphs"] == N_UBATCHES
    else:
        table = done.stdout.split("utilization: ")[1]
        assert [line.split()[5] for line in table.splitlines()[4:6]] == ["RPC0", "RPC1"]
        assert all(len(line) <= 80 for line in table.splitlines())


def test_ctrl_c_leaves_a_whole_file(smollm2: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    words = ("-m", str(smollm2), "-p", "64", "-r", "10000", "-o", "none", "--progress")
    with running(*BENCH, *words, "--trace", str(path)) as bench:
        wait_for(lambda: bench.says("prompt run 3/"))
        assert not path.exists()
        bench.interrupt()
        assert bench.finish() == 130
    assert len(on_track(read(path), "RPC1")) > 3
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]
