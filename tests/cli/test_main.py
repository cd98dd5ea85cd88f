"""The command's own manners: exit codes, one line for a failure, nothing heavy imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types

import click
import pytest

from caravan.cli import main as main_module
from caravan.cli.main import COMMANDS, main
from caravan.errors import EngineNotFound, ModelError, UsageError

HEAVY = ("numpy", "rich", "gguf", "xllamacpp", "ctypes", "caravan.engine", "caravan.llm")


@pytest.fixture
def command(monkeypatch):
    """Make `caravan probe` run the given function."""

    def install(function):
        module = types.ModuleType("probe_command")
        module.command = click.command("probe")(function)
        monkeypatch.setitem(sys.modules, "probe_command", module)
        monkeypatch.setitem(COMMANDS, "probe", main_module._Entry("probe_command", "Probe."))
        return lambda *arguments: main(["probe", *arguments])

    return install


def raising(exc):
    def function():
        raise exc

    return function


def test_importing_the_command_imports_nothing_heavy():
    script = f"import sys, caravan.cli.main; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_other_commands_do_without_what_the_server_needs():
    names = ("fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client")
    script = (
        "import sys, caravan.llm, caravan.batching, caravan.cli.run, caravan.cli.serve\n"
        f"print([m for m in {names!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_help_lists_every_command_and_imports_none_of_them():
    script = (
        "import sys; from caravan.cli.main import main; main(['--help'])\n"
        "print([m for m in sys.modules if m.startswith('caravan.') and m not in "
        "('caravan.errors', 'caravan.cli', 'caravan.cli.main')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    for name in COMMANDS:
        assert f"  {name} " in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_module_runs_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "caravan", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: caravan ")


def test_version_names_caravan_and_its_engine(monkeypatch, capsys):
    loaded = types.SimpleNamespace(version="0.26.0", commit="abc1234", path="/lib/engine.so")
    monkeypatch.setattr("caravan.engine.load", lambda: loaded, raising=False)
    assert main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("caravan ")
    assert lines[1] == "engine ggml 0.26.0 (abc1234), /lib/engine.so"


def test_version_without_an_engine_is_no_failure(monkeypatch, capsys):
    def load():
        raise EngineNotFound("nothing found")

    monkeypatch.setattr("caravan.engine.load", load, raising=False)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.endswith("engine not usable: nothing found\n")


def test_success_is_0(command):
    assert command(lambda: None)() == 0


def test_int_of_a_command_is_the_exit_code(command):
    assert command(lambda: 3)() == 3


def test_failure_is_1_and_one_line(command, capsys):
    assert command(raising(ModelError("no\nsuch  model")))() == 1
    assert capsys.readouterr() == ("", "caravan: error: no such model\n")


def test_wrong_value_is_2(command, capsys):
    assert command(raising(UsageError("bad endpoint")))() == 2
    assert capsys.readouterr().err == "caravan: error: bad endpoint\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("nothing", "no such command 'nothing'"),
        ("--nothing", "no such option '--nothing'"),
        ("run", "missing option '-m' / '--model'"),
        ("run -m x", "give the prompt with either -p or -f"),
        ("run -m x -fa perhaps", "invalid value for '-fa' / '--flash-attn'"),
        ("bench -mmp 1", "no such option '-mmp'"),
        ("bench -r x", "invalid value for '-r' / '--repetitions'"),
        ("bench -p x", "--n-prompt: 'x' is no number"),
        ("demo --timeout x", "invalid value for '--timeout'"),
        ("model get", "missing argument 'NAME'"),
        ("worker -p x", "invalid value for '-p' / '--port'"),
        ("worker -d CPU:x", "device 'CPU:x': threads must be"),
    ],
)
def test_wrong_usage_is_2_and_one_line(words, told, capsys):
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"caravan: error: {told}")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert not err.endswith(".\n")


@pytest.mark.parametrize("words", [[], ["model"]])
def test_no_command_shows_the_commands(words, capsys):
    main(words)
    out, err = capsys.readouterr()
    assert (out + err).startswith("Usage: caravan")
    assert "Commands:" in out + err


def test_missing_module_is_wrong_usage_not_a_traceback(monkeypatch, capsys):
    monkeypatch.setitem(COMMANDS, "later", main_module._Entry("caravan.cli.later", "Later."))
    assert main(["later"]) == 2
    assert "'later' is not part of this installation" in capsys.readouterr().err


def test_interrupt_is_130(command, capsys):
    assert command(raising(KeyboardInterrupt()))() == 130
    assert "Traceback" not in capsys.readouterr().err


def test_system_error_is_told_with_its_file(command, capsys):
    assert command(lambda: os.stat("/nonexistent/file"))() == 1
    assert capsys.readouterr().err.endswith("No such file or directory: /nonexistent/file\n")


def test_bug_is_one_line_without_a_traceback(command, capsys):
    assert command(raising(ZeroDivisionError("x")))() == 1
    err = capsys.readouterr().err
    assert err.startswith("caravan: internal error: ZeroDivisionError: x")
    assert err.count("\n") == 1


def test_debugging_shows_the_traceback(command, monkeypatch):
    monkeypatch.setenv("CARAVAN_DEBUG", "1")
    with pytest.raises(ModelError):
        command(raising(ModelError("x")))()


def test_long_options_take_underscores(command, capsys):
    run = command(click.option("--local-workers", type=int)(lambda local_workers: local_workers))
    assert run("--local_workers", "4") == 4
    assert run("--local-workers=5") == 5


PRINTER = """
import sys, types, click
from caravan.cli import main as m
module = types.ModuleType("printer")
def run():
    for _ in range(100_000):
        click.echo("line")
module.command = click.command("printer")(run)
sys.modules["printer"] = module
m.COMMANDS["printer"] = m._Entry("printer", "")
sys.exit(m.main(["printer"]))
"""


def test_reader_that_leaves_is_quiet():
    child = subprocess.Popen(
        [sys.executable, "-c", PRINTER], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with child:
        child.stdout.readline()
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 1


@pytest.mark.parametrize("words", ["--help", "model ls", "bench --help"])
def test_reader_that_was_never_there_is_quiet(words):
    """Little output fails at the last flush only."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "caravan", *words.split()], stdout=pipe, stderr=subprocess.PIPE
        )
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_under_stdout_is_one_line():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", PRINTER], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "caravan: error: No space left on device\n"


SLEEPER = PRINTER.replace("for _ in range(100_000):\n        click.echo", "if True:\n        s")
SLEEPER = SLEEPER.replace('s("line")', 'click.echo("ready"); import time; time.sleep(60)')


def test_ctrl_c_ends_with_130_and_no_traceback():
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", SLEEPER], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with child:
        assert child.stdout.readline() == b"ready\n"
        time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 130
        assert child.stderr.read().split() == [b"caravan:", b"interrupted"]
