"""`caravan run`: what can be refused is refused before anything is started."""

from __future__ import annotations

import contextlib
import io
import json

import click
import pytest

from caravan.cli import head as cli_head
from caravan.cli import main as cli_main
from caravan.cli import run as run_module
from caravan.errors import ConnectionClosed, ModelError, WorkerLost
from caravan.llm import opening
from caravan.llm.resume import Resume, Resumed
from pictures import check, on_track


@pytest.fixture
def nothing_starts(monkeypatch):
    def start(*arguments, **options):
        raise AssertionError("started")

    monkeypatch.setattr(opening, "LocalWorkers", start)
    monkeypatch.setattr(opening, "connect", start)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--rpc", "a:1", "--local-workers", "2"], "exclude each other"),
        (["--rpc", ""], "no endpoint"),
        (["--rpc", "a:1", "--rpc", " , "], "no endpoint"),
        (["-ts", "1/b"], "--tensor-split"),
        (["-dev", "local:CPU:0"], "--device: device 'CPU:0': threads must be a number"),
        (["-dev", "local:"], "--device: "),
        (["-dev", "RPC0,local:CPU,RPC0"], "--device: 'RPC0' is named twice"),
        (["-dev", "RPC0//RPC1"], "empty device name"),
        (["-dev", "none/RPC0"], "none stands alone"),
        (["-ts", "-1/1"], "tensor_split"),
        (["-f", "x"], "-p or -f"),
        (["-fa", "maybe"], "flash-attn"),
        (["-n", "-2"], "--predict"),
        (["-c", "-1"], "n_ctx -1"),
        (["-b", "0"], "n_batch 0"),
        (["-ub", "-1"], "n_ubatch -1"),
        (["-t", "-1"], "--threads"),
        (["-ngl", "-2"], "--n-gpu-layers"),
        (["-ctk", "f99"], "type_k 'f99'"),
        (["--temp", "-0.1"], "temp -0.1"),
        (["--temp", "inf"], "temp inf"),
        (["--top-k", "-1"], "top_k -1"),
        (["--top-p", "1.1"], "top_p 1.1 is not a number from 0 to 1"),
        (["--min-p", "-1"], "min_p -1.0 is not a number from 0 to 1"),
        (["--min-p", "nan"], "min_p nan"),
        (["--repeat-penalty", "0"], "repeat_penalty 0"),
        (["-s", "-2"], "--seed"),
        (["-s", "4294967295"], "seed 4294967295 is not a number from 0 to 4294967294"),
        (["--timeout", "0"], "--timeout"),
        (["--timeout", "nan"], "nan is not a time from 0.1 to 86400 seconds"),
        (["--timeout", "inf"], "inf is not a time"),
        (["--resume-wait", "-1"], "-1 is not a time from 0 to 86400 seconds"),
    ],
)
def test_wrong_usage(args, words, smollm2, capsys, nothing_starts):
    others = [] if "--rpc" in args else ["--local-workers", "2"]
    assert cli_main.main(["run", "-m", str(smollm2), "-p", "x", *others, *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], (True, [], [])),
        (["--no-direct-copies"], (False, [], [])),
        (["-dev", "local:CPU:1,RPC0/local:CPU:1"], (True, ["local:CPU:1"] * 2, [])),
        (["--rpc", "a:1", "-dev", "local:CPU"], (True, ["local:CPU"], ["a:1"])),
    ],
)
def test_what_is_opened(args, expected, smollm2, monkeypatch):
    def stop(wanted):
        raise ModelError(f"{(wanted.direct_copies, wanted.local_devices, [*wanted.endpoints])}")

    monkeypatch.setattr(opening, "open_workers", stop)
    monkeypatch.setenv("CARAVAN_DEBUG", "1")
    monkeypatch.delenv("CARAVAN_RPC", raising=False)
    monkeypatch.delenv("LLAMA_ARG_RPC", raising=False)
    with pytest.raises(ModelError) as caught:
        cli_main.main(["run", "-m", str(smollm2), "-p", "x", *args])
    assert str(caught.value) == str(expected)


