"""The command line: which options there are, what they reach, and the exit codes."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from bench.fakes import FakeRig
from caravan.bench.options import OPTIONS
from caravan.cli.bench import command
from caravan.cli.main import main
from pictures import check

# Every option of llama-bench, read off its source.
LLAMA_BENCH_FLAGS = frozenset(
    """
-h --help --version --numa -r --repetitions --prio --delay -o --output -oe --output-err
--list-devices -v --verbose --progress --no-warmup -fitt --fit-target -fitc --fit-ctx -rpc --rpc
-m --model -hf -hfr --hf-repo -hff --hf-file -hft --hf-token --offline -p --n-prompt -n --n-gen -pg
-d --n-depth -b --batch-size -ub --ubatch-size -ctk --cache-type-k -ctv --cache-type-v -t --threads
-C --cpu-mask --cpu-strict --poll -ngl --n-gpu-layers -ncmoe --n-cpu-moe -sm --split-mode -mg
--main-gpu -nkvo --no-kv-offload -fa --flash-attn -dev --device -lm --load-mode -lzm --lazy-mode
-embd --embeddings -ts --tensor-split -ot --override-tensor -nopo --no-op-offload --no-host --repack
""".split()  # noqa: SIM905
)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> FakeRig:
    """The rig that the command uses, instead of the engine."""
    fake = FakeRig()
    module = types.ModuleType("caravan.bench.rig")
    module.open_rig = fake.open  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "caravan.bench.rig", module)
    monkeypatch.delenv("CARAVAN_RPC", raising=False)
    monkeypatch.delenv("LLAMA_ARG_RPC", raising=False)
    return fake


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(16))
    return str(path)


def endpoints(rig: FakeRig) -> tuple[str, ...]:
    assert rig.settings is not None
    return rig.settings.endpoints


def test_all_options_of_llama_bench_are_there() -> None:
    flags = {flag for param in command.params for flag in param.opts}
    flags.update(command.context_settings["help_option_names"])
    assert flags >= LLAMA_BENCH_FLAGS
    ours = {"--local-workers", "--no-direct-copies", "--timeout", "--trace", "--utilization"}
    ours |= {"--wire-dtype", "--fit", "--split", "--quiet"}
    ours |= {"--token-file", "--tls-ca", "--tls-cert", "--tls-key"}
    assert flags - LLAMA_BENCH_FLAGS == ours


def test_seed_command(rig: FakeRig, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "bench -rpc localhost:9090,localhost:9091 -m MODEL --split-mode layer --tensor-split 1/1"
        " -ngl 99 --ubatch-size 256 --batch-size 2048 --device RPC0,RPC0/RPC1 -p 4096 -n 0 -r 3"
        " -o json"
    )
    assert main([word.replace("MODEL", model) for word in line.split()]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["devices"], row["n_ubatch"], row["n_gpu_layers"]) for row in rows] == [
        ("RPC0", 256, 99),
        ("RPC0/RPC1", 256, 99),
    ]
    assert [len(row["samples_ns"]) for row in rows] == [3, 3]
    assert rows[0]["tensor_split"] == "1.00/1.00"
    assert endpoints(rig) == ("localhost:9090", "localhost:9091")


def test_underscores_and_equals(rig: FakeRig, model: str) -> None:
    words = ["--n_prompt=4", "--n_gen", "0", "--no_warmup", "--local_workers=2", "-t", "3"]
    assert main(["bench", "-m", model, "--output", "none", *words]) == 0
    assert rig.settings is not None
    assert (rig.settings.local_workers, rig.settings.worker_threads) == (2, 3)
    assert rig.log.count("decode 4") == 5


@pytest.mark.parametrize(
    ("words", "devices", "threads"),
    [
        (["-dev", "local:CPU:1/RPC0,local:CPU:1/local:CPU:1"], ("local:CPU:1",) * 2, None),
        (["-dev", "local:CPU/RPC0", "-t", "3"], ("local:CPU",), 3),
        (["-dev", "local:CPU:1", "-t", "1,2"], ("local:CPU:1",), None),
        (["-dev", "local:CPU,RPC0", "--local-workers", "1", "-t", "2"], ("local:CPU",), 2),
        (["-dev", "RPC0"], (), None),
    ],
)
def test_local_devices_are_started_once_for_all_configurations(
    rig: FakeRig, words: list[str], devices: tuple[str, ...], threads: int | None
) -> None:
    assert main(["bench", "--list-devices", *words]) == 0
    assert rig.settings is not None
    assert rig.settings.local_devices == devices
    assert rig.settings.worker_threads == threads


def test_local_devices_without_a_number_share_the_cores(
    rig: FakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caravan.llm.cores.physical_cores", lambda: 12)
    words = ["-dev", "local:CPU/local:CPU,local:CPU:1", "--local-workers", "2"]
    assert main(["bench", "--list-devices", *words]) == 0
    assert rig.settings is not None
    assert rig.settings.worker_threads == 3


@pytest.mark.parametrize(("words", "direct"), [([], True), (["--no-direct-copies"], False)])
def test_direct_copies(rig: FakeRig, words: list[str], direct: bool) -> None:
    assert main(["bench", "--list-devices", "-rpc", "a:1", *words]) == 0
    assert rig.settings is not None
    assert rig.settings.direct_copies is direct


@pytest.mark.parametrize("words", [[], ["--wire-dtype", "f16"], ["--wire-dtype", "bf16"]])
def test_wire_dtype(rig: FakeRig, words: list[str]) -> None:
    assert main(["bench", "--list-devices", "-rpc", "a:1", *words]) == 0
    assert rig.settings is not None
    assert rig.settings.wire_dtype == ([*words, "f32"][1] if words else "f32")


def test_a_wire_dtype_that_there_is_not(rig: FakeRig, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list-devices", "--wire-dtype", "q8_0"]) == 2
    assert "--wire-dtype" in capsys.readouterr().err
    assert rig.settings is None


def test_negative_value_after_an_option(rig: FakeRig, model: str) -> None:
    assert main(["bench", "-m", model, "-p", "1", "-n", "0", "-ngl", "-1", "-o", "none"]) == 0


@pytest.mark.parametrize("place", [0, 2, 4])
def test_list_devices_wherever_it_stands(
    rig: FakeRig, capsys: pytest.CaptureFixture[str], place: int
) -> None:
    words = ["-rpc", "a:1", "-m", "nowhere.gguf"]
    words.insert(place, "--list-devices")
    assert main(["bench", *words]) == 0
    assert capsys.readouterr().out.startswith("Available devices:\n  RPC0: ")
    assert endpoints(rig) == ("a:1",)


def test_endpoints_from_the_environment(rig: FakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_RPC", "c:3")
    assert main(["bench", "--list-devices"]) == 0
    assert endpoints(rig) == ("c:3",)
    monkeypatch.setenv("CARAVAN_RPC", "d:4,e")
    assert main(["bench", "--list-devices"]) == 0
    assert endpoints(rig) == ("d:4", "e:50052")
    assert main(["bench", "--list-devices", "--rpc", "a:1", "-rpc", "b:2"]) == 0
    assert endpoints(rig) == ("a:1", "b:2")
    assert main(["bench", "--list-devices", "--local-workers", "1"]) == 0
    assert endpoints(rig) == ()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-mmp", "1"], "no such option '-mmp'"),
        (["--bogus"], "--bogus"),
        (["-t4"], "-t4"),
        (["stray"], "stray"),
        (["-p"], "requires an argument"),
        (["-p", "x"], "--n-prompt: 'x' is no number"),
        (["-r", "-1"], "-r"),
        (["--delay", "nan"], "nan is not a time from 0 to"),
        (["-r", "0"], "'--repetitions': 0 is not in the range"),
        (["-ts", "1/1/1"], "more shares than devices (2)"),
        (["-o", "xml"], "xml"),
        (["-sm", "row"], "--split-mode row is not supported yet"),
        (["-hf", "a/b"], "--hf-repo is not supported yet"),
        (["--numa", "isolate"], "--numa is not supported yet"),
        (["-rpc", ""], "no endpoint"),
        (["-rpc", "a:x"], "port 'x'"),
        (["-rpc", "a:1", "--local-workers", "1"], "exclude each other"),
        (["--local-workers", "2", "-t", "1,2"], "one value"),
        (["-dev", "local:CPU", "-t", "1,2"], "one value"),
        (["-dev", "local:CPU:0"], "--device: device 'CPU:0': threads must be a number"),
        (["-dev", "RPC0/CPU"], "CPU computes what is on no device"),
        (["-dev", "RPC9"], "no device 'RPC9'"),
    ],
)
def test_wrong_usage_is_told_and_exits_2(
    rig: FakeRig, model: str, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert main(["bench", "-m", model, *words]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.out == ""


def test_missing_model_exits_1(rig: FakeRig, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-m", "/nowhere/x.gguf"]) == 1
    assert capsys.readouterr().err.startswith("caravan: error: no model file /nowhere/x.gguf")


def test_offline_does_not_fetch(
    rig: FakeRig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path))
    assert main(["bench", "-m", "smollm2", "--offline"]) == 1
    assert "--offline" in capsys.readouterr().err


def test_a_trace_is_written_whatever_ends_the_run(rig: FakeRig, model: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    words = ["bench", "-m", model, "-o", "none", "--trace", str(path)]
    assert main(words) == 0
    check(json.loads(path.read_text()))
    path.write_text("old")

    def interrupt() -> None:
        raise KeyboardInterrupt

    rig.on_decode = interrupt
    assert main(words) == 130
    check(json.loads(path.read_text()))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.gguf", "t.json"]


def test_a_trace_that_cannot_be_written_is_refused_before_anything(
    rig: FakeRig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # not even the model is looked for
    words = ["bench", "-m", "/nowhere/x.gguf", "--trace"]
    for path, text in ((tmp_path / "no" / "t.json", "No such file"), (tmp_path, "Is a directory")):
        assert main([*words, str(path)]) == 2
        assert capsys.readouterr().err == f"caravan: error: cannot write {path}: {text}\n".replace(
            "No such file", "No such file or directory"
        )
    assert rig.log == []


@pytest.mark.parametrize(
    ("formats", "noted"),
    [
        (["-o", "md"], False),
        (["-o", "csv"], True),
        (["-o", "sql", "-oe", "csv"], True),
        (["-o", "csv", "-oe", "jsonl"], False),
    ],
)
def test_a_format_that_does_not_show_utilization_is_noted(
    rig: FakeRig, model: str, formats: list[str], noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError, match="how busy"):
        command.main(["-m", model, "--utilization", *formats], standalone_mode=False)
    note = "caravan: note: only md, json and jsonl show the utilization"
    assert (note in capsys.readouterr().err.splitlines()) == noted
    command.main(["-m", model, "-r", "1", *formats], standalone_mode=False)
    assert note not in capsys.readouterr().err


@pytest.mark.parametrize(("workers", "noted"), [((), True), (("--local-workers", "1"), False)])
def test_utilization_without_workers_is_noted(
    rig: FakeRig,
    model: str,
    workers: tuple[str, ...],
    noted: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(AssertionError, match="how busy"):
        command.main(["-m", model, "--utilization", *workers], standalone_mode=False)
    note = "caravan: note: without workers there is no utilization to show"
    assert (note in capsys.readouterr().err.splitlines()) == noted


def test_utilization_is_passed_on(rig: FakeRig, model: str) -> None:
    with pytest.raises(AssertionError, match="how busy"):
        command.main(["-m", model, "--utilization"], standalone_mode=False)


def test_ctrl_c_exits_130(rig: FakeRig, model: str) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    rig.on_decode = interrupt
    assert main(["bench", "-m", model]) == 130
    assert rig.log[-1] == "close"


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(option.flags[0] in text for option in OPTIONS)
    assert "Test parameters:" in text
