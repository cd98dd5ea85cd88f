"""A whole run over fakes: what is started, printed, ended, and in which order."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from bench.fakes import CORES, FakeModel, FakeRig, grid_of
from caravan.bench.plan import Case
from caravan.bench.run import RunSettings
from caravan.bench.session import Settings, bench, list_devices, threads_of_workers
from caravan.errors import ModelError, UsageError, WorkerLost

QUICK = RunSettings(repetitions=1, warmup=False)


class Session:
    """One run and what came of it."""

    def __init__(self, rig: FakeRig | None = None) -> None:
        self.rig = rig or FakeRig()
        self.out, self.err = io.StringIO(), io.StringIO()

    def run(self, settings: Settings, **given: str) -> None:
        options = {"n_prompt": "4", "n_gen": "2", **given}
        bench(
            grid_of(**options),
            settings,
            self.rig.open,
            lambda name: Path("/models") / name,
            out=self.out,
            err=self.err,
        )


def test_seed_command_runs_one_device_then_two() -> None:
    session = Session()
    session.run(
        Settings(run=QUICK, output="jsonl", math_cores=CORES),
        model="m.gguf",
        devices="RPC0,RPC0/RPC1",
        tensor_split="1/1",
        split_mode="layer",
        n_gen="0",
    )
    rows = [json.loads(line) for line in session.out.getvalue().splitlines()]
    assert [row["devices"] for row in rows] == ["RPC0", "RPC0/RPC1"]
    assert rows[0]["model_filename"] == "/models/m.gguf"
    assert [line for line in session.rig.log if "load" in line or "close" in line] == [
        "load /models/m.gguf RPC0", "close context", "close model",
        "load /models/m.gguf RPC0/RPC1", "close context", "close model", "close",
    ]  # fmt: skip


def test_more_shares_than_devices_are_refused_before_anything_is_printed() -> None:
    session = Session()
    with pytest.raises(UsageError, match=r"1\.00/1\.00/1\.00 has more shares than devices \(2\)"):
        session.run(Settings(run=QUICK), devices="RPC0,RPC0/RPC1", tensor_split="1/1/1")
    with pytest.raises(UsageError, match=r"devices \(0\)"):
        session.run(Settings(run=QUICK), devices="none", tensor_split="1")
    assert session.out.getvalue() == ""
    session.run(Settings(run=QUICK), devices="none", tensor_split="0")


@pytest.mark.parametrize("output", ["md", "csv", "json", "sql"])
def test_a_model_that_cannot_be_loaded_leaves_no_headings(output: str) -> None:
    session = Session()

    def refuse(case: Case) -> FakeModel:
        raise ModelError("cut off")

    session.rig.load = refuse  # type: ignore[method-assign]
    with pytest.raises(ModelError):
        session.run(Settings(run=QUICK, output=output, output_err=output))
    assert (session.out.getvalue(), session.err.getvalue()) == ("", "")


def test_headings_are_there_before_the_first_test_is_done() -> None:
    session = Session()
    seen: list[str] = []
    session.rig.on_decode = lambda: seen.append(session.out.getvalue())
    session.run(Settings(run=QUICK, math_cores=CORES))
    assert seen[0].startswith("| model ")
    assert session.out.getvalue().count("| model ") == 1


def test_a_second_copy_goes_to_stderr() -> None:
    session = Session()
    session.run(Settings(run=QUICK, output="csv", output_err="md", math_cores=CORES))
    assert session.out.getvalue().count("\n") == 3
    assert session.err.getvalue().startswith("| model ")
    assert session.err.getvalue().endswith("\nbuild: caravan 0.1.0, ggml 0.26.0 (3)\n")


def test_progress_goes_to_stderr_with_llama_benchs_words() -> None:
    session = Session()
    session.run(Settings(run=QUICK, output="none", progress=True, math_cores=CORES))
    assert session.out.getvalue() == ""
    assert session.err.getvalue().splitlines() == [
        "llama-bench: benchmark 1/2: starting",
        "llama-bench: benchmark 1/2: prompt run 1/1",
        "llama-bench: benchmark 2/2: starting",
        "llama-bench: benchmark 2/2: generation run 1/1",
    ]


def test_nothing_is_started_for_a_model_that_is_not_there() -> None:
    rig = FakeRig()

    def missing(name: str) -> Path:
        raise ModelError(f"no model file {name}")

    with pytest.raises(ModelError):
        bench(grid_of(), Settings(), rig.open, missing, out=io.StringIO(), err=io.StringIO())
    assert rig.log == []


def test_an_unknown_device_is_refused_before_anything_is_printed() -> None:
    session = Session()
    with pytest.raises(UsageError, match="RPC7"):
        session.run(Settings(run=QUICK), devices="RPC0,RPC7")
    assert session.out.getvalue() == ""
    assert session.rig.log == ["open", "close"]


@pytest.mark.parametrize(
    "failure", [KeyboardInterrupt(), WorkerLost("a:1", "RPC0", "GRAPH_COMPUTE", OSError("gone"))]
)
def test_a_failure_keeps_what_was_measured_and_ends_everything(failure: BaseException) -> None:
    session = Session()
    calls = iter(range(100))

    def fail_later() -> None:
        if next(calls) == 1:
            raise failure

    session.rig.on_decode = fail_later
    with pytest.raises(type(failure)):
        session.run(Settings(run=QUICK, output="json", math_cores=CORES))
    assert [row["n_prompt"] for row in json.loads(session.out.getvalue())] == [4]
    assert session.rig.log[-3:] == ["close context", "close model", "close"]


def test_no_test_is_an_empty_table() -> None:
    session = Session()
    session.run(Settings(run=QUICK, math_cores=CORES), n_prompt="0", n_gen="0")
    assert len(session.out.getvalue().splitlines()) == 4


def test_list_devices() -> None:
    session = Session()
    list_devices(Settings(), session.rig.open, out=session.out)
    assert session.out.getvalue().splitlines()[1] == "  RPC0: Some CPU at a:1 (7 MiB, 3 MiB free)"


def test_threads_of_workers() -> None:
    assert threads_of_workers(0, (), 8) is None
    assert threads_of_workers(0, (3, 4), 8) is None
    assert threads_of_workers(2, (3,), 8) == 3
    assert threads_of_workers(3, (), 8) == 2
    assert threads_of_workers(4, (), 2) == 1
    with pytest.raises(UsageError):
        threads_of_workers(2, (1, 2), 8)