def test_wire_dtype(smollm2, monkeypatch, capsys):
    def stop(wanted):
        raise ModelError(f"as {wanted.wire_dtype}")

    monkeypatch.setattr(opening, "open_workers", stop)
    for words in ([], ["--wire-dtype", "bf16"]):
        assert cli_main.main(["run", "-m", str(smollm2), "-p", "x", *words]) == 1
        assert f"as {[*words, 'f32'][1] if words else 'f32'}\n" in capsys.readouterr().err
    assert cli_main.main(["run", "-m", str(smollm2), "-p", "x", "--wire-dtype", "i8"]) == 2


def test_what_is_not_as_it_was_asked_for_is_said_once(monkeypatch, capsys):
    cluster = contextlib.nullcontext()
    cluster.notes, cluster.devices = ["lab1:50052 is old"], ()
    monkeypatch.setattr(opening, "connect", lambda endpoints, **options: cluster)
    with opening.open_workers(opening.Workers(["lab1:50052"], wire_dtype="f16")):
        pass
    assert capsys.readouterr() == ("", "caravan: note: lab1:50052 is old\n")


def test_a_prompt_there_must_be(smollm2, capsys):
    assert cli_main.main(["run", "-m", str(smollm2)]) == 2
    assert "-p or -f" in capsys.readouterr().err


def test_no_worker_is_started_for_a_file_that_is_no_model(tmp_path, capsys, nothing_starts):
    path = tmp_path / "m.gguf"
    path.touch()
    assert cli_main.main(["run", "-m", str(path), "-p", "x", "--local-workers", "1"]) == 1
    assert capsys.readouterr().err.endswith("m.gguf is not a GGUF file: it is empty\n")


def test_a_context_smaller_than_the_prompt(smollm2, capsys):
    """The engine makes it 256 tokens, so that it would fit."""
    args = ["-m", str(smollm2), "-p", "One two three four five six seven", "-n", "1"]
    assert cli_main.main(["run", *args, "-c", "6"]) == 2
    out, err = capsys.readouterr()
    told = "a prompt of 7 tokens does not fit into a context of 6"
    assert (out, err) == ("", f"caravan: error: {told}\n")
    assert cli_main.main(["run", *args, "-c", "7"]) == 0


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        (b"two\nlines\n", "two\nlines"),
        (b"an empty one after\n\n", "an empty one after\n"),
        (b"none", "none"),
        (b"\n", ""),
        (b"caf\xe9", "caf\ufffd"),
    ],
)
def test_one_newline_at_the_end_of_a_file_is_not_the_prompts(
    content, prompt, tmp_path, monkeypatch
):
    (tmp_path / "prompt").write_bytes(content)
    assert run_module._prompt(None, str(tmp_path / "prompt")) == prompt
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))
    assert run_module._prompt("-", None) == prompt


def test_the_text_of_an_option_is_taken_as_it_is():
    assert run_module._prompt("x\n", None) == "x\n"


def test_a_prompt_file_that_is_not_there(tmp_path, smollm2, capsys):
    assert cli_main.main(["run", "-m", str(smollm2), "-f", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_a_run_on_this_machine_alone_tells_its_device(smollm2, capsys):
    args = ["-m", str(smollm2), "-p", "One two three", "-n", "2", "-dev", "none"]
    assert cli_main.main(["run", *args]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("CPU (")]
    assert line.endswith("): layers 0-29 + output; weights 92.1 MiB")


def test_layers_that_stay_here_are_told_beside_those_of_the_workers(smollm2, capsys):
    args = ["-m", str(smollm2), "-p", "One two three", "-n", "2", "-ngl", "11"]
    assert cli_main.main(["run", *args, "--local-workers", "1"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["CPU", "RPC0"]
    assert "): layers 0-19" in lines[-2]
    assert "): layers 20-29 + output; weights " in lines[-1]


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([0, 1, 2], "layers 0-2"),
        ([0], "layer 0"),
        ([29, 30], "layer 29 + output"),
        ([28, 29, 30], "layers 28-29 + output"),
        ([30], "no layers + output"),
        ([], "no layers"),
    ],
)
def test_layers_for_people(layers, text):
    assert run_module._layers(layers, 30) == text


def test_local_workers_come_before_endpoints_of_the_environment(smollm2, capsys, monkeypatch):
    monkeypatch.setenv("CARAVAN_RPC", "nowhere.invalid:1")
    args = ["-m", str(smollm2), "-p", "One two three", "-n", "2", "--temp", "0"]
    assert cli_main.main(["run", *args, "--local-workers", "1"]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert "prompt: 3 tokens" in err or "prompt: 4 tokens" in err
    assert "RPC0 (127.0.0.1:" in err


def test_a_trace_of_a_run(smollm2, tmp_path, capsys):
    path = tmp_path / "t.json"
    args = ["-m", str(smollm2), "-p", "One two three", "-n", "4", "--temp", "0"]
    args += ["--split=memory", "--local-workers", "2", "--trace", str(path)]
    assert cli_main.main(["run", *args]) == 0
    read = json.loads(path.read_text())
    check(read)
    assert len([span for span in on_track(read, "RPC1") if span["name"] == "graph"]) >= 4
    assert "trace:" not in capsys.readouterr().err


def test_a_trace_that_cannot_be_written_is_refused_before_anything(
    nothing_starts, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(cli_head, "model_path", lambda name: pytest.fail("looked for the model"))
    path = tmp_path / "nowhere" / "t.json"
    args = ["-m", "x", "-p", "x", "--local-workers", "2", "--trace", str(path)]
    assert cli_main.main(["run", *args]) == 2
    expected = f"caravan: error: cannot write {path}: No such file or directory\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("command", ["run", "bench"])
def test_a_trace_does_not_overwrite_the_model(command, nothing_starts, tmp_path, capsys):
    model = tmp_path / "m.gguf"
    model.write_text("precious")
    (tmp_path / "link").symlink_to(model)
    prompt = ["-p", "x"] if command == "run" else ["-p", "1"]
    args = [command, "-m", str(model), *prompt, "--trace", str(tmp_path / "link")]
    assert cli_main.main(args) == 2
    assert "would overwrite the model" in capsys.readouterr().err
    assert model.read_text() == "precious"


def test_what_is_told_after_the_text_begins_a_new_line_on_a_screen(monkeypatch, capsys, tmp_path):
    def complete(head, prompt, max_tokens, sampling, text):
        text.write("once")
        raise ModelError("lost")

    monkeypatch.setattr(run_module, "_run", complete)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert cli_main.main(["run", "-m", "x", "-p", "x"]) == 1
    assert capsys.readouterr() == ("once\n", "caravan: error: lost\n")


def test_a_loss_is_told_between_two_parts_of_the_text(monkeypatch, capsys):
    lost = WorkerLost("a:1", "RPC0", "GET", ConnectionClosed("it closed"))

    class Bars:
        def end(self) -> None:
            click.echo("(bars)", err=True)

    def complete(head, prompt, max_tokens, sampling, text):
        resume = head.resume(text.end_line, Bars())
        text.write("once")
        resume.on_wait(lost, resume.wait)
        resume.on_resume(Resumed.of(lost, ("RPC0",), {}, ("RPC0",), 1.5, 3))
        text.write(" upon")
        raise ModelError("over")

    monkeypatch.setattr(run_module, "_run", complete)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert cli_main.main(["run", "-m", "x", "-p", "x", "--resume-wait", "7"]) == 1
    out, err = capsys.readouterr()
    assert out == "once\n upon\n"
    assert err.splitlines() == [
        "(bars)",
        "caravan: lost RPC0 at a:1 during GET: it closed; waiting for it, 7 s at most",
        "(bars)",
        "caravan: RPC0 at a:1 was lost during GET (it closed): back after 1.5 s, 3 tokens replayed",
        "caravan: error: over",
    ]


@pytest.mark.parametrize(("word", "expected"), [("--no-resume", False), ("-q", Resume(60.0))])
def test_what_is_done_about_a_loss(word, expected, monkeypatch):
    def complete(head, prompt, max_tokens, sampling, text):
        assert head.resume(text.end_line, None) == expected
        raise ModelError("over")

    monkeypatch.setattr(run_module, "_run", complete)
    assert cli_main.main(["run", "-m", "x", "-p", "x", word]) == 1


def test_statistics_come_before_what_went_wrong_with_a_trace(smollm2, capsys):
    args = ["-m", str(smollm2), "-p", "One two three", "-n", "1", "-t", "1"]
    assert cli_main.main(["run", *args, "--trace", "/dev/full"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[1].startswith("prompt: ")
    # one token needs no step after the prompt, and has no rate
    assert "decode: 1 tokens" in err
    assert err[-1] == "caravan: error: cannot write /dev/full: No space left on device"
